"""Finds the running meshes of this user: a private directory holds one directory for each mesh.

A mesh's directory holds its unix sockets, the parts' state files, ``mesh.json`` and a lock that its supervisor holds.
The kernel releases the lock however the supervisor ends, so a lock that is free marks a dead mesh. The lock's content
is the time at which the mesh began, in nanoseconds: two files can have the same time of modification.
"""

import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_MESH, _LOCK = "mesh.json", "lock"
_NEW = "new-"
"""Begins the name of a directory that is not locked yet; another supervisor would take it for that of a dead mesh."""


class StateDirError(Exception):
    """The directory cannot be created, or is not private; the message says why."""


@dataclass(frozen=True)
class PartRecord:
    """One part in ``mesh.json``; its process id and addresses are in the state file."""

    service: str
    index: int
    role: str | None
    state_file: str
    model: str = ""
    """The name of the model that the part serves; empty for gateways, which serve all."""


@dataclass(frozen=True)
class MeshRecord:
    """The content of ``mesh.json``."""

    pid: int
    port: int
    parts: list[PartRecord]


@dataclass(frozen=True)
class PartState:
    """The state that a part writes when it listens."""

    pid: int
    address: str
    metrics: str | None
    http: str | None
    health: str
    """Address that answers health probes in plain text."""
    role: str | None = None
    """Role of an engine, which may change while it runs."""
    leaving: bool = False
    """Whether it drains and has left its listening sockets to the next process."""


def root() -> Path:
    """Return ``$XDG_RUNTIME_DIR/tokenloom`` or ``/tmp/tokenloom-UID``, created private. Raises `StateDirError`."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(runtime) / "tokenloom" if runtime else Path(tempfile.gettempdir()) / f"tokenloom-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700, parents=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StateDirError(f"{path} must be a directory that only this user can access (mode 0700)")
    return path


@contextlib.contextmanager
def mesh_directory() -> Iterator[Path]:
    """Create a directory for a mesh, locked during the block and then removed. Also removes those of dead meshes."""
    parent = root()
    for dead in [path for path in _directories(parent) if not _is_alive(path)]:
        shutil.rmtree(dead, ignore_errors=True)
    new = Path(tempfile.mkdtemp(prefix=f"{_NEW}mesh-", dir=parent))
    with open(new / _LOCK, "w") as lock:  # closed in children by default
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(str(time.time_ns()))
        lock.flush()
        path = new.rename(parent / new.name.removeprefix(_NEW))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def write_record(directory: Path, record: MeshRecord) -> None:
    """Write ``mesh.json`` atomically."""
    temporary = directory / (_MESH + ".new")
    temporary.write_text(json.dumps(asdict(record)))
    temporary.replace(directory / _MESH)


def running_meshes() -> list[MeshRecord]:
    """Return every running mesh of this user, the newest first."""
    found = [path for path in _directories(root()) if _is_alive(path)]
    found.sort(key=_began, reverse=True)
    return [record for path in found if (record := _read_record(path / _MESH)) is not None]


def read_part_state(path: Path) -> PartState | None:
    """Return the state that the part wrote; None until it listens."""
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
        leaving=bool(values.get("leaving")),
    )


def _directories(parent: Path) -> list[Path]:
    return [path for path in parent.iterdir() if path.name.startswith("mesh-")]


def _is_alive(path: Path) -> bool:
    try:
        with open(path / _LOCK, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # two that look at the same time must both find it free
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _began(path: Path) -> int:
    """Return when a mesh began, in nanoseconds; 0 if it has just ended."""
    try:
        return int((path / _LOCK).read_text() or 0)
    except FileNotFoundError:
        return 0


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
