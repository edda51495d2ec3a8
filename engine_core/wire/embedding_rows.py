"""Rows that replace token embeddings in a prompt."""

import hashlib
import struct
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt


class EmbedsSpan(msgspec.Struct, array_like=True, gc=False):
    """Describes consecutive tokens of a prompt that have rows instead of ids; their ids are 0 and have no meaning."""

    position: int
    """Position of the first token in the prompt."""
    rows: npt.NDArray[np.float32]
    """[n, hidden_size]"""


def content_salt(salt: bytes, spans: Sequence[EmbedsSpan]) -> bytes:
    """Return what identifies a prompt besides its token ids, for block hashes and the digest of a lease: the salt, or
    with rows SHA-256 over the salt and all rows. A prompt shares blocks only with prompts of equal rows."""
    if not spans:
        return salt
    digest = hashlib.sha256(struct.pack("<Q", len(salt)) + salt)
    for span in spans:
        digest.update(struct.pack("<QQQ", span.position, *span.rows.shape))
        digest.update(np.ascontiguousarray(span.rows, dtype="<f4").data)
    return digest.digest()
