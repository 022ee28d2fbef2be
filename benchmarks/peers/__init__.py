"""Peers: other projects' programs, each in a virtual environment of its own, made when first asked for.

What a peer's environment holds is in `NAME.txt` beside this file: one pinned requirement, the peer itself (with extras,
as `NAME[proxy]==1.0`). It is made
under `.peers/` of the repository, which needs the package index once, and is made anew when the pin or our Python
changes.
"""

import fcntl
import platform
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree

HERE = Path(__file__).parent

ENVIRONMENTS = HERE.parents[1] / ".peers"
"""Where the environments are made."""

MADE_OF = "made-of.txt"
"""The file of an environment that tells what it holds, written when that is whole."""

INSTALL_TIMEOUT = 1200.0
"""Seconds that pip gets: verifiers brings half a gigabyte."""


class PeerUnavailableError(Exception):
    """A peer's environment cannot be made here."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A project to measure beside: its name and its version, both from its requirements file."""

    name: str
    version: str

    @classmethod
    def named(cls, name: str) -> "Peer":
        """The peer that `benchmarks/peers/NAME.txt` pins."""
        requirement = _requirements(name).read_text().strip()
        project, pinned, version = requirement.partition("==")
        if not pinned or project.partition("[")[0] != name or len(version.split()) != 1:
            raise ValueError(f"{_requirements(name)} must be one line {name}==VERSION, not {requirement!r}")
        return cls(name, version)

    @property
    def subject(self) -> str:
        """What its figures are written under."""
        return f"{self.name}-{self.version}"

    def python(self) -> Path:
        """The interpreter of its environment, which is made if it is not there; `PeerUnavailableError` if it cannot."""
        home = ENVIRONMENTS / self.name
        ENVIRONMENTS.mkdir(exist_ok=True)
        with (ENVIRONMENTS / f"{self.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once make it once
            if not self.is_made():
                self._make(home)
                (home / MADE_OF).write_text(self._made_of())
        return _interpreter(home)

    def is_made(self) -> bool:
        """Whether its environment is there, so that `python` takes no time."""
        made_of = ENVIRONMENTS / self.name / MADE_OF
        return made_of.exists() and made_of.read_text() == self._made_of()

    def _made_of(self) -> str:
        return f"{self.name}=={self.version}\nPython {platform.python_version()}\n"

    def _make(self, home: Path) -> None:
        print(f"making the environment of {self.subject} in {home}, once: this takes minutes", file=sys.stderr)
        try:
            rmtree(home, ignore_errors=True)
            venv.create(home)
            subprocess.run(
                # Our own pip does it: to put one into each environment takes longer than some peers' whole install.
                [
                    *(sys.executable, "-m", "pip", "--python", str(_interpreter(home))),
                    *("install", "--quiet", "-r", str(_requirements(self.name))),
                ],
                check=True,
                capture_output=True,
                text=True,
                timeout=INSTALL_TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            raise PeerUnavailableError(self._sorry(f"pip did not end in {INSTALL_TIMEOUT:g} s")) from None
        except subprocess.CalledProcessError as error:
            said = (error.stderr or error.stdout or "").strip().splitlines()
            errors = [line for line in said if not line.startswith("WARNING")]
            raise PeerUnavailableError(self._sorry("\n".join(errors[-5:]) or str(error))) from None
        except OSError as error:
            raise PeerUnavailableError(self._sorry(str(error))) from error

    def _sorry(self, why: str) -> str:
        return (
            f"{self.subject} cannot be installed here, and without it there is nothing to measure beside: {why}\n"
            f"It needs a package index (`pip install {self.name}=={self.version}` must work) and the venv module."
        )


def _requirements(name: str) -> Path:
    return HERE / f"{name}.txt"


def _interpreter(home: Path) -> Path:
    return home / "bin" / "python"
