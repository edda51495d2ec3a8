"""Runs the compiler of protos, which grpcio-tools brings, with the plugin of another language."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "stubs"
PROTOS = ROOT / "protos"
PUBLIC = ("tokenloom/v1/inference.proto", "tokenloom/v1/types.proto")
"""What a client needs; the others are for the parts of a mesh."""


class StubsFailed(Exception):
    """A program that makes stubs is missing, or failed."""


def generate(plugins: Iterable[tuple[str, Path]], options: Iterable[str], out: Path) -> None:
    """Write the stubs of the public protos.

    Args:
        plugins: The name of each plugin without ``protoc-gen-``, and its program.
        options: Passed to every plugin.
        out: The folder for what they write.

    Raises `StubsFailed` with what the compiler said.
    """
    out.mkdir(parents=True, exist_ok=True)
    flags = []
    for name, program in plugins:
        flags += [f"--plugin=protoc-gen-{name}={program}", f"--{name}_out={out}"]
        flags += [f"--{name}_opt={option}" for option in options]
    run([sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}", *flags, *PUBLIC], PROTOS)


def run(command: list[str], folder: Path) -> str:
    """Return the output of a command that runs in a folder. Raises `StubsFailed`."""
    try:
        done = subprocess.run(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except OSError as error:
        raise StubsFailed(f"cannot run {command[0]}: {error.strerror}") from None
    if done.returncode:
        raise StubsFailed(f"{' '.join(command[:4])} … ended with status {done.returncode}:\n{done.stdout}")
    return done.stdout
