"""Finds the running meshes of this user: a private directory holds one directory for each mesh.

A mesh's directory holds its unix sockets, the parts' state files and ``mesh.json``. Its supervisor holds a lock on the
directory, and on the file ``lock`` in it. The kernel releases both however the supervisor ends, so a mesh whose locks
are free is dead. The directory's lock lasts when a cleaner of temporary files removes the file; the file's content is
the time at which the mesh began, in nanoseconds: two files can have the same time of modification.
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
from typing import Annotated, Any

import msgspec

from tokenloom.process.fall_backs import FallBack

CONTROL_SOCKET = "control.sock"
_MESH, _LOCK = "mesh.json", "lock"
_NEW = "new-"
"""Begins the name of a directory that is not locked yet; another supervisor would take it for that of a dead mesh."""
_ABANDONED_SECONDS = 60.0
"""Far longer than a directory has such a name, unless its supervisor was killed meanwhile."""


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
class PartReport:
    """What a part writes into its state file when it listens."""

    pid: int
    address: str
    metrics: str | None
    http: Annotated[str, msgspec.Meta(pattern=r"^\S+$")] | None
    health: str
    """Address that answers health probes in plain text."""
    role: str | None = None
    """Role of an engine, which may change while it runs."""
    fall_backs: tuple[FallBack, ...] = ()
    """What the part does without."""
    plugins: tuple[str, ...] = ()
    """The packages whose plugins it may load, each with its version and the kinds of its plugins."""
    leaving: bool = False
    """Whether it drains and has left its listening sockets to the next process."""
    certificate: Path | None = None
    """What a gateway presents to its clients; None: it serves plain text."""
    serving: bool = False
    """Whether the part is SERVING."""
    max_model_len: int | None = None
    """The context length of an engine, in tokens; None until it has loaded the model."""


def root() -> Path:
    """Return ``$XDG_RUNTIME_DIR/tokenloom`` or ``/tmp/tokenloom-UID``, created private. Raises `StateDirError`."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(runtime) / "tokenloom" if runtime else Path(tempfile.gettempdir()) / f"tokenloom-{os.getuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700, parents=True)
        status = path.lstat()
    except (OSError, ValueError) as error:  # ValueError: a character that file names cannot have
        reason = getattr(error, "strerror", None) or error
        raise StateDirError(f"{path} cannot be made ({reason}): set XDG_RUNTIME_DIR to another directory") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StateDirError(f"{path} must be a directory that only this user can access (mode 0700)")
    return path


@contextlib.contextmanager
def mesh_directory() -> Iterator[Path]:
    """Create a directory for a mesh, locked during the block and then removed. Also removes those of dead meshes."""
    parent = root()
    for dead in [path for path in (*_directories(parent), *_abandoned(parent)) if not _is_alive(path)]:
        shutil.rmtree(dead, ignore_errors=True)
    path, held = _new_directory(parent)
    with held:
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def _new_directory(parent: Path) -> tuple[Path, contextlib.ExitStack]:
    """Return a new directory with its locks. Raises `StateDirError`."""
    with contextlib.ExitStack() as unwound:
        try:
            new = Path(tempfile.mkdtemp(prefix=f"{_NEW}mesh-", dir=parent))
            unwound.callback(shutil.rmtree, new, ignore_errors=True)
            held = unwound.enter_context(_locked(new))
            # The directory gets the name that others look for only once it is locked. Of two supervisors that started
            # together, one cleared the other's directory in the moment between its creation and its lock.
            path = new.rename(parent / new.name.removeprefix(_NEW))
        except OSError as error:
            raise StateDirError(
                f"{parent} cannot hold the files of a mesh ({error.strerror}): set XDG_RUNTIME_DIR to another directory"
            ) from None
        unwound.pop_all()
        return path, held


