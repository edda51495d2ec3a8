"""Names every process of a mesh on this machine: the supervisor, its parts, and what those have started."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .state_dir import MeshRecord, read_part_state

HELPERS: Final[Mapping[str, str]] = {
    "core_main": "core",
    "worker_main": "worker",
    "compiler_process": "compiler",
    "render_worker": "renderer",
    "encode_worker": "encoder",
    "decode_worker": "decoder",
    "sound_worker": "decoder",
    "tower_worker": "tower",
    "standby": "standby",
}
"""What each process that is no part is called, by the last part of its module's name."""
HOLDER: Final = "holder"
"""How the processes name themselves that keep a gateway's connections: forks, which show their gateway's command."""
PROC = Path("/proc")


@dataclass(frozen=True)
class MeshProcess:
    """Describes one process. ``depth``: 0 for the supervisor, 1 for parts."""

    pid: int
    name: str
    state: str
    """The kernel's letter, ``T`` if it is stopped."""
    depth: int
    memory: int | None = None
    """Bytes in memory, of which a page that n processes map counts 1/n for each; None: not known."""


def processes_of(mesh: MeshRecord) -> list[MeshProcess]:
    """Return the living processes of a mesh, each after the one that has started it."""
    names: dict[int, str] = {}
    for part in mesh.parts:
        if (report := read_part_state(Path(part.state_file))) is not None:
            names[report.pid] = f"{part.service}-{part.index}"
    return list(_walk(mesh.pid, "supervisor", names, 0))


def children(pid: int, proc: Path = PROC) -> Iterator[int]:
    """Yield the processes that a process has started."""
    for listed in (proc / str(pid) / "task").glob("*/children"):
        try:
            yield from map(int, listed.read_text().split())
        except OSError:
            continue


def command(pid: int, proc: Path = PROC) -> list[str]:
    """Return the arguments of a process; empty if it is gone."""
    try:
        return (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def name_of(pid: int, proc: Path = PROC) -> str:
    """Return the name that a process has given itself, otherwise that of its program; empty if it is gone."""
    try:
        return (proc / str(pid) / "comm").read_text().removesuffix("\n")
    except (OSError, UnicodeDecodeError):
        return ""


def state(pid: int, proc: Path = PROC) -> str | None:
    """Return the kernel's letter for the state of a process, ``T`` if it is stopped; None: it is gone or a zombie."""
    try:
        letter = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
    return None if letter in "ZX" else letter


def memory(pid: int, proc: Path = PROC) -> int | None:
    """Return the bytes that a process has in memory, as of ``MeshProcess``; None if that is not known."""
    try:
        lines = (proc / str(pid) / "smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    except (OSError, StopIteration, ValueError):
        return None


def _walk(pid: int, name: str, parts: Mapping[int, str], depth: int) -> Iterator[MeshProcess]:
    if (letter := state(pid)) is None:
        return
    yield MeshProcess(pid, name, letter, depth, memory(pid))
    for child in sorted(children(pid)):
        yield from _walk(child, parts.get(child) or _helper(child), parts, depth + 1)


def _helper(pid: int) -> str:
    """Return what a process that is no part is called: by its module, or by its command."""
    if name_of(pid) == HOLDER:
        return HOLDER
    arguments = command(pid)
    for argument in arguments:
        if (name := HELPERS.get(argument.rpartition(".")[2])) is not None:
            return name
    return Path(arguments[0]).name if arguments else "ended"
