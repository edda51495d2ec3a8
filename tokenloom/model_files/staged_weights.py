"""Keeps weights that a trainer sends as checkpoints of one folder: a safetensors file each, beside the model's other
files. Nothing is loaded here, and what came only in part is never a checkpoint."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import struct
import tempfile
from collections.abc import Collection, Iterable, Mapping
from io import BufferedWriter
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from ..request.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from .model_path import weight_paths

WEIGHTS_FILE = "model.safetensors"
NUM_KEPT = 2
"""The latest checkpoints, which no process needs to have loaded to keep them: one of a mesh that is restarted loads the
latest one again."""
MAX_HEADER_BYTES = 100_000_000
"""Of the header of a safetensors file, as the safetensors library limits it."""
_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_ENTRY = ("dtype", "shape", "data_offsets")
_PART = ".part-"
_COMPLETE = re.compile("[0-9a-f]{64}")
_SHARED_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,255}")
_SHARED_MEMORY = Path("/dev/shm")  # where Linux keeps the objects of shm_open
_PIECE_BYTES = 4 << 20
_CONFIG = "config.json"
_OLD_WEIGHTS = shutil.ignore_patterns("*.safetensors", "*.bin", "*.index.json", ".*")


class TensorSpec(NamedTuple):
    """Describes a tensor of a file: its dtype as safetensors names it, its shape, and its size."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class StagedWeights:
    """Keeps the weights that are sent to the engines of one host. Several engines may have the same folder: a
    checkpoint's name is the digest of its content.

    Attributes:
        loaded: The checkpoint that this engine has loaded, whose tensors others must have.
    """

    def __init__(self, folder: Path, loaded: Path) -> None:
        """Make the folder if it does not exist. Raises ``InvalidArgument`` if other users may write to it, and if
        ``loaded`` is no directory of safetensors files, which alone are replaced tensor by tensor."""
        self.loaded = loaded
        self._folder = folder = folder.absolute()
        self._held: int | None = None  # locked while the engine has the checkpoint in it loaded
        try:
            _make_folder(folder)
        except OSError as error:
            raise InvalidArgument(f"{folder}: {error.strerror}", "staged_weights_dir") from error
        try:
            read_specs(loaded)
        except FailedPrecondition as error:
            raise InvalidArgument(error.message, "staged_weights_dir") from None

    def begin(self) -> "IncomingWeights":
        """Return what takes a file. Raises ``FailedPrecondition`` if the loaded checkpoint cannot be compared with, or
        if others may write to the folder; ``ResourceExhausted`` without room."""
        try:
            _make_folder(self._folder)  # what cleans up shared memory may have removed it
            self._prune()
        except InvalidArgument as error:
            raise FailedPrecondition(error.message) from None
        except OSError as error:
            raise _no_room(error) from error
        return IncomingWeights(self._folder, self.loaded, read_specs(self.loaded))

    def use(self, path: Path) -> None:
        """Note that the engine has loaded a checkpoint. One of the folder is kept until another is noted."""
        held = None
        if path.parent == self._folder:
            with contextlib.suppress(FileNotFoundError):  # it was removed after it was loaded; a restart will miss it
                held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(held, fcntl.LOCK_SH)
        self.close()
        self._held, self.loaded = held, path

    def close(self) -> None:
        """Let the loaded checkpoint be removed, because the engine ends. Idempotent."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _prune(self) -> None:
        """Remove what interrupted streams have left, and checkpoints that are neither recent nor loaded anywhere."""
        complete, rest = list[tuple[int, Path]](), list[Path]()
        for entry in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another engine has removed it just now
                about = entry.lstat()
                if stat.S_ISDIR(about.st_mode) and _COMPLETE.fullmatch(entry.name):
                    complete.append((about.st_mtime_ns, entry))
                elif stat.S_ISDIR(about.st_mode) and entry.name.startswith(_PART):
                    rest.append(entry)
        complete.sort(reverse=True)
        for entry in [*(entry for _, entry in complete[NUM_KEPT:]), *rest]:
            remove_if_unlocked(entry)


class IncomingWeights:
    """Takes one safetensors file piece by piece. :meth:`finish` or :meth:`discard` must end it.

    Attributes:
        num_left: Bytes of the tensors that are missing; None until the header has come.
    """

    def __init__(self, folder: Path, loaded: Path, wanted: Mapping[str, TensorSpec]) -> None:
        """``loaded``: the checkpoint that has the model's other files. ``wanted``: the tensors that it must have, by
        name. Raises ``ResourceExhausted`` without room."""
        self.num_left: int | None = None
        self._folder, self._wanted = folder, wanted
        # Names, dtypes, shapes and offsets; a writer may align them, or add what it likes to know.
        self._max_header = min(MAX_HEADER_BYTES, (64 << 10) + sum(512 + 6 * len(name) for name in wanted))
        self._head, self._num_head = bytearray(), _LENGTH.size  # what has come of the header, and its size so far
        self._digest = hashlib.sha256()
        self._lock: int | None = None
        self._file: BufferedWriter | None = None
        try:
            # Without the lock it is taken for what a process that ended has left.
            self._part, self._lock = locked_folder(folder, _PART)
            _link_rest(loaded, self._part)
            self._file = (self._part / WEIGHTS_FILE).open("xb")
        except OSError as error:
            self.discard()
            raise _no_room(error) from error

    def write(self, data: bytes | memoryview) -> None:
        """Take the next bytes. Raises ``InvalidArgument`` at the end of a header that does not fit the loaded
        checkpoint, and for bytes beyond the last tensor; ``ResourceExhausted`` without room for them."""
        if self.num_left is None:
            self._head += data
            data = self._take_header()
        if self.num_left is None:
            return
        if len(data) > self.num_left:
            raise InvalidArgument("the data goes on after the last tensor of its header", "data")
        self._append(data)
        self.num_left -= len(data)

    def copy_shared_memory(self, name: str) -> None:
        """Take the whole file from shared memory; what follows it there is left out. Raises as :meth:`write`, and
        ``InvalidArgument`` if there is no such object, or if it belongs to another user."""
        if not _SHARED_NAME.fullmatch(name):
            wanted = "letters, digits, '.', '-' and '_', as of shm_open without the slash"
            raise InvalidArgument(f"shared_memory must be a name of {wanted}", "shared_memory")
        try:
            opened = os.open(_SHARED_MEMORY / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            reason = f"no shared memory of this name can be read on the engine's host: {error.strerror}"
            raise InvalidArgument(f"{name}: {reason}", "shared_memory") from error
        with open(opened, "rb", buffering=0) as file:  # read and not mapped: it may be cut while it is copied
            about = os.fstat(opened)
            if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
                raise InvalidArgument(f"{name}: the shared memory belongs to another user", "shared_memory")
            while num_next := self._num_head - len(self._head) if self.num_left is None else self.num_left:
                if not (piece := file.read(min(num_next, _PIECE_BYTES))):
                    break
                self.write(piece)

    def finish(self) -> tuple[Path, bytes]:
        """Return the checkpoint and the fingerprint of its weights. Raises ``InvalidArgument`` if bytes are missing,
        ``ResourceExhausted`` without room for them."""
        if self.num_left != 0:
            missing = "its header is not complete" if self.num_left is None else f"{self.num_left} bytes are missing"
            raise InvalidArgument(f"the data ends too early: {missing}", "data")
        digest = self._digest.digest()
        complete = self._folder / digest.hex()
        try:
            assert self._file is not None
            assert self._lock is not None
            self._file.flush()
            # A machine that loses its power never has the name without the bytes: the same weights would be taken for
            # there when they come again.
            os.fsync(self._file.fileno())
            os.fsync(self._lock)
            self._close_file()
            os.utime(self._lock)  # the latest is what was complete last
            self._become(complete)
        except OSError as error:
            raise _no_room(error) from error
        finally:
            self.discard()
        return complete, digest

    def discard(self) -> None:
        """Remove what has come, unless :meth:`finish` has made it a checkpoint. Idempotent."""
        if self._lock is None:
            return
        with contextlib.suppress(OSError):  # of bytes that cannot be written
            self._close_file()
        shutil.rmtree(self._part, ignore_errors=True)
        os.close(self._lock)
        self._lock = None

    def _become(self, complete: Path) -> None:
        """Make what has come a checkpoint of this name, unless there is one: then the same weights came before, or to
        another engine, and they are the latest now."""
        while True:
            try:
                self._part.rename(complete)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            with contextlib.suppress(FileNotFoundError):  # it is removed now, and no longer in the way
                found = os.open(complete, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    fcntl.flock(found, fcntl.LOCK_SH)  # another engine may be removing it
                    if os.fstat(found).st_nlink:
                        os.utime(found)
                        return
                finally:
                    os.close(found)

    def _take_header(self) -> bytes:
        """Check the header if it is complete, and return what has come after it."""
        if len(self._head) >= self._num_head == _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._head)
            if length > self._max_header:
                reason = f"its header has {length} bytes, and one of these tensors has at most {self._max_header}"
                raise InvalidArgument(f"the data is no safetensors file of this model: {reason}", "data")
            if not length:  # and what follows would be kept without a limit
                raise InvalidArgument("the data is no safetensors file: its header is empty", "data")
            self._num_head += length
        if self._num_head == _LENGTH.size or len(self._head) < self._num_head:
            return b""
        head, rest = bytes(self._head[: self._num_head]), bytes(self._head[self._num_head :])
        self._head.clear()
        self.num_left = check_header(head[_LENGTH.size :], self._wanted)
        self._reserve(len(head) + self.num_left)
        self._append(head)
        return rest

    def _reserve(self, num_bytes: int) -> None:
        """Begin the file, which will have so many bytes."""
        assert self._file is not None
        try:
            os.posix_fallocate(self._file.fileno(), 0, num_bytes)
        except OSError as error:
            raise _no_room(error) from error
        # The digest is what `checkpoint.weights_fingerprint` returns for the files.
        config = (self._part / _CONFIG).read_bytes()
        self._digest.update(f"{_CONFIG}\0{len(config)}\0".encode() + config)
        self._digest.update(f"{WEIGHTS_FILE}\0{num_bytes}\0".encode())

    def _append(self, data: bytes | memoryview) -> None:
        assert self._file is not None
        try:
            self._file.write(data)
        except OSError as error:
            raise _no_room(error) from error
        self._digest.update(data)

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def remove_if_unlocked(folder: Path) -> None:
    """Remove a folder unless a process holds its lock, or it is not ours."""
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # another process has removed it just now
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        pass  # a process has it loaded, or writes it
    finally:
        os.close(held)


def locked_folder(parent: Path, prefix: str) -> tuple[Path, int]:
    """Make a folder for this user alone, and return it with its lock, which :func:`remove_if_unlocked` respects."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                return folder, lock
            os.close(lock)  # another process has removed it before it was locked