def _locked(new: Path) -> contextlib.ExitStack:
    """Lock a new directory and the file in it until the stack is closed. Children close both when they execute."""
    with contextlib.ExitStack() as stack:
        directory = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, directory)
        with contextlib.suppress(OSError):  # network file systems lock files only
            fcntl.flock(directory, fcntl.LOCK_EX)
        lock = stack.enter_context(open(new / _LOCK, "w"))
        fcntl.flock(lock, fcntl.LOCK_EX)
        # The time stands in the file because a file system's clock ticks coarsely: it gave two meshes the same time,
        # and the newest one, to which commands go, was a matter of chance.
        lock.write(str(time.time_ns()))
        lock.flush()
        return stack.pop_all()


def write_record(directory: Path, record: MeshRecord) -> None:
    """Write ``mesh.json`` atomically."""
    temporary = directory / (_MESH + ".new")
    temporary.write_text(json.dumps(asdict(record)))
    temporary.replace(directory / _MESH)


def running_meshes() -> list[MeshRecord]:
    """Return every running mesh of this user, the newest first. Raises `StateDirError` if no record can be read."""
    found = [path for path in _directories(root()) if _is_alive(path)]
    found.sort(key=_began, reverse=True)
    records = [record for path in found if (record := _read_record(path / _MESH)) is not None]
    odd = [path for path in found if (path / _MESH).exists()]  # a mesh that starts has none yet
    if odd and not records:
        raise StateDirError(
            f"{odd[0] / _MESH} describes no mesh: stop the `tokenloom serve` that made it, or remove it"
        )
    return records


def read_part_state(path: Path) -> PartReport | None:
    """Return the state that the part wrote; None until it listens, and for a file that says something else."""
    values = {name: value for name, value in _read_json(path).items() if value}  # empty: the part has no such thing
    values = {"metrics": None, "http": None, "health": values.get("address"), **values}
    values["fall_backs"] = tuple(_fall_backs(values.get("fall_backs")))
    try:
        return msgspec.convert(values, PartReport, dec_hook=lambda kind, value: kind(value))
    except (msgspec.ValidationError, TypeError, ValueError):
        return None


def _fall_backs(values: object) -> Iterator[FallBack]:
    """Yield those of a state file, without what is none."""
    for value in values if isinstance(values, list) else ():
        with contextlib.suppress(msgspec.ValidationError, TypeError):
            yield FallBack(**msgspec.convert(value, dict[str, str]))


def _directories(parent: Path) -> list[Path]:
    """Return those that may be of a mesh. What else bears such a name, such as a pipe, must not even be opened."""
    with os.scandir(parent) as entries:
        return [Path(each) for each in entries if each.name.startswith("mesh-") and each.is_dir(follow_symlinks=False)]


def _abandoned(parent: Path) -> Iterator[Path]:
    """Yield the directories whose supervisors were killed before these had their names."""
    for path in parent.glob(f"{_NEW}*"):
        with contextlib.suppress(OSError):  # it has its name now
            if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                yield path


def _is_alive(path: Path) -> bool:
    """Return whether a lock of the mesh is held, or cannot be examined: only a mesh that is dead may be removed."""
    return _is_held(path) or _is_held(path / _LOCK)


def _is_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        # Shared: two that look at the same time must both find it free.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system that locks files only
        return not path.is_dir()
    finally:
        os.close(descriptor)
    return False


def _began(path: Path) -> int:
    """Return when a mesh began, in nanoseconds; without the file that says it, when its record was written; 0 if the
    mesh has just ended."""
    with contextlib.suppress(OSError, ValueError):
        return int((path / _LOCK).read_text() or 0)
    with contextlib.suppress(OSError):
        return (path / _MESH).stat().st_mtime_ns
    return 0


def _read_record(path: Path) -> MeshRecord | None:
    try:
        return msgspec.convert(_read_json(path), MeshRecord)
    except msgspec.ValidationError:
        return None


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty if there is none, yet or any more, or it cannot be read."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
