"""Where running meshes of this user are found: a private directory, and in it one directory for each mesh.

A mesh's directory holds its unix sockets, the parts' state files, ``mesh.json`` and a lock that its supervisor holds
for life: the kernel lets go of it however the supervisor ends, so a lock that can be taken marks a dead mesh.
"""

import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_MESH, _LOCK = "mesh.json", "lock"


class StateDirError(Exception):
    """The directory cannot be trusted or made; the message says why."""


@dataclass(frozen=True)
class PartRecord:
    """One part as ``mesh.json`` names it; its process id and addresses are in the state file."""

    service: str
    index: int
    role: str | None
    state_file: str


@dataclass(frozen=True)
class MeshRecord:
    """What ``mesh.json`` holds."""

    pid: int
    port: int
    parts: list[PartRecord]


@dataclass(frozen=True)
class PartState:
    """What a part wrote once it was bound."""

    pid: int
    address: str
    metrics: str | None
    http: str | None
    health: str
    """Where it answers probes in plain text."""
    role: str | None = None
    """Of an engine, which may have been told another one since it started."""


def root() -> Path:
    """``$XDG_RUNTIME_DIR/tokenloom``, else ``/tmp/tokenloom-UID``; made private. Refuses somebody else's directory."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(runtime) / "tokenloom" if runtime else Path(tempfile.gettempdir()) / f"tokenloom-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StateDirError(f"{path} must be a directory of this user that nobody else can enter (mode 0700)")
    return path


@contextlib.contextmanager
def mesh_directory() -> Iterator[Path]:
    """A new directory for a mesh, locked while the block runs and removed after it. Clears what dead meshes left."""
    parent = root()
    for dead in [path for path in _directories(parent) if not _is_alive(path)]:
        shutil.rmtree(dead, ignore_errors=True)
    path = Path(tempfile.mkdtemp(prefix="mesh-", dir=parent))
    with open(path / _LOCK, "wb") as lock:  # closed in children by default
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def write_record(directory: Path, record: MeshRecord) -> None:
    """Writes ``mesh.json`` in one step."""
    temporary = directory / (_MESH + ".new")
    temporary.write_text(json.dumps(asdict(record)))
    temporary.replace(directory / _MESH)


def running_meshes() -> list[MeshRecord]:
    """Every live mesh of this user, the newest first."""
    found = [path for path in _directories(root()) if _is_alive(path)]
    found.sort(key=lambda path: (path / _LOCK).stat().st_mtime_ns, reverse=True)
    return [record for path in found if (record := _read_record(path / _MESH)) is not None]


def read_part_state(path: Path) -> PartState | None:
    """What the part wrote, or None while it is not bound."""
    values = _read_json(path)
    if values is None:
        return None
    return PartState(
        pid=values["pid"],
        address=values["address"],
        metrics=values.get("metrics") or None,
        http=values.get("http") or None,
        health=values.get("health") or values["address"],
        role=values.get("role") or None,
    )


def _directories(parent: Path) -> list[Path]:
    return [path for path in parent.iterdir() if path.name.startswith("mesh-")]


def _is_alive(path: Path) -> bool:
    try:
        with open(path / _LOCK, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _read_record(path: Path) -> MeshRecord | None:
    values = _read_json(path)
    if values is None:
        return None
    return MeshRecord(values["pid"], values["port"], [PartRecord(**part) for part in values["parts"]])


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return values