def _make_folder(folder: Path) -> None:
    """Make the folder of an engine if it does not exist. Raises ``InvalidArgument`` if others may write to it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    # A folder below /dev/shm may have been made by anybody before, who could put other weights into it.
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        wanted = "use one that belongs to the engine's user, and to which no other may write (mode 0700)"
        raise InvalidArgument(f"{folder} may be written to by other users: {wanted}", "staged_weights_dir")


def _link_rest(loaded: Path, folder: Path) -> None:
    """Give a folder what a checkpoint holds beside its weights: a copy of its configuration, and links to the rest, of
    which some may be large, such as the heads and drafts in folders of their own."""
    _link(loaded, folder, {_CONFIG, *_OLD_WEIGHTS(str(loaded), os.listdir(loaded))})
    shutil.copyfile(loaded / _CONFIG, folder / _CONFIG)


def _link(source: Path, target: Path, skipped: Collection[str] = ()) -> None:
    # Folders have modes of their own here: a model's may be read-only, so that nothing could be written or removed.
    for entry in source.iterdir():
        if entry.name in skipped:
            continue
        if entry.is_dir():
            (target / entry.name).mkdir()
            _link(entry, target / entry.name)
        else:
            # To where the file really is: the checkpoint that links to it may be removed before this one.
            (target / entry.name).symlink_to(os.path.realpath(entry))


def _no_room(error: OSError) -> ResourceExhausted:
    return ResourceExhausted(f"the weights cannot be kept: {error.strerror or error}")


def read_specs(path: Path) -> dict[str, TensorSpec]:
    """Return the tensors of a checkpoint directory. Raises ``FailedPrecondition`` if it has no safetensors files."""
    files = weight_paths(path) if path.is_dir() else []
    if not files or files[0].suffix != ".safetensors":
        wanted = "only a directory of safetensors files is replaced by tensors; give ReloadWeights a path"
        raise FailedPrecondition(f"the loaded weights of {path.name!r} are of another format: {wanted}")
    specs: dict[str, TensorSpec] = {}
    try:
        for file in files:
            with file.open("rb") as stream:
                (length,) = _LENGTH.unpack(stream.read(_LENGTH.size))
                if length > MAX_HEADER_BYTES:
                    raise ValueError(f"a header of {length} bytes")
                specs |= {name: spec for name, (spec, _) in _entries(stream.read(length)).items()}
    except (OSError, ValueError, struct.error) as error:
        raise FailedPrecondition(f"the loaded weights of {path.name!r} cannot be read any more: {error}") from error
    return specs


def check_header(header: bytes, wanted: Mapping[str, TensorSpec]) -> int:
    """Return the bytes of a file's tensors. Raises ``InvalidArgument`` unless they are those that are wanted, one
    directly behind the other."""
    try:
        entries = _entries(header)
    except ValueError as error:
        raise InvalidArgument(f"the data is no safetensors file: {error}", "data") from None
    for what, names in (("lacks", wanted.keys() - entries), ("has", entries.keys() - wanted)):
        if names:
            shown, more = sorted(names)[:3], f" and {len(names) - 3} more" if len(names) > 3 else ""
            owner = "the loaded checkpoint has" if what == "lacks" else "the loaded checkpoint lacks"
            raise InvalidArgument(f"the data {what} {', '.join(shown)}{more}, which {owner}"[:1000], "data")
    end = 0
    for name, (spec, begin) in sorted(entries.items(), key=lambda entry: (entry[1][1], entry[1][0].nbytes)):
        if spec[:2] != wanted[name][:2]:
            reason = f"the loaded checkpoint has {wanted[name].dtype} {list(wanted[name].shape)}"
            raise InvalidArgument(f"{name} is {spec.dtype} {list(spec.shape)}, and {reason}", "data")
        if begin != end or spec.nbytes != wanted[name].nbytes:
            raise InvalidArgument(f"the offsets of {name} do not follow from its shape and the tensors before", "data")
        end += spec.nbytes
    return end


def _entries(header: bytes) -> dict[str, tuple[TensorSpec, int]]:
    """Return the tensors of a header by name, each with its first offset. Raises ``ValueError`` if it is malformed."""
    try:
        value = json.loads(header.decode(), object_pairs_hook=_without_repeats)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("its header holds no JSON object")
    found = {}
    for name, entry in value.items():
        if name == _METADATA:
            continue
        found[name] = _entry(name, entry)
    return found


def _entry(name: str, entry: object) -> tuple[TensorSpec, int]:
    dtype, shape, offsets = map(entry.get, _ENTRY) if isinstance(entry, dict) else (None, None, None)
    if isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2:
        return TensorSpec(dtype, tuple(shape), offsets[1] - offsets[0]), offsets[0]
    raise ValueError(f"the entry of {name[:200]} in its header is malformed")


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)


def _without_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict. Raises ``ValueError`` for a name that it has twice: readers differ in which one
    counts."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"its header has {name[:200]} twice")
        found[name] = value
    return found
