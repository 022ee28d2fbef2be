"""What the command line goes by: flags, then `INTERCEPTION_…` variables, then a TOML file, then the defaults.

The file has a table for each command (its options) and one for each kind of tunnel (the fields of its config):

    [run]
    upstream = "http://gpu:8000/v1"
    tunnel = "ssh"

    [ssh]
    host = "relay.example"
    policy.give_up_after = 300

So `INTERCEPTION_RUN_UPSTREAM` and `INTERCEPTION_SSH_HOST` win over it, and `--upstream` and `--set host=…` over those.
"""

import difflib
import json
import os
import pwd
import shlex
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args
from urllib.parse import unquote, urlsplit

from pydantic import BaseModel, ValidationError

from tunnel import (
    CommandTunnelConfig,
    CustomTunnelConfig,
    KeepAlivePolicy,
    PrimeTunnelConfig,
    SshTunnelConfig,
    TunnelConfig,
    readymade,
)

PREFIX = "INTERCEPTION_"

KINDS: dict[str, type[PrimeTunnelConfig | SshTunnelConfig | CommandTunnelConfig | CustomTunnelConfig]] = {
    "prime": PrimeTunnelConfig,
    "ssh": SshTunnelConfig,
    "command": CommandTunnelConfig,
    "custom": CustomTunnelConfig,
}

TUNNELS = f"prime, ssh://[USER@]HOST[:PORT], ssh, command, custom, {', '.join(readymade.BY_NAME)}"
"""What may be written for a tunnel, beside none."""


class SettingsError(Exception):
    """A setting cannot be used; the text says where it stands and what to do."""


def default_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Where settings are read from if nothing else is said. Never the present folder: a repository that was cloned
    could else send the upstream's key where it likes. So a relative XDG_CONFIG_HOME counts for nothing (as its
    specification says), nor does a HOME that is one, or is empty."""
    given = Path(environ.get("XDG_CONFIG_HOME", ""))
    home = Path(environ.get("HOME", ""))
    if not home.is_absolute():
        try:
            home = Path(pwd.getpwuid(os.getuid()).pw_dir)
        except KeyError:  # a container's user that nobody has entered
            home = Path("/")
    return (given if given.is_absolute() else home / ".config") / "interception.toml"


class Settings:
    """Those of a file, over which variables of `environ` win; flags come with each call."""

    def __init__(self, tables: Mapping[str, Any], source: str, environ: Mapping[str, str]) -> None:
        self._tables = tables
        self.source = source
        """The file; empty if there is none."""
        self._environ = environ

    @classmethod
    def load(
        cls,
        file: Path | None,
        commands: Mapping[str, Collection[str]],
        environ: Mapping[str, str] = os.environ,
    ) -> "Settings":
        """Those of `file`, which must be there, or else of the user's own, if it is. `commands`: options by command.

        Raises `SettingsError`, which names all unknown keys at once.
        """
        path = file or default_file(environ)
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            if file is None and isinstance(error, FileNotFoundError | NotADirectoryError):
                return cls({}, "", environ)
            raise SettingsError(f"{path} cannot be read: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SettingsError(f"{path} is no TOML: {error}") from None
        known: dict[str, Collection[str]] = {**commands, **{kind: _fields(kind) for kind in KINDS}}
        _refuse_unknown(tables, known, str(path))
        tables = {
            name: {_plain(key): value for key, value in table.items()} if name in commands else table
            for name, table in tables.items()
        }
        return cls(tables, str(path), environ)

    def options(self, command: str) -> dict[str, Any]:
        """The file's options of a command."""
        table = dict(self._tables.get(command, {}))
        for key, value in table.items():
            if not isinstance(value, str | int | float | bool):
                raise SettingsError(f"{self.source}: {command}.{key} must be a single value")
        return table

    def strays(self, known: Collection[str]) -> list[str]:
        """A line for each variable that looks like one of ours and is none. `known`: those of the options."""
        names = {*known, *(_variable(kind, field) for kind in KINDS for field in _fields(kind))}
        return [
            f"the variable {name} means nothing{_guess(name, names)}"
            for name in sorted(self._environ)
            if name.startswith(PREFIX) and name not in names
        ]

    def tunnel(self, name: str, assignments: Iterable[str] = ()) -> TunnelConfig | None:
        """The tunnel that `name` stands for (see `TUNNELS`; none: None), with FIELD=VALUE assignments.

        Raises `SettingsError`. A `name` that is none is not quoted: a password may stand in it.
        """
        if name == "none":
            if [*assignments]:
                raise SettingsError("without a tunnel there is nothing to --set")
            return None
        if name in readymade.BY_NAME:
            ready = readymade.BY_NAME[name]()
            kind = "command"
            fields = {key: getattr(ready, key) for key in ready.model_fields_set}
            origins = dict.fromkeys(fields, name)
        else:
            kind, given = _parse(name)
            of_file, of_environ = self._of_file(kind), self._of_environ(kind)
            fields = _merged(_merged(of_file, of_environ), given)
            origins = {
                **dict.fromkeys(of_file, self.source),
                **{field: _variable(kind, field) for field in of_environ},
                **dict.fromkeys(given, name),
            }
        for assignment in assignments:
            field, equals, value = assignment.partition("=")
            if not equals:
                raise SettingsError(f"--set takes FIELD=VALUE, not {assignment!r}")
            fields = _merged(fields, self._assigned(kind, field, value))
            origins[field.partition(".")[0]] = "--set"
        try:
            return KINDS[kind].model_validate({**fields, "type": kind})
        except ValidationError as error:
            raise SettingsError(f"the {kind} tunnel: {self._explain(kind, error, origins)}") from None

    # -- parts ---------------------------------------------------------------------------------

    def _of_file(self, kind: str) -> dict[str, Any]:
        return dict(self._tables.get(kind, {}))

    def _of_environ(self, kind: str) -> dict[str, Any]:
        found = {}
        for field in _fields(kind):
            name = _variable(kind, field)
            if name in self._environ:
                found[field] = _value(kind, field, self._environ[name], name)
        return found

    def _assigned(self, kind: str, field: str, value: str) -> dict[str, Any]:
        field, _, part = field.partition(".")
        if part and field == "policy":
            if part not in KeepAlivePolicy.model_fields:
                raise SettingsError(f"--set: a policy has no {part}{_guess(part, KeepAlivePolicy.model_fields)}")
            return {"policy": {part: value}}
        if part and kind == "command" and field == "env":
            return {"env": {part: value}}
        if field not in _fields(kind):
            near = _guess(field, _fields(kind)) or f": it has {', '.join(_fields(kind))}"
            raise SettingsError(f"--set: the {kind} tunnel has no {field}{near}")
        if part:
            raise SettingsError(f"--set: {field} of the {kind} tunnel has no parts")
        return {field: _value(kind, field, value, f"--set {field}")}

    def _explain(self, kind: str, error: ValidationError, origins: Mapping[str, str]) -> str:
        faults = []
        for fault in error.errors():
            place = ".".join(str(part) for part in fault["loc"])
            text = WANTED.get(fault["type"]) or fault["msg"].removeprefix("Value error, ")
            if fault["type"] == "missing":
                text = (
                    f"missing: give it by --set {place}=…, {_variable(kind, place)} or "
                    f"[{kind}] {place} in {self.source or default_file(self._environ)}"
                )
            elif (origin := origins.get(place.partition(".")[0])) is not None:
                place += f" (of {origin})"
            faults.append(f"{place}: {text}" if place else text)
        return "; ".join(faults)


