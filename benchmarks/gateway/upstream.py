"""The upstream: `upstream.c` where a compiler is there, and the same in Python where none is."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.gateway import canned
from benchmarks.gateway.processes import Cores, running

SOURCE = Path(__file__).with_name("upstream.c")

FLAGS = ("-O2",)

COMPILERS = ("cc", "gcc", "clang")


@contextmanager
def upstream(cores: Cores) -> Iterator[tuple[str, str]]:
    """Its URL, without `/v1`, and how it was built."""
    with tempfile.TemporaryDirectory(prefix="benchmark-gateway-") as folder:
        answers = Path(folder, "answers")
        canned.write_answers(answers)
        program, built = _program(Path(folder, "upstream"))
        with running([*program, answers], cores.upstream) as process:
            yield f"http://127.0.0.1:{process.answer()}", built


def _program(target: Path) -> tuple[list[str | Path], str]:
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    why = "no C compiler is here"
    if compiler is not None:
        command = [compiler, *FLAGS, "-o", str(target), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
            return [target], f"C, {' '.join(FLAGS)} by {version.stdout.splitlines()[0]}"
        why = f"{compiler} does not compile it: {done.stderr.strip().splitlines()[-1:]}"
    return [sys.executable, "-m", "benchmarks.gateway.upstream_python"], f"Python ({why})"
