"""Settings of the command line: which one wins, and what is said of those that cannot be used."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import interception.cli
from interception.settings import KINDS, Settings, SettingsError, default_file
from tunnel import CommandTunnelConfig, CustomTunnelConfig, PrimeTunnelConfig, SshTunnelConfig, readymade

COMMANDS = {"run": ("upstream", "model", "tunnel", "api_key_env"), "tunnel": ("type", "health")}


def settings(tmp_path: Path, text: str = "", **environ: str) -> Settings:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    return Settings.load(file, COMMANDS, environ)


def refusal(work: Any, *arguments: Any) -> str:
    with pytest.raises(SettingsError) as raised:
        work(*arguments)
    return str(raised.value)


class TestPrecedence:
    FILE = '[ssh]\nhost = "file"\nport = 1\nusername = "file"\nremote_port = 1\nstart_timeout = 1.0\n'

    def test_a_flag_wins_over_a_variable_and_that_over_the_file(self, tmp_path: Path) -> None:
        environ = {
            "INTERCEPTION_SSH_PORT": "2",
            "INTERCEPTION_SSH_USERNAME": "env",
            "INTERCEPTION_SSH_REMOTE_PORT": "2",
        }
        made = settings(tmp_path, self.FILE, **environ).tunnel("ssh", ["remote_port=3", "port=3"])
        assert made == SshTunnelConfig(host="file", username="env", port=3, remote_port=3, start_timeout=1.0)

    def test_what_an_url_says_wins_over_a_variable(self, tmp_path: Path) -> None:
        made = settings(tmp_path, self.FILE, INTERCEPTION_SSH_HOST="env").tunnel("ssh://me@flag:22")
        assert isinstance(made, SshTunnelConfig)
        assert (made.host, made.username, made.port, made.remote_port) == ("flag", "me", 22, 1)

    def test_a_policy_is_put_together_from_all_three(self, tmp_path: Path) -> None:
        text = '[ssh]\nhost = "h"\n[ssh.policy]\nrule = "plain"\nperiod = 1\nprobe_timeout = 1\n'
        made = settings(tmp_path, text, INTERCEPTION_SSH_POLICY='{"period": 2, "probe_timeout": 2}').tunnel(
            "ssh", ["policy.probe_timeout=3"]
        )
        assert made is not None
        assert (made.policy.rule, made.policy.period, made.policy.probe_timeout) == ("plain", 2.0, 3.0)

    def test_lists_are_json_or_words_of_a_shell(self, tmp_path: Path) -> None:
        made = settings(tmp_path, INTERCEPTION_SSH_CLIENT_KEYS='["/a b", "/c"]', INTERCEPTION_SSH_HOST="h").tunnel(
            "ssh"
        )
        assert isinstance(made, SshTunnelConfig)
        assert made.client_keys == (Path("/a b"), Path("/c"))
        made = settings(tmp_path).tunnel("command", ["command=client --to '127.0.0.1:{port}'", "url_pattern=http.*"])
        assert isinstance(made, CommandTunnelConfig)
        assert made.command == ("client", "--to", "127.0.0.1:{port}")

    @pytest.mark.parametrize(("flag", "variable", "file", "wins"), [
        (True, True, True, "flag"), (False, True, True, "variable"), (False, False, True, "file"),
        (False, False, False, "default"),
    ])  # fmt: skip
    def test_options_of_a_command(self, tmp_path: Path, flag: bool, variable: bool, file: bool, wins: str) -> None:
        """Told by what the option is refused as: each names a variable for the key that is not set."""
        path = tmp_path / "interception.toml"
        path.write_text('[run]\napi-key-env = "FILE"\n' if file else "")
        environ = {"INTERCEPTION_RUN_API_KEY_ENV": "VARIABLE"} if variable else {}
        arguments = ["--config", str(path), "run", *(["--api-key-env", "FLAG"] if flag else []), "no-such-program"]
        ran = CliRunner().invoke(interception.cli.app, arguments, env=environ)
        if wins == "default":
            assert (ran.exit_code, "no-such-program" in ran.output) == (127, True)
        else:
            assert (ran.exit_code, f"{wins.upper()} is not set" in ran.output) == (2, True)


class TestNames:
    @pytest.mark.parametrize(("name", "kind"), [
        ("prime", PrimeTunnelConfig), ("cloudflared", CommandTunnelConfig), ("ngrok", CommandTunnelConfig),
        ("localtunnel", CommandTunnelConfig), ("ssh://h", SshTunnelConfig),
    ])  # fmt: skip
    def test_each_stands_for_its_tunnel(self, tmp_path: Path, name: str, kind: type) -> None:
        assert isinstance(settings(tmp_path).tunnel(name), kind)

    @pytest.mark.parametrize(("name", "host", "port", "username"), [
        ("ssh://MyRelay", "MyRelay", 22, None), ("ssh://me@R:2222", "R", 2222, "me"),
        ("ssh://[::1]:2222", "::1", 2222, None), ("ssh://me%40corp@R", "R", 22, "me@corp"),
    ])  # fmt: skip
    def test_a_relay_is_taken_as_it_is_written(
        self, tmp_path: Path, name: str, host: str, port: int, username: str | None
    ) -> None:
        made = settings(tmp_path).tunnel(name)
        assert isinstance(made, SshTunnelConfig)
        assert (made.host, made.port, made.username) == (host, port, username)

    def test_none_is_none(self, tmp_path: Path) -> None:
        assert settings(tmp_path).tunnel("none") is None
        assert "nothing to --set" in refusal(settings(tmp_path).tunnel, "none", ["port=1"])

    def test_a_ready_made_one_is_itself_and_may_be_changed(self, tmp_path: Path) -> None:
        made = settings(tmp_path, '[command]\ncommand = ["other"]\nurl_pattern = "x"\n')
        assert made.tunnel("cloudflared") == readymade.cloudflared()
        changed = made.tunnel("ngrok", ['env={"NGROK_AUTHTOKEN": "t"}', "start_timeout=5"])
        assert isinstance(changed, CommandTunnelConfig)
        assert (changed.env, changed.start_timeout) == ({"NGROK_AUTHTOKEN": "t"}, 5.0)
        assert changed.command == readymade.ngrok().command

    def test_custom_comes_from_the_file(self, tmp_path: Path) -> None:
        made = settings(tmp_path, '[custom]\nurl = "https://a.example"\nport = 8080\n').tunnel("custom")
        assert made == CustomTunnelConfig(url="https://a.example", port=8080)

    def test_what_could_be_an_option_is_no_relay(self, tmp_path: Path) -> None:
        assert "not a host" in refusal(settings(tmp_path).tunnel, "ssh://-oProxyCommand=touch")

    @pytest.mark.parametrize(
        "name", ["", "shh", "http://relay", "ssh://", "ssh://h:0x1", "ssh://h:99999", "ssh://h/path"]
    )
    def test_a_name_that_is_none_is_told(self, tmp_path: Path, name: str) -> None:
        assert "write none, prime, ssh://" in refusal(settings(tmp_path).tunnel, name)

    def test_a_password_is_refused_and_not_quoted(self, tmp_path: Path) -> None:
        said = refusal(settings(tmp_path).tunnel, "ssh://me:hunter22@relay")
        assert "not by password" in said
        assert "hunter22" not in said

    def test_a_variable_of_the_program_is_set_by_itself(self, tmp_path: Path) -> None:
        text = '[command]\ncommand = ["client"]\nurl = "https://c"\nenv = {A = "file", B = "file"}\n'
        made = settings(tmp_path, text).tunnel("command", ["env.B=x=1", "env.C=2"])
        assert isinstance(made, CommandTunnelConfig)
        assert made.env == {"A": "file", "B": "x=1", "C": "2"}


class TestMistakes:
    def test_all_unknown_keys_are_one_error_with_what_was_meant(self, tmp_path: Path) -> None:
        text = 'runs = 1\n[run]\nupstraem = "u"\n[ssh]\nhots = "h"\n[shh]\nhost = "h"\n'
        said = refusal(settings, tmp_path, text)
        assert "run.upstraem (did you mean upstream?)" in said
        assert "ssh.hots (did you mean host?)" in said
        assert "[shh] (did you mean ssh?)" in said
        assert "[runs]" in said
        assert str(tmp_path) in said

    def test_a_table_is_wanted(self, tmp_path: Path) -> None:
        assert "must be a table: write [run]" in refusal(settings, tmp_path, "run = 1\n")

    def test_text_that_is_no_toml(self, tmp_path: Path) -> None:
        assert "is no TOML" in refusal(settings, tmp_path, "[run\n")

    def test_a_file_that_is_named_must_be_there_and_the_users_own_need_not(self, tmp_path: Path) -> None:
        assert "cannot be read" in refusal(Settings.load, tmp_path / "none.toml", COMMANDS, {})
        assert Settings.load(None, COMMANDS, {"XDG_CONFIG_HOME": str(tmp_path)}).tunnel("prime") == PrimeTunnelConfig()

    def test_the_users_own_is_read(self, tmp_path: Path) -> None:
        file = default_file({"HOME": str(tmp_path)})
        assert file == tmp_path / ".config" / "interception.toml"
        file.parent.mkdir()
        file.write_text('[prime]\nname = "mine"\n')
        assert Settings.load(None, COMMANDS, {"HOME": str(tmp_path)}).tunnel("prime") == PrimeTunnelConfig(name="mine")

    def test_one_in_the_present_folder_is_not(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "interception.toml").write_text('[prime]\nname = "a stranger\'s"\n')
        monkeypatch.chdir(tmp_path)
        made = Settings.load(None, COMMANDS, {"HOME": str(tmp_path / "home")}).tunnel("prime")
        assert made == PrimeTunnelConfig()

    @pytest.mark.parametrize("environ", [{}, {"HOME": ""}, {"HOME": "."}, {"XDG_CONFIG_HOME": ".config"}])
    def test_nor_by_way_of_a_home_that_is_no_absolute_path(self, environ: dict[str, str]) -> None:
        assert default_file(environ).is_absolute()

    def test_a_user_whom_nobody_has_entered_has_no_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("os.getuid", lambda: 2**31 - 5)
        assert default_file({}) == Path("/.config/interception.toml")

    def test_a_field_that_is_missing_says_where_it_can_be_given(self, tmp_path: Path) -> None:
        said = refusal(settings(tmp_path).tunnel, "ssh")
        assert "--set host=…" in said
        assert "INTERCEPTION_SSH_HOST" in said
        assert f"[ssh] host in {tmp_path}" in said

    @pytest.mark.parametrize(("assignment", "said"), [
        ("prot=1", "has no prot (did you mean port?)"), ("port", "FIELD=VALUE"),
        ("port=x", "port (of --set): Input should be"),
        ("policy.perod=1", "did you mean period?"), ("policy=[", "cannot be read"), ("client_keys='", "cannot be read"),
        ("a.b=1", "has no a: it has policy, mark, host"), ("url=https://{hots}", "URL template"),
        ("port.b=1", "port of the ssh tunnel has no parts"),
        ("jump=gate:99999", "not jump hosts"), ("jump=gate:0", "not jump hosts"), ("jump=a,-oX=y", "not jump hosts"),
        ("jump=-l@gate", "not jump hosts"), ("host=-oProxyCommand=x", "not a host"), ("host=me@h", "not a host"),
        ("host=a b", "not a host"), ("host=", "not a host"), ("host=a\nb", "not a host"), ("username=-x", "not a user"),
    ])  # fmt: skip
    def test_assignments(self, tmp_path: Path, assignment: str, said: str) -> None:
        assert said in refusal(settings(tmp_path).tunnel, "ssh://h", [assignment])

    def test_a_value_of_many_is_refused_where_one_is_wanted(self, tmp_path: Path) -> None:
        assert "run.upstream must be a single value" in refusal(
            settings(tmp_path, '[run]\nupstream = ["a"]\n').options, "run"
        )

    @pytest.mark.parametrize(("text", "said"), [
        ('demo]\nrollouts = "many"', "demo.rollouts: Input should be a valid integer"),
        ("demo]\nrollouts = true", "demo.rollouts: not true or false"),
        ("doctor]\njson = 1", "doctor.json: true or false is wanted"),
        ('demo]\ntunnel = "prim"', "demo.tunnel: "),
    ])  # fmt: skip
    def test_an_option_of_the_file_that_does_not_fit_is_told_by_its_place(
        self, tmp_path: Path, text: str, said: str
    ) -> None:
        file = tmp_path / "interception.toml"
        file.write_text(f"[{text}\n")
        ran = CliRunner().invoke(interception.cli.app, ["--config", str(file), "run", "true"])
        assert f"{file}: {said}" in str(ran.exception)

    def test_a_field_that_does_not_fit_says_where_it_comes_from(self, tmp_path: Path) -> None:
        text = '[ssh]\nhost = "h"\nclient_keys = "a"\npolicy = 5\n'
        said = refusal(settings(tmp_path, text, INTERCEPTION_SSH_PORT="x").tunnel, "ssh", ["remote_port=y"])
        assert f"client_keys (of {tmp_path}/settings.toml): a list is wanted" in said
        assert "a table is wanted" in said
        assert "port (of INTERCEPTION_SSH_PORT): Input should be a valid integer" in said
        assert "remote_port (of --set): Input should be a valid integer" in said
        assert "host (of ssh://-x): not a host" in refusal(settings(tmp_path, text).tunnel, "ssh://-x")

    def test_a_variable_that_means_nothing_is_told_but_no_error(self, tmp_path: Path) -> None:
        made = settings(
            tmp_path, INTERCEPTION_SSH_HOTS="h", INTERCEPTION_SSH_HOST="h", INTERCEPTION_CONFIG="c", OTHER="1"
        )
        [line] = made.strays(["INTERCEPTION_CONFIG"])
        assert line == "the variable INTERCEPTION_SSH_HOTS means nothing (did you mean INTERCEPTION_SSH_HOST?)"

    def test_no_error_quotes_a_token(self, tmp_path: Path) -> None:
        text = '[command]\ncommand = ["client", "sk-secret-1"]\nenv = {TOKEN = 5}\nurl_pattern = "("\n'
        said = refusal(settings(tmp_path, text).tunnel, "command")
        assert "sk-secret-1" not in said
        assert "not a regular expression" in said

    def test_nor_a_password_in_a_url_template(self, tmp_path: Path) -> None:
        said = refusal(settings(tmp_path).tunnel, "ssh://h", ["url=https://me:sk-secret-1@{host}"])
        assert "not a URL" in said
        assert "sk-secret-1" not in said

    def test_an_option_of_run_that_is_misspelt_is_not_taken_for_the_program(self) -> None:
        ran = CliRunner().invoke(interception.cli.app, ["run", "--upstrem=sk-secret-1", "true"])
        assert ran.exit_code == 2
        assert "--upstrem" in ran.output
        assert "sk-secret-1" not in ran.output

    def test_commands_print_one_line_and_no_traceback(self, tmp_path: Path) -> None:
        file = tmp_path / "interception.toml"
        file.write_text("[rnu]\n")
        ran = CliRunner().invoke(interception.cli.app, ["--config", str(file), "run", "true"])
        assert isinstance(ran.exception, SettingsError)  # which main() prints, and exits with 2


def test_every_field_can_be_set_by_a_variable() -> None:
    """No two kinds and fields share a variable, and none is an option's."""
    names = [f"{kind}_{field}" for kind, config in KINDS.items() for field in config.model_fields if field != "type"]
    assert len(set(names)) == len(names)
    assert not any(name.startswith(("run_", "tunnel_", "demo_", "doctor_")) for name in names)
