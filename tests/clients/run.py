"""Runs the clients that users have, as they are, against one mesh: ``python -m tests.clients.run [NAME…]``.

Prints a table, writes each client's output to ``build/clients/logs``, and fails when one of them does.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.clients import environments
from tests.clients.scripted_mesh import WORDS
from tests.clients.table import CLIENTS, Client
from tests.services.gateway.fakes import MODEL
from tokenloom.model_files.model_path import PICTURE_MODEL_NAME as PICTURE_MODEL
from tools.stubs.protoc import BUILD as STUBS
from tools.stubs.protoc import StubsFailed

SCRIPTS = Path(__file__).parent / "scripts"
CHECKPOINT = Path("tokenloom/demo_model").absolute()
LOGS = environments.BUILD / "logs"
ADMIN_KEY = "the-operators"
TIMEOUT = 900.0
"""Seconds for one client."""


@dataclass(frozen=True)
class Result:
    """What became of one client."""

    client: Client
    version: str
    ok: bool
    seconds: float
    said: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="clients to run; all by default")
    parser.add_argument("--log", type=Path, default=LOGS)
    args = parser.parse_args()
    chosen = [client for client in CLIENTS if not args.names or client.name in args.names]
    if unknown := set(args.names) - {client.name for client in CLIENTS}:
        parser.error(f"no client named {', '.join(unknown)}; there are {', '.join(c.name for c in CLIENTS)}")
    args.log.mkdir(parents=True, exist_ok=True)
    # In float32, so that likelihoods can be held to another library's.
    flags = ("--prefill", "1", "--decode", "1", "--dtype", "float32")
    with (
        serving(args.log / "mesh.log", *flags) as mesh,
        scripted(args.log / "scripted.log") as scripted_mesh,
        serving(args.log / "pictures.log", PICTURE_MODEL) as pictures,
    ):
        mesh |= scripted_mesh | {"PICTURE_URL": pictures["TOKENLOOM_URL"], "PICTURE_MODEL": PICTURE_MODEL}
        mesh["PICTURE_FILE"] = str(CHECKPOINT / "picture" / "example.png")
        results = [run(client, mesh, args.log) for client in chosen]
    print(table(results))
    return 0 if all(result.ok for result in results) else 1


@contextmanager
def serving(log: Path, *arguments: str) -> Iterator[dict[str, str]]:
    """A mesh, of the demo model if ``arguments`` name no other one; what its clients' environment holds."""
    directory = Path(tempfile.mkdtemp(prefix="tl-", dir="/tmp"))
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(directory), "TOKENLOOM_ADMIN_API_KEY": ADMIN_KEY}
    tokenloom = (sys.executable, "-m", "tokenloom.cli.main")
    command = (*tokenloom, "serve", "--port", "0", *arguments)
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=file, text=True)
    try:
        assert process.stdout is not None
        if not (url := served_url(process.stdout.readline())):
            raise SystemExit(f"the mesh did not come up: {log}")
        parts = json.loads(subprocess.check_output((*tokenloom, "ps", "--json"), env=environment))
        grpc = next(part["address"] for part in parts if part["service"] == "gateway")
        yield {
            "TOKENLOOM_URL": url,
            "TOKENLOOM_GRPC": grpc,
            "TOKENLOOM_MODEL": "tokenloom-demo",
            "TOKENLOOM_CHECKPOINT": str(CHECKPOINT),
            "TOKENLOOM_PYTHON": sys.executable,
            "TOKENLOOM_ADMIN_KEY": ADMIN_KEY,
            "TOKENLOOM_STUBS": str(STUBS),
        }
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(directory, ignore_errors=True)


def served_url(ready_line: str) -> str:
    """Return the URL of the gateway, which comes first in the line; empty: the mesh did not come up."""
    found = re.search(r"http://[\w.:]+", ready_line)
    return found[0] if found is not None else ""


@contextmanager
def scripted(log: Path) -> Iterator[dict[str, str]]:
    """A gateway with a scripted model; what its clients' environment holds."""
    with log.open("wb") as file:
        command = (sys.executable, "-m", "tests.clients.scripted_mesh")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
    try:
        assert process.stdout is not None
        if not (url := process.stdout.readline().strip()):
            raise SystemExit(f"the scripted model did not come up: {log}")
        yield {"SCRIPTED_URL": url, "SCRIPTED_MODEL": MODEL, "SCRIPTED_WORDS": WORDS}
    finally:
        process.terminate()
        process.wait(30)


def run(client: Client, mesh: dict[str, str], logs: Path) -> Result:
    """Installs it if need be, and runs its script."""
    print(f"{client.name} …", file=sys.stderr, flush=True)
    started, version = time.monotonic(), "?"
    log = logs / f"{client.script.replace('/', '-')}.log"
    with tempfile.TemporaryDirectory(prefix="tl-client-") as out, log.open("w+") as file:
        try:
            home = environments.interpreter(client)
            version = environments.version(client, home)
            started = time.monotonic()
            ok = _run_script(client, home, {**mesh, "OUT": out}, file.fileno())
        except (subprocess.SubprocessError, OSError, StubsFailed) as error:
            file.write(f"{error}\n")
            ok = False
        file.flush()
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = (lines[-1] if lines else "nothing") if ok else f"FAILED: {log}"
    print(f"  {said}", file=sys.stderr, flush=True)
    return Result(client, version, ok, time.monotonic() - started, said)


def _run_script(client: Client, home: Path, mesh: dict[str, str], output: int) -> bool:
    script = SCRIPTS / client.script
    environment = {**os.environ, **mesh, "NO_COLOR": "1"}
    environment.pop("HF_HUB_OFFLINE", None)
    if client.offline:
        environment["HF_HUB_OFFLINE"] = "1"
    environment["PATH"] = f"{home.parent}:{environment['PATH']}"
    command = [str(home), str(script)]
    if not client.is_python:  # node looks for modules beside the script only
        script = Path(shutil.copy(script, home))
        command = ["node", str(script)]
    done = subprocess.run(
        command, env=environment, cwd=mesh["OUT"], stdout=output, stderr=subprocess.STDOUT, timeout=TIMEOUT, check=False
    )
    return done.returncode == 0


def table(results: list[Result]) -> str:
    """In Markdown."""
    lines = ["| client | version | result | seconds | what it did |", "|---|---|---|---|---|"]
    for each in results:
        outcome = "passes" if each.ok else "fails"
        lines.append(f"| {each.client.name} | {each.version} | {outcome} | {each.seconds:.1f} | {each.said} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
