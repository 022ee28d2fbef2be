"""Peers' environments: made once, made anew when the pin changes, and a clear word where they cannot be made."""

from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.peers import Peer, PeerUnavailableError


@pytest.fixture(autouse=True)
def environments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(peers, "ENVIRONMENTS", tmp_path / "peers")
    return tmp_path / "peers"


@pytest.mark.parametrize("file", sorted(peers.HERE.glob("*.txt")), ids=lambda file: file.stem)
def test_each_peer_is_pinned(file: Path) -> None:
    peer = Peer.named(file.stem)
    assert peer.subject == f"{file.stem}-{peer.version}"
    assert peer.version[0].isdigit()


@pytest.mark.parametrize("text", ["peer", "peer>=1", "other==1", "peer==1\nother==2"])
def test_a_peer_that_is_not_pinned_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    monkeypatch.setattr(peers, "HERE", tmp_path)
    (tmp_path / "peer.txt").write_text(text)
    with pytest.raises(ValueError, match="must be one line peer==VERSION"):
        Peer.named("peer")


def test_an_environment_is_made_once_and_anew_when_the_pin_changes(
    monkeypatch: pytest.MonkeyPatch, environments: Path
) -> None:
    made: list[str] = []

    def make(peer: Peer, home: Path) -> None:
        made.append(peer.version)
        home.mkdir(exist_ok=True)

    monkeypatch.setattr(Peer, "_make", make)
    assert Peer("peer", "1").python() == environments / "peer" / "bin" / "python"
    Peer("peer", "1").python()
    Peer("peer", "2").python()
    assert made == ["1", "2"]


def test_one_that_was_not_made_to_its_end_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def make(peer: Peer, home: Path) -> None:
        made.append(peer.version)
        home.mkdir(exist_ok=True)
        if len(made) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Peer, "_make", make)
    with pytest.raises(KeyboardInterrupt):
        Peer("peer", "1").python()
    Peer("peer", "1").python()
    assert made == ["1", "1"]


def test_where_pip_finds_nothing_the_peer_and_the_reason_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(peers, "HERE", tmp_path)
    (tmp_path / "no-such-peer.txt").write_text("no-such-peer==1.0\n")
    with pytest.raises(PeerUnavailableError, match=r"no-such-peer-1\.0 cannot be installed here") as caught:
        Peer.named("no-such-peer").python()
    assert "No matching distribution found for no-such-peer==1.0" in str(caught.value)