WANTED = {"tuple_type": "a list is wanted", "dict_type": "a table is wanted", "model_type": "a table is wanted"}
"""By the type of pydantic's error, whose own words are of Python."""


def _variable(kind: str, field: str) -> str:
    return PREFIX + f"{kind}_{field}".upper()


def _fields(kind: str) -> list[str]:
    return [field for field in KINDS[kind].model_fields if field != "type"]


def _plain(option: str) -> str:
    return option.replace("-", "_")


def _refuse_unknown(tables: Mapping[str, Any], known: Mapping[str, Collection[str]], source: str) -> None:
    unknown = []
    for name, table in tables.items():
        if name not in known:
            unknown.append(f"[{name}]{_guess(name, known)}")
        elif not isinstance(table, dict):
            unknown.append(f"{name}, which must be a table: write [{name}]")
        else:
            unknown += [f"{name}.{key}{_guess(key, known[name])}" for key in table if _plain(key) not in known[name]]
    if unknown:
        raise SettingsError(f"{source} has what nobody knows: {'; '.join(unknown)}")


def _guess(word: str, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(words), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _parse(name: str) -> tuple[str, dict[str, Any]]:
    """The kind of tunnel, and the fields that its name gives."""
    if name in KINDS:
        return name, {}
    try:
        parts = urlsplit(name)
        relay = parts.scheme == "ssh" and bool(parts.hostname) and not (parts.path.strip("/") or parts.query)
        port = parts.port
    except ValueError:  # a port that is no number, or too large
        relay, port = False, None
    if not relay:
        raise SettingsError(f"write none, {TUNNELS}")
    if parts.password is not None:
        raise SettingsError("SSH logs in with a key, not by password")
    # As it was written, where urlsplit has it in small letters: `~/.ssh/config` tells them apart.
    place = parts.netloc.rpartition("@")[2]
    host = place[1:].partition("]")[0] if place.startswith("[") else place.partition(":")[0]
    given = {"host": host, "port": port, "username": parts.username and unquote(parts.username)}
    return "ssh", {field: value for field, value in given.items() if value is not None}


def _value(kind: str, field: str, text: str, where: str) -> Any:
    """A field's value out of text: lists as JSON or as words of a shell, tables as JSON; pydantic reads the rest."""
    annotation = KINDS[kind].model_fields[field].annotation
    names = [annotation, *get_args(annotation)]
    is_list = any(getattr(part, "__origin__", None) is tuple for part in names)
    is_table = any(
        getattr(part, "__origin__", None) is dict or (isinstance(part, type) and issubclass(part, BaseModel))
        for part in names
    )
    try:
        if is_table or (is_list and text.lstrip().startswith("[")):
            return json.loads(text)
        return shlex.split(text) if is_list else text
    except ValueError as error:
        raise SettingsError(f"{where} cannot be read: {error}") from None


def _merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """`high` over `low`; tables (the policy) are merged key by key."""
    merged = dict(low)
    for key, value in high.items():
        below = merged.get(key)
        merged[key] = {**below, **value} if isinstance(below, dict) and isinstance(value, dict) else value
    return merged
