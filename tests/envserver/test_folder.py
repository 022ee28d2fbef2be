"""Where a pool's sockets live: nothing is left of those whose owner was killed, and nothing else is touched."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from envserver import folder
from envserver.errors import EnvServerError
from envserver.folder import LOCK, ShortFolder, remove_left_behind

OWNER = """
import os, sys
from envserver import folder
folder.SHORT_FOLDERS = (sys.argv[1],)
path = folder.ShortFolder().path
(path / "1").touch()
print(path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    parent = Path(f"/tmp/short-{os.getpid()}-{time.monotonic_ns():x}")
    parent.mkdir()
    monkeypatch.setattr(folder, "SHORT_FOLDERS", (str(parent),))
    yield parent
    shutil.rmtree(parent)


def old(path: Path) -> None:
    os.utime(path / LOCK, (time.time() - 3600, time.time() - 3600))


def owner(parent: Path) -> tuple["subprocess.Popen[str]", Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    old(path)
    return process, path


def test_one_whose_owner_was_killed_is_removed_by_the_next(parent: Path) -> None:
    process, path = owner(parent)
    remove_left_behind()
    assert (path / "1").exists(), "its owner lives"
    process.kill()
    process.communicate()
    ours = ShortFolder()
    remove_left_behind()
    assert [*parent.iterdir()] == [ours.path]
    ours.remove()
    assert [*parent.iterdir()] == []


def test_one_that_was_just_made_may_not_be_locked_yet(parent: Path) -> None:
    (new := parent / "envserver-new").mkdir()
    (new / LOCK).touch()
    remove_left_behind()
    assert new.exists()


def test_what_is_not_ours_is_left_alone(parent: Path, tmp_path: Path) -> None:
    (theirs := parent / "envserver-data").mkdir()
    (theirs / "precious").touch()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / LOCK).touch()
    old(elsewhere)
    (parent / "envserver-link").symlink_to(elsewhere)
    (parent / "envserver-lock").mkdir()
    (parent / "envserver-lock" / LOCK).symlink_to(elsewhere / LOCK)
    (parent / "envserver-file").touch()
    remove_left_behind()
    assert (theirs / "precious").exists()
    assert (elsewhere / LOCK).exists()
    assert sorted(path.name for path in parent.iterdir()) == [
        "envserver-data",
        "envserver-file",
        "envserver-link",
        "envserver-lock",
    ]


def test_where_none_can_be_made_each_place_is_told_with_its_reason(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "SHORT_FOLDERS", ("/nowhere",))
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/nothing")
    with pytest.raises(EnvServerError, match=r"/nowhere: No such file or directory; /nothing: No such"):
        ShortFolder()
