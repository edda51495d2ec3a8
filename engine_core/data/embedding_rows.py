"""Rows that replace token embeddings in a prompt."""

import bisect
import hashlib
import struct
from collections.abc import Iterable, Sequence
from operator import attrgetter

import msgspec
import numpy as np
import numpy.typing as npt

_POSITION = attrgetter("position")


class EmbedsSpan(msgspec.Struct, array_like=True, gc=False):
    """Describes consecutive tokens of a prompt that have rows instead of ids; their ids are 0 and have no meaning."""

    position: int
    """Position of the first token in the prompt."""
    rows: npt.NDArray[np.float32]
    """[n, hidden_size]"""


def content_salt(salt: bytes, spans: Sequence[EmbedsSpan]) -> bytes:
    """Return what identifies a prompt besides its token ids, for the digest of a lease: the salt, or with rows SHA-256
    over the salt and all rows."""
    return _digest(salt, ((span.position, span.rows) for span in spans)) if spans else salt


def block_salt(salt: bytes, spans: Sequence[EmbedsSpan], start: int, end: int) -> bytes:
    """Return what identifies the tokens ``start`` to ``end`` besides their ids, for the hash of their block: the salt,
    or with rows among them SHA-256 over the salt and these rows. ``spans``: in order of position."""
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
