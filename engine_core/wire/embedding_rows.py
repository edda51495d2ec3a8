"""Rows that take the place of token embeddings in a prompt."""

import hashlib
import struct
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt


class EmbedsSpan(msgspec.Struct, array_like=True, gc=False):
    """Consecutive tokens of a prompt that have rows instead of ids; their ids are 0 and mean nothing."""

    position: int
    """Of the first, in the prompt."""
    rows: npt.NDArray[np.float32]
    """[n, hidden_size]"""


def content_salt(salt: bytes, spans: Sequence[EmbedsSpan]) -> bytes:
    """What stands for all that a prompt is besides its token ids, in block hashes and in the digest of a lease: the
    salt alone, or SHA-256 over it and every row. So a prompt with rows shares blocks only with its own like."""
    if not spans:
        return salt
    digest = hashlib.sha256(struct.pack("<Q", len(salt)) + salt)
    for span in spans:
        digest.update(struct.pack("<QQQ", span.position, *span.rows.shape))
        digest.update(np.ascontiguousarray(span.rows, dtype="<f4").data)
    return digest.digest()
