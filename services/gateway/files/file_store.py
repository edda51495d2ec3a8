"""Keeps the files of all tenants on disk, within the limits of each."""

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self
from uuid import uuid4

import msgspec
from msgspec import Struct

from tokenloom.request.errors import FailedPrecondition, NotFound, PayloadTooLarge
from tokenloom.request.limits import AdmissionLimit, Reservation

from .disk import Disk, checksum_of, sealed, sync_directory, unsealed, write_atomically

MEDIA_PURPOSES = ("vision", "user_data")
"""Of files that requests show to a model."""
MAX_NAME = 255
"""Limits the characters of a file's name; it is shown and never used as a path."""


class StoredFile(Struct, frozen=True, kw_only=True):
    """Describes a file. It is kept as JSON next to the data.

    Attributes:
        id: Names the file for clients, and on disk.
        tenant: Name of the tenant that it belongs to.
        size: Bytes.
        created: When it was stored, in seconds since 1970.
        name: The client's name for it.
        purpose: ``batch``, one of :data:`MEDIA_PURPOSES`, or ``batch_output`` for results.
        crc32: Of the data; None: an older gateway has stored it.
        sha256: Of the data in hexadecimal digits, if requests may show the file to a model.
    """

    id: str
    tenant: str
    size: int
    created: int
    name: str
    purpose: str
    crc32: int | None = None
    sha256: str | None = None

    def is_damaged(self, data: BinaryIO) -> bool:
        """Return whether this is not what was stored. Reads all of it. Raises ``OSError``."""
        return self.crc32 is not None and checksum_of(data) != self.crc32

    def to_object(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.created,
            "filename": self.name,
            "purpose": self.purpose,
            "status": "processed",
            "expires_at": None,
            "status_details": None,
        }


def new_file_id() -> str:
    """Return an id that no other file has."""
    return f"file-{uuid4().hex}"


class Shelf:
    """Limits the files of one tenant: those that are stored, those that arrive, and the results that batches collect.

    Attributes:
        places: Number of files.
        bytes: Of all of them.
    """

    def __init__(self, max_files: int, max_bytes: int) -> None:
        self.places = AdmissionLimit(max_files)
        self.bytes = AdmissionLimit(max_bytes)

    def take(self, num_files: int) -> "FileRoom | None":
        """Return room for files that have no bytes yet; None if the tenant may not have so many more."""
        places = self.places.take(num_files)
        return None if places is None else FileRoom(self, places, self.bytes.empty())

    def take_anyway(self, num_files: int, num_bytes: int) -> "FileRoom":
        """Return room for files that are there already, whatever the limits are now."""
        return FileRoom(self, self.places.take_anyway(num_files), self.bytes.take_anyway(num_bytes))


class FileRoom:
    """Holds places and bytes of a shelf from before a file is written until it is deleted, and gives them back once."""

    def __init__(self, shelf: Shelf, places: Reservation, num_bytes: Reservation) -> None:
        self._shelf = shelf
        self._places = places
        self._bytes = num_bytes

    @property
    def num_bytes(self) -> int:
        """How many bytes it holds."""
        return self._bytes.amount

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def grow(self, added: int) -> bool:
        """Take more bytes; return False, and take none, if the tenant may not have them."""
        taken = self._shelf.bytes.take(added)
        if taken is not None:
            self._bytes.absorb(taken)
        return taken is not None

    def hold(self, num_bytes: int) -> None:
        """Hold so many bytes, which are on disk already, whatever the limit is."""
        if (missing := num_bytes - self._bytes.amount) > 0:
            self._bytes.absorb(self._shelf.bytes.take_anyway(missing))
        else:
            self._bytes.release(-missing)

    def move(self) -> "FileRoom":
        """Return a room that holds all that this one holds; this one is empty afterwards."""
        return FileRoom(self._shelf, self._places.move(), self._bytes.move())

    def split(self, num_bytes: int) -> "FileRoom":
        """Move the place and the bytes of one file to a room of its own. What is missing here is taken anyway: the file
        is there."""
        room = self._shelf.take_anyway(max(1 - self._places.amount, 0), max(num_bytes - self._bytes.amount, 0))
        room._places.absorb(self._places.split(min(1, self._places.amount)))
        room._bytes.absorb(self._bytes.split(min(num_bytes, self._bytes.amount)))
        return room

    def release(self) -> None:
        """Give back all that is left. Idempotent."""
        self._places.release()
        self._bytes.release()


log = logging.getLogger(__name__)

