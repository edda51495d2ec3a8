"""Keeps the files of all tenants on disk, within the limits of each."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tokenloom.request.errors import FailedPrecondition, NotFound, PayloadTooLarge

from .disk import Disk, sync_directory, write_atomically
from .stored_file import StoredFile

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
        self._in_use: dict[str, set[str]] = {}  # what uses a file, by the file's id

    async def open(self) -> None:
        """Read the descriptions of the files that are there; drop what a crash has left of others."""
        found = await self._disk.run(self._scan)
        self._files = {file.id: file for file in sorted(found, key=lambda file: (file.created, file.id))}

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self._files.values())

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

    def check_room(self, tenant: str, size: int) -> None:
        """Raise ``PayloadTooLarge`` or ``FailedPrecondition`` if a tenant may not store ``size`` more bytes."""
        if size > self.limits.file_bytes:
            raise PayloadTooLarge(f"a file may have at most {self.limits.file_bytes} bytes", "file")
        own = self.of(tenant)
        if len(own) >= self.limits.tenant_files:
            raise FailedPrecondition(f"{len(own)} files are stored, as many as may be; delete some", "file")
        room = self.limits.tenant_bytes - sum(file.size for file in own)
        if size > room:
            message = f"{self.limits.tenant_bytes} bytes may be stored, of which {max(room, 0)} are left; delete files"
            raise FailedPrecondition(message, "file")

    def room(self, tenant: str) -> int:
        """Return how many bytes a tenant may still store."""
        return self.limits.tenant_bytes - sum(file.size for file in self.of(tenant))

    async def add_upload(self, file_id: str, tenant: str, *, name: str, purpose: str, size: int) -> StoredFile:
        """Store what was written to :meth:`partial_path`."""
        self.check_room(tenant, size)
        return await self.adopt(self.partial_path(file_id), file_id, tenant, name=name, purpose=purpose)

    async def adopt(self, path: Path, file_id: str, tenant: str, *, name: str, purpose: str) -> StoredFile:
        """Store a file that was written elsewhere in the disk's directory, under an id that its caller has chosen.

        A repeat after a crash returns what the first call has stored.
        """
        if (known := self._files.get(file_id)) is not None:
            return known
        created = int(self._now())

        def store() -> StoredFile:
            size = path.stat().st_size
            file = StoredFile(id=file_id, tenant=tenant, size=size, created=created, name=name, purpose=purpose)
            # The description comes first: without the data it is dropped after a crash, and the call is repeated.
            write_atomically(self.path(file_id + _DESCRIPTION), msgspec.json.encode(file))
            path.replace(self.path(file_id))
            sync_directory(self._directory)
            return file

        file = self._files[file_id] = await self._disk.run(store)
        return file

    async def delete(self, file_id: str, tenant: str) -> None:
        """Remove a tenant's file. Raises ``NotFound``, and ``FailedPrecondition`` while a batch reads it."""
        file = self.get(file_id, tenant)
        if users := self._in_use.get(file_id):
            raise FailedPrecondition(f"{min(users)} reads the file; cancel it first, or wait for its end")
        del self._files[file.id]

        def remove() -> None:
            self.path(file_id + _DESCRIPTION).unlink(missing_ok=True)
            self.path(file_id).unlink(missing_ok=True)

        await self._disk.run(remove)

    def begin_use(self, file_id: str, user: str) -> None:
        """Keep a file until :meth:`end_use`. ``user``: what the error of a deletion names."""
        self._in_use.setdefault(file_id, set()).add(user)

    def end_use(self, file_id: str, user: str) -> None:
        """Permit the deletion of a file, unless another batch uses it."""
        users = self._in_use.get(file_id, set())
        users.discard(user)
        if not users:
            self._in_use.pop(file_id, None)

    def _scan(self) -> list[StoredFile]:
        self._directory.mkdir(mode=0o700, exist_ok=True)
        found: list[StoredFile] = []
        for path in self._directory.glob("*" + _DESCRIPTION):
            try:
                file = msgspec.json.decode(path.read_bytes(), type=StoredFile)
            except msgspec.DecodeError:
                continue
            if file.id + _DESCRIPTION == path.name and self.path(file.id).is_file():
                found.append(file)
        known = {name for file in found for name in (file.id, file.id + _DESCRIPTION)}
        for path in self._directory.iterdir():
            if path.name not in known and path.name.startswith("file-"):
                path.unlink()
        sync_directory(self._directory)
        return found
