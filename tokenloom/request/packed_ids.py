"""The token ids of long prompts as little-endian 32-bit numbers in one piece of bytes.

100,000 ids as integers of Python were made and looked at twelve times on their way from the client to the core, and
four million held the interpreter's lock of a gateway for 0.2 s. Packed, they are copied and searched within 2 ms.

A prompt has either ids or packed ids. Where most prompts are short, callers read ``prompt.token_ids or ids_of(prompt)``
and so pay nothing for this.
"""

import struct
import sys
from array import array
from collections.abc import Sequence
from typing import TypeAlias, cast

from tokenloom.v1.tokenizer_pb2 import TokenizedPrompt
from tokenloom.v1.types_pb2 import Prompt

from .errors import InvalidArgument

LONG_PROMPT = 1 << 12
"""A prompt of more tokens is packed where its receiver takes it."""
MOST_IDS = 12 << 20
"""A prompt of more tokens is not packed: a message may have 64 MiB."""
ID_BYTES = 4
AnyPrompt: TypeAlias = TokenizedPrompt | Prompt
_PACKED_FIELD = TokenizedPrompt.DESCRIPTOR.fields_by_name["packed_token_ids"].number
_PROMPT_FIELD = 1
"""``EncodeResponse.prompts`` and ``EncodeChatResponse.prompt``."""


def pack(token_ids: Sequence[int]) -> bytes:
    """Return the ids, which must be below 2**32, as bytes."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def packed_values(values: Sequence[object]) -> bytes | None:
    """Return the values of a long prompt as packed ids; None: the prompt is too short or too long for it, or not all
    are integers that the wire can carry."""
    if not LONG_PROMPT < len(values) <= MOST_IDS or set(map(type, values)) != {int}:
        return None
    try:
        ids = array("I", cast(Sequence[int], values))
    except OverflowError:  # one is negative or too large
        return None
    return _swapped(ids).tobytes()


def num_ids(prompt: AnyPrompt) -> int:
    """Return how many tokens a prompt has, packed or not."""
    return len(prompt.token_ids) or len(prompt.packed_token_ids) // ID_BYTES


def ids_of(prompt: AnyPrompt) -> Sequence[int]:
    """Return the ids of a prompt without copying them. They become integers where they are read, so read a part.

    Raises ``InvalidArgument`` for bytes that are no whole ids, or that stand beside others.
    """
    packed = prompt.packed_token_ids  # each look at it copies it
    if not packed:
        return prompt.token_ids
    if prompt.token_ids or len(packed) % ID_BYTES:
        text = f"has {len(packed)} bytes beside {len(prompt.token_ids)} token_ids: it needs {ID_BYTES} for each id, and"
        raise InvalidArgument(f"packed_token_ids {text} no token_ids", "packed_token_ids")
    return memoryview(packed).cast("I") if sys.byteorder == "little" else _swapped(array("I", packed))


def unpack(prompt: AnyPrompt) -> None:
    """Give a packed prompt its ids as a list, as older receivers read them. Raises as :func:`ids_of`."""
    if prompt.packed_token_ids:
        ids = ids_of(prompt)
        prompt.ClearField("packed_token_ids")
        prompt.token_ids.extend(ids)


def response_of(ids: Sequence[bytes], rest: TokenizedPrompt) -> bytes:
    """Return an ``EncodeResponse``, or ``EncodeChatResponse``, of one prompt as it is sent.

    Args:
        ids: The prompt's packed ids, in parts.
        rest: What else the prompt holds.
    """
    # Written here: as messages, 16 MB of ids were copied six times in one turn of the event loop, 30 to 80 ms.
    fields = rest.SerializeToString()
    num_bytes = sum(map(len, ids))
    head = _tag(_PACKED_FIELD) + _varint(num_bytes)
    size = len(head) + num_bytes + len(fields)
    return b"".join([_tag(_PROMPT_FIELD), _varint(size), head, *ids, fields])


def are_ids(packed: bytes, size: int) -> bool:
    """Return whether these are packed ids, at least one, that are all below ``size``."""
    return bool(packed) and not len(packed) % ID_BYTES and largest(packed) < size


def largest(packed: bytes | memoryview) -> int:
    """Return the largest of packed ids, of which there is at least one."""
    import numpy as np  # imported here: it would cost the start of a gateway 0.1 s

    return int(np.frombuffer(packed, "<u4").max())


def _tag(number: int) -> bytes:
    """Return what begins a field of bytes, or of a message. ``number``: below 16."""
    return bytes([number << 3 | 2])


def _varint(value: int) -> bytes:
    """Return a length as protobuf writes it: 7 bits in a byte, the lowest first."""
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def _swapped(ids: "array[int]") -> "array[int]":
    """Return the ids in the other byte order where this machine's is not that of the wire."""
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
