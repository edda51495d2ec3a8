"""Rows that replace token embeddings in a prompt: those that a client sent, and those of images, videos and sounds."""

import bisect
import hashlib
import struct
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tokenloom.request.prefix_schedule import media_salt

_POSITION = attrgetter("position")


class EmbedsSpan(msgspec.Struct, array_like=True, gc=False):
    """Describes consecutive tokens of a prompt that have rows instead of ids; their ids are 0 and have no meaning."""

    position: int
    """Position of the first token in the prompt."""
    rows: npt.NDArray[np.float32]
    """[n, hidden_size]"""


class RowsKey(NamedTuple):
    """Names the rows of an image, with their shape: a request that states another one gets no rows of a wrong shape."""

    key: bytes
    num_rows: int
    levels: int


class MediaSpan(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Describes consecutive tokens of a prompt that have rows of an image, a video or a sound. The encoder computes the
    rows; they come to the engine when a step needs them.

    A sound that stands beside the prompt, to whose rows all tokens attend, has none: position and ``num_tokens`` are 0.
    """

    position: int
    """Position of the first token in the prompt."""
    num_tokens: int
    row_offset: int
    """The row of the first token, among those of the image."""
    key: bytes
    """Stands for all rows of the image: equal keys mean equal rows."""
    num_rows: int
    """Rows of the whole image."""
    is_whole: bool = False
    """Whether each of its tokens sees all of them, so that no chunk may end among them."""
    grid: tuple[int, int, int] = (0, 0, 0)
    """(frames, rows, columns) of the span, for models whose rotary positions count these; zeros: positions go on one by
    one."""
    levels: int = 1
    """Rows side by side: a row has so many times the model's hidden size of numbers."""
    frame_step: float = 1.0
    """Rotary positions from a frame of the grid to the next; the whole ones are counted, in float32. It is no part of
    the hashes of blocks: the key stands for it too."""

    @property
    def end(self) -> int:
        """Position of the first token behind it."""
        return self.position + self.num_tokens

    @property
    def is_beside(self) -> bool:
        """Whether the rows stand beside the prompt, and in the place of none of its tokens."""
        return not self.num_tokens

    @property
    def rows_key(self) -> RowsKey:
        """The rows of the whole image."""
        return RowsKey(self.key, self.num_rows, self.levels)


def beside_salt(salt: bytes, key: bytes) -> bytes:
    """Return what identifies all tokens of a prompt besides their ids if the rows with this key stand beside it."""
    return hashlib.sha256(struct.pack("<Q", len(salt)) + salt + key).digest()


def content_salt(salt: bytes, spans: Sequence[EmbedsSpan], media: Sequence[MediaSpan] = ()) -> bytes:
    """Return what identifies a prompt besides its token ids, for the digest of a lease: the salt, or with rows SHA-256
    over the salt and all rows, and with images over the salt and their keys and places."""
    if spans:
        salt = _digest(salt, ((span.position, span.rows) for span in spans))
    return media_salt(salt, media, 0, media[-1].end) if media else salt


def block_salt(salt: bytes, spans: Sequence[EmbedsSpan], start: int, end: int) -> bytes:
    """Return what identifies the tokens ``start`` to ``end`` besides their ids, for the hash of their block: the salt,
    or with a client's rows among them SHA-256 over the salt and these rows. ``spans``: in order of position."""
    first = bisect.bisect_right(spans, start, key=_POSITION) - 1  # the last span that begins before the block
    rows = []
    for span in spans[max(first, 0) : bisect.bisect_left(spans, end, key=_POSITION)]:
        if len(inside := span.rows[max(start - span.position, 0) : end - span.position]):
            # Only rows inside of the block: salting all blocks with all rows kept even the tokens before the first
            # embedding from being shared.
            rows.append((max(span.position - start, 0), inside))
    return _digest(salt, rows) if rows else salt


def _digest(salt: bytes, parts: Iterable[tuple[int, npt.NDArray[np.float32]]]) -> bytes:
    """Return SHA-256 over the salt and the rows with their positions."""
    digest = hashlib.sha256(struct.pack("<Q", len(salt)) + salt)
    for position, rows in parts:
        digest.update(struct.pack("<QQQ", position, *rows.shape))
        digest.update(np.ascontiguousarray(rows, dtype="<f4").data)
    return digest.digest()
