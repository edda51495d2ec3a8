"""The token ids of long prompts as little-endian 32-bit numbers in one piece of bytes.

Four million ids as integers of Python held the interpreter's lock of a gateway for 0.2 s; packed, they are copied and
searched within 2 ms.
"""

import struct
import sys
from array import array
from collections.abc import Sequence

from tokenloom.v1.tokenizer_pb2 import TokenizedPrompt

LONG_PROMPT = 1 << 14
"""A prompt of more tokens is packed where the caller takes it."""
MOST_IDS = 12 << 20
"""A prompt of more tokens is not packed: a message may have 64 MiB."""
ID_BYTES = 4


def pack(token_ids: Sequence[int]) -> bytes:
    """Return the ids, which must be below 2**32, as bytes."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def num_ids(prompt: TokenizedPrompt) -> int:
    """Return how many tokens a prompt has, packed or not."""
    return len(prompt.token_ids) or len(prompt.packed_token_ids) // ID_BYTES


def ids_of(prompt: TokenizedPrompt) -> Sequence[int]:
    """Return the ids of a prompt without copying them. They become integers where they are read, so read a part."""
    packed = prompt.packed_token_ids  # each look at it copies it
    if not packed:
        return prompt.token_ids
    if sys.byteorder == "big":
        swapped = array("I", packed)
        swapped.byteswap()
        return swapped
    return memoryview(packed).cast("I")


def are_ids(packed: bytes, size: int) -> bool:
    """Return whether these are packed ids, at least one, that are all below ``size``."""
    import numpy as np  # imported here: it would cost the start of a gateway 0.1 s

    return bool(packed) and not len(packed) % ID_BYTES and int(np.frombuffer(packed, "<u4").max()) < size
