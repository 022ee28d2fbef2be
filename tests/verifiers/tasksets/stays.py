"""In the place of a tool server's module: says that it is there, starts a program, and stays until it is ended."""

import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    program = subprocess.Popen([sys.executable, "-IS", "-c", "import time; time.sleep(600)"])
    Path("starting").write_text(str(program.pid))
    Path("starting").rename("serves")
    time.sleep(600)
