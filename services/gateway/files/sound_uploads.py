"""Takes the sounds that clients upload: they stand on disk while their requests run, and never whole in memory."""

import asyncio
import hashlib
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Final

from tokenloom.request.errors import Internal, InvalidArgument
from tokenloom.request.limits import DividedLimit

from ..http.http_exchange import HttpExchange, UnsupportedEncoding
from ..http.request_body import BODY_SECONDS, BodyTimeout, too_large
from ..records.media import ClientFile
from ..tenants.tenant_shares import TenantShare
from .files_api import FORM_BYTES, storage_fails
from .multipart import Upload, boundary_of

_SLOWEST_BYTES: Final = 64 << 10
"""Of an upload in a second, at least, beside the time of any body: a client that sends a byte now and then would hold
its room for ever."""
STEP_BYTES: Final = 1 << 20
"""Of a body without a length, room is taken in such steps."""


class SpooledFile:
    """A temporary file without a name: whatever ends the process ends the file too. Several threads may use it.

    Attributes:
        size: Bytes so far.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (closed by `close`)
        self._lock = threading.Lock()
        self._digest = hashlib.sha256()
        self.size = 0
        self._is_left = False

    def write(self, data: bytes) -> None:
        """Add bytes. Raises ``OSError``, and ``ValueError`` after :meth:`close`."""
        with self._used():
            self._file.seek(0, 2)
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) or 0 :]
        self._digest.update(data)
        self.size += len(data)

    def read(self, start: int, size: int) -> bytes:
        """Return bytes. Raises ``OSError``, and ``ValueError`` after :meth:`close`."""
        with self._used():  # the place at which a file is read belongs to the file
            self._file.seek(start)
            return self._file.read(size) or b""

    def digest(self) -> bytes:
        """Return the SHA-256 over its bytes."""
        return self._digest.digest()

    def close(self) -> None:
        """Remove the file, or let the thread that uses it do so: a disk that hangs must not hold up the event loop."""
        self._is_left = True
        if self._lock.acquire(blocking=False):
            self._file.close()
            self._lock.release()

    @contextmanager
    def _used(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            if self._is_left:
                self.close()


@dataclass(frozen=True, slots=True, eq=False)
class DiskFile(ClientFile):
    """A file on disk, as it is sent to an encoder."""

    spooled: SpooledFile

    async def parts(self, size: int) -> AsyncIterator[bytes]:
        """Yield its bytes, at most ``size`` at a time. Raises ``Internal`` if the disk fails."""
        for start in range(0, self.num_bytes, size):
            try:
                data = await asyncio.to_thread(self.spooled.read, start, size)
            except OSError as error:
                message = f"the gateway cannot read the sound from its disk ({error.strerror}); send it again"
                raise Internal(message) from error
            yield data


@dataclass(frozen=True, slots=True)
class SoundForm:
    """A form with a sound."""

    upload: Upload
    """What stands in its other parts."""
    file: DiskFile


@dataclass(frozen=True, slots=True)
class SoundUploads:
    """Receives forms.

    Attributes:
        max_bytes: Of one sound.
        room: For the bytes of all sounds of the gateway.
    """

    max_bytes: int
    room: DividedLimit

    @asynccontextmanager
    async def receive(self, exchange: HttpExchange, share: TenantShare) -> AsyncIterator[SoundForm]:
        """Read a form to its end, and hold its sound for the length of the ``async with``.

        Raises ``InvalidArgument``, ``PayloadTooLarge``, ``ResourceExhausted`` if the sounds of other requests take all
        room, ``Unavailable`` if the disk fails, and what :meth:`RequestBody.stream` raises.
        """
        boundary = boundary_of(exchange.headers.get(b"content-type", b""))
        if exchange.headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise UnsupportedEncoding("Content-Encoding is not supported; send the body uncompressed")
        digits = exchange.headers.get(b"content-length", b"")
        length, limit = int(digits) if digits.isdigit() else None, self.max_bytes + FORM_BYTES
        if length is not None and length > limit:
            raise too_large(limit)
        # All at once where the length is known: otherwise several uploads would each fill a part of the room, and all
        # of them would be refused in the middle.
        with ExitStack() as held:
            held.callback(share.take_sound(STEP_BYTES if length is None else length, self.room).release)
            spooled = _spooled(held)
            upload = Upload(boundary, spooled.write)
            try:
                async with asyncio.timeout(BODY_SECONDS + (length or limit) / _SLOWEST_BYTES):
                    await self._fill(exchange, upload, share, held, length)
            except TimeoutError:
                raise BodyTimeout("the body did not arrive in time") from None
            if not spooled.size:
                raise InvalidArgument("the file is empty", "file")
            yield SoundForm(upload, DiskFile((), spooled.size, spooled.digest(), spooled))

    @asynccontextmanager
    async def collect(self, pieces: AsyncIterator[bytes], share: TenantShare) -> AsyncIterator[DiskFile]:
        """Write a sound that comes in pieces, and hold it for the length of the ``async with``.

        Raises ``InvalidArgument`` for one without bytes, otherwise as :meth:`receive`, and what ``pieces`` raises.
        """
        with ExitStack() as held:
            spooled, num_bytes, room = _spooled(held), 0, 0
            try:
                async with asyncio.timeout(BODY_SECONDS + self.max_bytes / _SLOWEST_BYTES):
                    async for piece in pieces:
                        num_bytes += len(piece)
                        if num_bytes > self.max_bytes:
                            raise too_large(self.max_bytes)
                        while num_bytes > room:
                            held.callback(share.take_sound(STEP_BYTES, self.room).release)
                            room += STEP_BYTES
                        await asyncio.to_thread(spooled.write, piece)
            except TimeoutError:
                raise BodyTimeout("the sound did not arrive in time") from None
            except OSError as error:
                raise storage_fails(error) from error
            if not spooled.size:
                raise InvalidArgument("the sound is empty", "data")
            yield DiskFile((), spooled.size, spooled.digest(), spooled)

    async def _fill(
        self, exchange: HttpExchange, upload: Upload, share: TenantShare, held: ExitStack, length: int | None
    ) -> None:
        num_bytes, room = 0, STEP_BYTES if length is None else length
        try:
            async for piece in exchange.body.stream(self.max_bytes + FORM_BYTES, length):
                num_bytes += len(piece)
                while num_bytes > room:
                    held.callback(share.take_sound(STEP_BYTES, self.room).release)
                    room += STEP_BYTES
                await asyncio.to_thread(upload.write, piece)
        except OSError as error:
            raise storage_fails(error) from error
        upload.close()


def _spooled(held: ExitStack) -> SpooledFile:
    """Return a new file that ``held`` closes. Raises ``Unavailable`` if the disk fails."""
    try:
        spooled = SpooledFile()
    except OSError as error:
        raise storage_fails(error) from error
    held.callback(spooled.close)
    return spooled