_DESCRIPTION = ".json"
_PARTIAL = ".part"


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Limits what a tenant may store.

    Attributes:
        file_bytes: Of one file.
        tenant_bytes: Of all files of a tenant, results included.
        tenant_files: Number of a tenant's files.
    """

    file_bytes: int
    tenant_bytes: int
    tenant_files: int


class FileStore:
    """Holds the description of each file; data is read and written in threads of the disk.

    Attributes:
        limits: What a tenant may store.
    """

    def __init__(self, disk: Disk, limits: FileLimits, now: Callable[[], float] = time.time) -> None:
        """``now``: seconds since 1970."""
        self.limits = limits
        self._disk = disk
        self._directory = disk.directory / "files"
        self._now = now
        self._files: dict[str, StoredFile] = {}  # in the order of their creation; bounded by the limits
        self._shelves: dict[str, Shelf] = {}  # by tenant; bounded by the tenants that have stored something
        self._rooms: dict[str, FileRoom] = {}  # what each stored file takes of its tenant's shelf
        self._in_use: dict[str, set[str]] = {}  # what uses a file, by the file's id

    async def open(self) -> None:
        """Read the descriptions of the files that are there; drop what a crash has left of others."""
        found = await self._disk.run(self._scan)
        self._files = {file.id: file for file in sorted(found, key=lambda file: (file.created, file.id))}
        self._rooms = {file.id: self._shelf(file.tenant).take_anyway(1, file.size) for file in found}

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in list(self._files.values()))  # a copy: a scrape runs in a thread of its own

    def of(self, tenant: str) -> list[StoredFile]:
        """Return a tenant's files, the oldest first."""
        return [file for file in self._files.values() if file.tenant == tenant]

    def get(self, file_id: str, tenant: str, where: str | None = None) -> StoredFile:
        """Return a tenant's file. Raises ``NotFound``, which also covers those of other tenants.

        ``where``: the field that names it, for the error.
        """
        file = self._files.get(file_id)
        if file is None or file.tenant != tenant:
            raise NotFound(f"no file {file_id[:64]!r} is stored here", field=where)
        return file

    def path(self, file_id: str) -> Path:
        """Return where a file's data is, or may be written before :meth:`add`."""
        return self._directory / file_id

    def partial_path(self, file_id: str) -> Path:
        """Return where the data of an upload is written."""
        return self._directory / (file_id + _PARTIAL)

    def check_size(self, size: int) -> None:
        """Raise ``PayloadTooLarge`` for a file that is larger than any may be."""
        if size > self.limits.file_bytes:
            raise PayloadTooLarge(f"a file may have at most {self.limits.file_bytes} bytes", "file")

    def take(self, tenant: str, num_files: int = 1) -> FileRoom:
        """Return room for files that will be stored. Raises ``FailedPrecondition`` if the tenant may not have them."""
        shelf = self._shelf(tenant)
        if (room := shelf.take(num_files)) is None:
            message = f"{shelf.places.taken} files are stored, as many as may be; delete some"
            if num_files > 1:
                message = f"{num_files} files are needed, and of {shelf.places.size} that may be stored "
                message += f"{shelf.places.taken} are stored or reserved for running batches; delete some"
            raise FailedPrecondition(message, "file" if num_files == 1 else None)
        return room

    def grow(self, room: FileRoom, tenant: str, size: int) -> None:
        """Make a room hold the bytes of a file that has grown to ``size``. Raises ``PayloadTooLarge``, and
        ``FailedPrecondition`` if its tenant may not store so many."""
        self.check_size(size)
        if not room.grow(max(size - room.num_bytes, 0)):
            limit = self._shelf(tenant).bytes
            left = max(self.limits.tenant_bytes - limit.taken + room.num_bytes, 0)
            message = f"{self.limits.tenant_bytes} bytes may be stored, of which {left} are left; delete files"
            raise FailedPrecondition(message, "file")

    def reserve_for_results(self, tenant: str) -> FileRoom:
        """Return room for the two files of a batch that had begun before this gateway did, whatever the limits are."""
        return self._shelf(tenant).take_anyway(2, 0)

    async def add_upload(
        self, file_id: str, tenant: str, *, name: str, purpose: str, size: int, room: FileRoom | None = None
    ) -> StoredFile:
        """Store what was written to :meth:`partial_path`. ``room``: what was reserved while it arrived."""
        with self.take(tenant) if room is None else room as held:
            self.grow(held, tenant, size)
            path = self.partial_path(file_id)
            file = await self.adopt(path, file_id, tenant, name=name, purpose=purpose, room=held)
            assert file is not None, f"{path} was not written"
            return file

    async def adopt(
        self, path: Path, file_id: str, tenant: str, *, name: str, purpose: str, room: FileRoom
    ) -> StoredFile | None:
        """Store a file that was written elsewhere in the disk's directory, under an id that its caller has chosen.

        A repeat after a crash returns what the first call has stored; None: that was deleted meanwhile. Raises
        ``OSError``. ``room``: holds the file's place and bytes, which the stored file takes over.
        """
        # The caller chooses the id, so a batch that repeats this step after a crash finds the file that its first run
        # has stored.
        if (known := self._files.get(file_id)) is not None:
            return known
        created = int(self._now())

        def store() -> StoredFile | None:
            try:
                with path.open("rb") as data:
                    size, crc32 = os.fstat(data.fileno()).st_size, checksum_of(data)
                    sha256 = hashlib.file_digest(data, "sha256").hexdigest() if purpose in MEDIA_PURPOSES else None
            except FileNotFoundError:
                return None
            file = StoredFile(
                id=file_id,
                tenant=tenant,
                size=size,
                created=created,
                name=name,
                purpose=purpose,
                crc32=crc32,
                sha256=sha256,
            )
            # The description comes first: without the data it is dropped after a crash, and the call is repeated.
            description, place = self.path(file_id + _DESCRIPTION), self.path(file_id)
            try:
                write_atomically(description, sealed(msgspec.json.encode(file)))
                os.replace(path, place)
                sync_directory(self._directory)
            except OSError:
                # A repeat must find the data where it was, and the next start no file that its client was refused.
                with contextlib.suppress(OSError):
                    description.unlink(missing_ok=True)
                if not path.exists():
                    os.replace(place, path)
                raise
            return file

        def register(file: StoredFile | None) -> None:
            if file is not None:
                self._files[file_id], self._rooms[file_id] = file, room.split(file.size)

        return await self._disk.run(store, register)

    async def delete(self, file_id: str, tenant: str) -> None:
        """Remove a tenant's file. Raises ``NotFound``, ``FailedPrecondition`` while a batch reads it, and ``OSError``,
        after which the file is still there."""
        file = self.get(file_id, tenant)
        if users := self._in_use.get(file_id):
            raise FailedPrecondition(f"{min(users)} reads the file; cancel it first, or wait for its end")
        del self._files[file.id]  # first: from now on no batch can begin to read it

        def remove() -> None:
            self.path(file_id + _DESCRIPTION).unlink(missing_ok=True)
            self.path(file_id).unlink(missing_ok=True)

        try:
            await self._disk.run(remove, lambda _: self._rooms.pop(file_id).release())
        finally:
            if file_id in self._rooms:  # it failed
                self._files[file_id] = file

    def begin_use(self, file_id: str, user: str) -> None:
        """Keep a file until :meth:`end_use`. ``user``: what the error of a deletion names."""
        self._in_use.setdefault(file_id, set()).add(user)

    def end_use(self, file_id: str, user: str) -> None:
        """Permit the deletion of a file, unless another batch uses it."""
        users = self._in_use.get(file_id, set())
        users.discard(user)
        if not users:
            self._in_use.pop(file_id, None)

    def _shelf(self, tenant: str) -> Shelf:
        shelf = self._shelves.get(tenant)
        if shelf is None:
            shelf = self._shelves[tenant] = Shelf(self.limits.tenant_files, self.limits.tenant_bytes)
        return shelf

    def _scan(self) -> list[StoredFile]:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        found: list[StoredFile] = []
        known: set[str] = set()
        for path in self._directory.glob("*" + _DESCRIPTION):
            data = path.with_suffix("")
            try:
                file = msgspec.json.decode(unsealed(path.read_bytes()), type=StoredFile)
            except (msgspec.DecodeError, ValueError) as error:
                # What was cut off has lost its checksum, too. Without data it is of no use to an operator either.
                if not data.is_file():
                    log.warning("%s describes no file and is removed", path.name)
                    continue
                log.error("%s is not served and left as it is: %s", path.name, error)
            else:
                if not data.is_file():
                    continue  # a crash came before the file had its name
                if file.id == data.name and file.size == data.stat().st_size:
                    found.append(file)
                else:  # another file's description, or a part of the data
                    log.error("%s is not served and left as it is: it describes another file", path.name)
            known |= {path.name, data.name}
        for path in self._directory.iterdir():
            if path.name not in known and path.name.startswith("file-"):
                path.unlink()
        sync_directory(self._directory)
        return found
