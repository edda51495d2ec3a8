"""Takes the files out of large bodies while they arrive: a body holds the digest of each instead, and its files are
decoded piece by piece, so that a file is never there a second time as base64."""

import asyncio
import binascii
import hashlib
import re
import time
from dataclasses import dataclass
from functools import partial
from typing import Final

from tokenloom.request.errors import InvalidArgument
from tokenloom.request.limits import DividedLimit

from ..records.media import RAW_DIGEST, ClientFile, HeldFiles
from .large_json import PAUSE_SECONDS
from .request_body import BODY_SECONDS, BodyParser, BodyTimeout, RequestBody, too_large

SLICE_BYTES: Final = 256 << 10
"""Decoded at a time, less than a millisecond: base64 is decoded under the interpreter's lock."""
_GATHERED_BYTES: Final = 32 << 10
"""Of small pieces, which are read together: each reading takes the parser's turn."""
SHORTEST_FILE: Final = 16 << 10
"""Shorter texts stay in the body."""
_LOOK_BACK: Final = 512
"""Bytes that are kept until more have come, because a file may begin among them."""
# A quote within a text of JSON has a backslash before it, so nothing here matches within a text. Some libraries write a
# slash as \/, or the plus sign as \u002B. A list of pictures (video/jpeg) stays: it is no base64 as a whole.
_BEGINS: Final = re.compile(
    rb'"(?:url|image_url|audio_url|video_url)"\s*:\s*"data:(?!(?i:video\\?/jpeg)[;,])'
    rb'(?:[^",;\\]|\\/|;(?!base64,)){0,128}(?P<url>;base64,)'
    rb'|"data"\s*:\s*"(?=[A-Za-z0-9+/\\])|(?P<list>"images"\s*:\s*\[\s*")'
)
_NEXT: Final = re.compile(rb'"\s*,\s*"')
_NEXT_MAY_COME: Final = re.compile(rb'"\s*(?:,\s*)?')
_ESCAPED: Final = re.compile(rb"\\(?:u00([0-9a-fA-F]{2})|([/nr]))")
_LONGEST_ESCAPE: Final = 6


class _OpenFile:
    """Decodes a file whose base64 arrives in pieces, unless it turns out to be another text."""

    def __init__(self, *, is_url: bool) -> None:
        self._is_url = is_url
        self._digest = hashlib.sha256()
        self._pieces: list[bytes] = []
        self._rest = b""  # less than four characters
        self._is_over = False  # padding was decoded
        self._had_escapes = False
        self._plain = bytearray()  # the text as it came, once it is known to be no base64

    def feed(self, text: bytes, *, is_last: bool) -> None:
        if self._plain:
            self._plain += text
            return
        begin, came = self._rest, text
        if b"\\" in text:
            text = _ESCAPED.sub(
                lambda match: bytes.fromhex(match[1].decode()) if match[1] else match[2].strip(b"nr"), text
            )
        text = begin + text
        end = len(text) if is_last else len(text) // 4 * 4
        text, self._rest = text[:end], text[end:]
        if text:
            try:
                data = binascii.a2b_base64(text, strict_mode=True)
            except binascii.Error:
                data = b""
            if not data or self._is_over:
                self._become_plain(begin + came)
                return
            self._is_over = text.endswith(b"=")
            self._digest.update(data)
            self._pieces.append(data)
        self._had_escapes |= b"\\" in came

    def _become_plain(self, text: bytes) -> None:
        """Go back to the text that came. Raises ``InvalidArgument`` if that is not known any more."""
        # An argument of a tool may be named as a file is, and any text: it reaches the model as the client has sent it.
        if self._had_escapes:
            raise InvalidArgument("the base64 of a file in the body is damaged: send it again")
        for piece in self._pieces:
            self._plain += binascii.b2a_base64(piece, newline=False)
        self._plain += text
        self._pieces = []

    def end(self, files: dict[bytes, ClientFile]) -> bytes:
        """Add the file to others, and return what stands for it in the body."""
        if self._plain:  # if it should be a file, its reader names the field
            return b";base64," + self._plain if self._is_url else bytes(self._plain)
        file = ClientFile(tuple(self._pieces), sum(map(len, self._pieces)), self._digest.digest())
        files[file.digest] = file
        lead = b";sha256," if self._is_url else RAW_DIGEST.encode()
        return lead + file.digest.hex().encode()


