"""The README's examples run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.prime import FakePrime

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def test_the_first_example_is_the_short_one() -> None:
    code = [line for line in EXAMPLES[0].splitlines() if line.strip()]
    assert len(code) <= 14


@pytest.mark.parametrize("code", EXAMPLES, ids=range(1, len(EXAMPLES) + 1))
def test_example_runs(code: str, tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(code)
    with FakePrime(tmp_path / "home", scale=0.1) as service:
        ran = subprocess.run(
            [sys.executable, "-X", "dev", str(file)],
            env={**os.environ, **service.env()},
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
        )
        left = service.live(), service.frpc_pids(), service.config_files()
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip(), "an example shows something"
    assert "Traceback" not in ran.stderr
    assert left == ([], [], [])
