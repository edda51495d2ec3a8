"""Runs a mesh some of whose parts are of another release."""

import asyncio
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path

from tokenloom.supervisor.layout import MeshOptions, parts_of
from tokenloom.supervisor.mesh import Mesh
from tokenloom.supervisor.output import LineCopier, Tail
from tokenloom.supervisor.part_spec import PartSpec
from tokenloom.supervisor.ports import GatewayPorts, reserved_ports

ROOT = Path(__file__).parents[2]
MODEL = "tokenloom-demo"
SERVICES = ("coordinator", "tokenizer", "engine", "output_processor", "gateway")
"""In the order in which they are upgraded."""


@contextmanager
def release(commit: str) -> Iterator[Path]:
    """Yield a folder with the files of a commit."""
    archive = subprocess.run(("git", "archive", commit), cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="tl-", dir="/tmp") as directory:
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(directory, filter="tar")
        check_folder(Path(directory))
        yield Path(directory)


@asynccontextmanager
async def mixed_mesh(old: Path, old_services: Collection[str]) -> AsyncIterator[tuple[GatewayPorts, Tail]]:
    """Run a mesh with one part of each kind until the context ends; yield its ports and its latest output.

    The gateways open their ports themselves: the supervisor passes sockets on only to gateways of its own release.
    """
    options = MeshOptions(
        model=Path(sys.modules["tokenloom"].__path__[0]) / "demo_model",
        served_model_name=MODEL,
        drain_timeout=10.0,
        flags={"engine": ("--worker", "hash")},
    )
    tail = Tail(200)
    output = LineCopier(tail)
    with (
        reserved_ports("127.0.0.1", 1, 0, 0) as ports,
        tempfile.TemporaryDirectory(prefix="tl-", dir="/tmp") as directory,
    ):
        parts = [
            _of_release(part, old) if part.service in old_services else _of_release(part, ROOT)
            for part in parts_of(options, Path(directory), ports)
        ]
        mesh = Mesh(parts, Path(directory), output, port=ports[0].http, drain_timeout=options.drain_timeout)
        try:
            async with mesh:
                async with asyncio.timeout(120):
                    await mesh.wait_serving()
                yield ports[0], tail
                await mesh.drain()
        finally:
            output.close()


def check_folder(folder: Path) -> None:
    """Check that parts of a release run its code. Raises ``AssertionError``."""
    command = (sys.executable, "-c", "import tokenloom.services.gateway as g; print(g.__file__)")
    environment = {**os.environ, **_importing(folder)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.startswith(str(folder)), done.stdout


def _of_release(part: PartSpec, folder: Path) -> PartSpec:
    """Return the part with the code of a release."""
    return replace(part, environment={**part.environment, **_importing(folder)})


def _importing(folder: Path) -> dict[str, str]:
    """Return variables with which a process, and those that it starts, import the code of a folder: the working
    folder, which may be another clone, is not searched."""
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