class FileExtractor:
    """Reads the JSON of one body in pieces.

    Attributes:
        files: Those that have ended, by digest.
        text: The body so far, with the digests of its files in their places.
    """

    def __init__(self) -> None:
        self.files: dict[bytes, ClientFile] = {}
        self.text = bytearray()
        self._tail = bytearray()  # what was not read yet
        self._file: _OpenFile | None = None
        self._in_list = False  # the tail begins with the quote that ends an item of a list of files

    def feed(self, piece: bytes) -> None:
        """Read on. To be called in a thread: it pauses for others between two slices."""
        for start in range(0, len(piece), SLICE_BYTES):
            if start:
                time.sleep(PAUSE_SECONDS)
            self._tail += piece[start : start + SLICE_BYTES]
            while self._read(is_last=False):
                pass

    def end(self) -> bytearray:
        """Return the whole text; nothing follows."""
        while self._read(is_last=True):
            pass
        self._take(len(self._tail))
        return self.text

    def _read(self, *, is_last: bool) -> bool:
        """Read what belongs together; return whether there is more to read before more of the body comes."""
        if self._file is not None:
            return self._decode(self._file, is_last=is_last)
        if not self._in_list:
            found = _BEGINS.search(self._tail)
            if found is None:
                self._take(max(len(self._tail) - (0 if is_last else _LOOK_BACK), 0))
                return False
            return self._begin(found, is_url=found["url"] is not None, is_list=found["list"] is not None)
        if (found := _NEXT.match(self._tail)) is not None:
            return self._begin(found, is_url=False, is_list=True)
        if _NEXT_MAY_COME.fullmatch(self._tail) and not is_last:
            return False
        self._in_list = False
        self._take(1)
        return True

    def _begin(self, found: re.Match[bytes], *, is_url: bool, is_list: bool) -> bool:
        """Begin a file behind a match, or leave a short one in the text."""
        at, quote = found.end(), self._tail.find(b'"', found.end())
        if (len(self._tail) if quote < 0 else quote) - at >= SHORTEST_FILE:
            self._take(found.start("url") if is_url else at)
            del self._tail[: at - found.start("url") if is_url else 0]
            self._file = _OpenFile(is_url=is_url)
        elif quote < 0:  # it is not known yet how long it is
            self._take(found.start())
            return False
        else:
            self._take(quote if is_list else quote + 1)
        self._in_list = is_list
        return True

    def _decode(self, file: _OpenFile, *, is_last: bool) -> bool:
        """Decode what has come of a file."""
        quote = self._tail.find(b'"')
        end = quote if quote >= 0 else len(self._tail)
        if quote < 0 and (escape := self._tail.rfind(b"\\", max(end - _LONGEST_ESCAPE, 0))) >= 0 and not is_last:
            end = escape
        file.feed(bytes(self._tail[:end]), is_last=quote >= 0)
        del self._tail[:end]
        if quote < 0:
            return False
        self.text += file.end(self.files)
        self._file = None
        if not self._in_list:
            self._take(1)
        return True

    def _take(self, length: int) -> None:
        """Move the beginning of the tail to the text."""
        self.text += self._tail[:length]
        del self._tail[:length]


_SLOWEST_BYTES: Final = 1 << 20
"""Of a body in a second, at least, beside the time of any body."""


@dataclass(frozen=True, slots=True)
class BodyFiles:
    """Collects large bodies whose files are held apart.

    Attributes:
        parser: In whose thread bodies are read.
        room: For the bytes of all files of the gateway.
    """

    parser: BodyParser
    room: DividedLimit

    async def collect(self, body: RequestBody, limit: int, length: int) -> None:
        """Read a body of ``length`` bytes to its end, of which ``limit`` may belong to anything but files.

        Raises as :meth:`RequestBody.read`, and ``ResourceExhausted`` where no room is left for the files.
        """
        most = (self.room.size or 0) + limit
        if length > most:
            raise too_large(most)
        # All at once: otherwise several bodies would each fill a part of the room, and all of them would be refused in
        # the middle.
        with body.take_media(length, self.room) as reserved:
            try:
                async with asyncio.timeout(BODY_SECONDS + length / _SLOWEST_BYTES):
                    extractor = await self._extract(body, limit, length)
            except TimeoutError:
                raise BodyTimeout("the body did not arrive in time") from None
            num_bytes = sum(file.num_bytes for file in extractor.files.values())
            reserved.release(reserved.amount - min(num_bytes, reserved.amount))
            files = HeldFiles(extractor.files, reserved.move()) if extractor.files else None
        body.keep(extractor.text, files)

    async def _extract(self, body: RequestBody, limit: int, length: int) -> FileExtractor:
        extractor, gathered = FileExtractor(), bytearray()
        async for piece in body.stream(length, length):
            # Large pieces are not copied: with 32 bodies at once, each of which waits for the parser with a piece, its
            # copies took a fifth of the files' bytes.
            if len(gathered) + len(piece) < _GATHERED_BYTES:
                gathered += piece
                continue
            if gathered:
                await self.parser.run(partial(extractor.feed, bytes(gathered)))
                gathered = bytearray()
            await self.parser.run(partial(extractor.feed, piece))
            del piece  # while the next one is on its way
            if len(extractor.text) > limit:
                raise too_large(limit)
        await self.parser.run(partial(extractor.feed, bytes(gathered)))
        if len(await self.parser.run(extractor.end)) > limit:
            raise too_large(limit)
        return extractor
