"""Serves ``/v1/files``."""

import contextlib
import logging
import os
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from tokenloom.request.errors import Internal, InvalidArgument, NotFound, Unavailable

from ..encoding.sse import encode_json
from ..http.http_exchange import HttpExchange, UnsupportedEncoding
from ..http.route import Routes
from ..openapi import route_table
from ..records.media import FindStored, StoredMedia
from .disk import Disk, write_all
from .file_store import MAX_NAME, MEDIA_PURPOSES, FileRoom, FileStore, StoredFile, new_file_id
from .multipart import Upload, boundary_of
from .page_query import MAX_ITEMS, PageQuery

log = logging.getLogger(__name__)

PURPOSE = "batch"
PURPOSES = (PURPOSE, *MEDIA_PURPOSES)
"""Those of uploads."""
FORM_BYTES = 64 << 10
"""What a form may have in addition to its file."""
PIECE_BYTES = 256 << 10
"""Read from disk and sent at a time."""
RETRY_SECONDS = 10.0
"""After this time, a disk that was full may have room."""


@dataclass(frozen=True, slots=True)
class FilesApi:
    """Answers requests of clients; a client sees only the files of its own tenant."""

    disk: Disk
    store: FileStore

    def routes(self) -> Routes:
        return {
            route_table.FILES: self.list_files,
            route_table.UPLOAD_FILE: self.upload,
            route_table.FILE: self.retrieve,
            route_table.DELETE_FILE: self.delete,
            route_table.FILE_CONTENT: self.content,
        }

    async def upload(self, exchange: HttpExchange) -> None:
        """Store a file. The body goes to disk as it arrives."""
        boundary = boundary_of(exchange.headers.get(b"content-type", b""))
        if exchange.headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise UnsupportedEncoding("Content-Encoding is not supported; send the body uncompressed")
        tenant, file_id = exchange.tenant.name, new_file_id()
        path = self.store.partial_path(file_id)
        with self.store.take(tenant) as room:
            try:
                upload = await self._receive(exchange, boundary, path, room)
                purpose = upload.fields.get("purpose")
                if purpose not in PURPOSES:
                    raise InvalidArgument(f"purpose must be one of {', '.join(PURPOSES)}", "purpose")
                name = (upload.file_name or "file")[:MAX_NAME]
                file = await self.store.add_upload(
                    file_id, tenant, name=name, purpose=purpose, size=upload.size, room=room
                )
            except OSError as error:
                raise storage_fails(error) from error
            finally:
                await self.disk.run_anyway(lambda: _discard(path))
        await exchange.respond(200, encode_json(file.to_object()))

    def finder(self, tenant: str) -> FindStored:
        """Return what finds the files that requests of a tenant may show to a model."""

        def find(file_id: str, field: str) -> StoredMedia:
            file = self.store.get(file_id, tenant, field)
            if file.sha256 is None:
                purposes = " or ".join(MEDIA_PURPOSES)
                raise InvalidArgument(f"{field} must be a file with the purpose {purposes}", field)
            return StoredMedia(file.size, bytes.fromhex(file.sha256), partial(self._read, file, field))

        return find

    async def _read(self, file: StoredFile, field: str) -> bytes:
        try:
            return await self.disk.run(self.store.path(file.id).read_bytes)
        except FileNotFoundError:
            raise NotFound(f"the file {file.id!r} was deleted", field=field) from None
        except OSError as error:
            raise storage_fails(error) from error

    async def list_files(self, exchange: HttpExchange) -> None:
        """Answer with the tenant's files."""
        names = ("after", "limit", "order", "purpose")
        query = PageQuery.read(exchange.query, most=MAX_ITEMS, default=MAX_ITEMS, names=names)
        files = [
            file.to_object() for file in self.store.of(exchange.tenant.name) if query.purpose in ("", file.purpose)
        ]
        await exchange.respond(200, encode_json(query.page(files)))

    async def retrieve(self, exchange: HttpExchange) -> None:
        """Answer with the description of a file."""
        file = self.store.get(id_of(exchange), exchange.tenant.name)
        await exchange.respond(200, encode_json(file.to_object()))

    async def delete(self, exchange: HttpExchange) -> None:
        """Remove a file."""
        file_id = id_of(exchange)
        try:
            await self.store.delete(file_id, exchange.tenant.name)
        except OSError as error:
            raise storage_fails(error) from error
        await exchange.respond(200, encode_json({"id": file_id, "object": "file", "deleted": True}))

    async def content(self, exchange: HttpExchange) -> None:
        """Send what a file holds, piece by piece."""
        file = self.store.get(id_of(exchange), exchange.tenant.name)
        try:
            opened = self.disk.opened(lambda: self.store.path(file.id).open("rb"), lambda data: data.close())
            async with opened as data:
                await self._send(exchange, file, data)
        except FileNotFoundError:  # it was deleted before it was open
            raise NotFound(f"no file {file.id!r} is stored here") from None
        except OSError as error:
            raise storage_fails(error) from error

    async def _send(self, exchange: HttpExchange, file: StoredFile, data: BinaryIO) -> None:
        # Before the first byte: an answer that has begun can only be cut off, and some clients keep what they have.
        if await self.disk.run(lambda: file.is_damaged(data)):
            log.error("%s is not served and left as it is: its content does not have its checksum", file.id)
            raise Internal(f"the content of {file.id} is damaged on the gateway's disk; upload it again")
        length = str(file.size).encode()
        await exchange.start(200, [(b"content-type", b"application/octet-stream"), (b"content-length", length)])
        is_wanted = exchange.method != "HEAD"
        while is_wanted and (piece := await self.disk.run(lambda: data.read(PIECE_BYTES))):
            await exchange.write(piece)
        await exchange.finish()

    async def _receive(self, exchange: HttpExchange, boundary: bytes, path: Path, room: FileRoom) -> Upload:
        """Write the file of a form to ``path``. ``room``: grows with it."""
        digits = exchange.headers.get(b"content-length", b"")
        length = int(digits) if digits.isdigit() else None
        limit = self.store.limits.file_bytes + FORM_BYTES
        if length is not None:
            # The least that the file will have, before any of it is written: of uploads that are too many together, the
            # first ones then arrive, instead of all being refused when their parts fill the disk.
            self.store.grow(room, exchange.tenant.name, max(length - FORM_BYTES, 0))
        async with self._opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
            upload = Upload(boundary, partial(write_all, descriptor))
            # Written as it arrives: an upload may be larger than the budget of all bodies, of which it holds only one
            # piece.
            async for piece in exchange.body.stream(limit, length):
                await self.disk.run(lambda piece=piece: upload.write(piece))  # type: ignore[misc]
                self.store.grow(room, exchange.tenant.name, upload.size)
            upload.close()
            await self.disk.run(lambda: os.fsync(descriptor))
        return upload

    def _opened(self, path: Path, flags: int) -> AbstractAsyncContextManager[int]:
        return self.disk.opened(lambda: os.open(path, flags, 0o600), os.close)


def _discard(path: Path) -> None:
    with contextlib.suppress(OSError):  # a disk that fails; the next start removes it
        path.unlink(missing_ok=True)


def storage_fails(error: OSError) -> Unavailable:
    """Return what a client gets when the disk is full, or fails; it may try again."""
    return Unavailable(f"the gateway cannot store this now: {error.strerror}; retry later", retry_after=RETRY_SECONDS)


def id_of(exchange: HttpExchange) -> str:
    """Return the id in a path such as ``/v1/files/ID/content``."""
    return exchange.path.split("/")[3]
