"""Computes the content hashes of full KV blocks, and says which blocks of a prompt are named by them when it is placed.

Engines index their KV blocks by the hashes, and the coordinator places prompts by them; both use this one rule.
Tokenizers, gateways and coordinators know the same schedule, so that hashes need no positions.

Hashes are chained: one stands for everything before it. So all of the first blocks are named, where prompts differ, and
further back fewer and fewer: 256 hashes reach 2,528 blocks, which are 40,448 tokens of 16 to a block.
"""

import hashlib
import struct
from bisect import bisect, bisect_left
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, chain, repeat
from operator import attrgetter
from typing import Final, NamedTuple, Protocol, TypeVar

_TOKEN_BYTES = 4


@cache
def _token_packer(block_size: int) -> struct.Struct:
    return struct.Struct(f"<{block_size}I")


def hash_block(parent: bytes, token_ids: Sequence[int], salt: bytes) -> bytes:
    """Return SHA-256 over the parent's hash (first: the seed), the ids as little-endian u32, and the salt."""
    return hashlib.sha256(parent + _token_packer(len(token_ids)).pack(*token_ids) + salt).digest()


class MediaTokens(NamedTuple):
    """Says which consecutive tokens of a prompt have rows of an image or a sound."""

    position: int
    """Position of the first token in the prompt."""
    num_tokens: int
    row_offset: int
    """The row of the first token, among those of the image."""
    key: bytes
    """Stands for all rows of the image."""


class CoversTokens(Protocol):
    """Is :class:`MediaTokens`, or has its fields among others."""

    @property
    def position(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def row_offset(self) -> int: ...
    @property
    def key(self) -> bytes: ...


_position: Final = attrgetter("position")


def media_salt(salt: bytes, media: Sequence[CoversTokens], start: int, end: int) -> bytes:
    """Return what identifies the tokens ``start`` to ``end`` of a prompt besides their ids, for the hash of their
    block: the salt, or with rows of images among them SHA-256 over the salt and, for each span, its place in the block,
    its first row and its key. ``media``: in order of position, without overlap."""
    digest = None
    first = max(bisect(media, start, key=_position) - 1, 0)  # the last span that begins before the block
    for span in media[first : bisect_left(media, end, key=_position)]:
        begin, stop = max(span.position, start), min(span.position + span.num_tokens, end)
        if begin < stop:
            digest = digest or hashlib.sha256(struct.pack("<Q", len(salt)) + salt)
            row = span.row_offset + begin - span.position
            # The key and not the rows: those are 10 to 50 MB, and only the engine that computes them has them.
            digest.update(struct.pack("<QQQQ", begin - start, stop - begin, row, len(span.key)) + span.key)
    return digest.digest() if digest is not None else salt


def block_hashes(
    token_ids: Sequence[int],
    block_size: int,
    seed: bytes = b"",
    salt: bytes = b"",
    media: Sequence[CoversTokens] = (),
) -> list[bytes]:
    """Return the hash of each full block of ``token_ids``. Equal hashes mean equal prefixes under an equal salt.

    ``media``: the tokens that have rows, as :func:`media_salt` takes them; their positions count from the first of
    these ids.
    """
    num_tokens = len(token_ids) // block_size * block_size
    if isinstance(token_ids, memoryview):  # packed ids: see packed_ids.py
        data = token_ids[:num_tokens].tobytes()
    else:
        data = struct.pack(f"<{num_tokens}I", *token_ids[:num_tokens])
    block_bytes, sha256 = _TOKEN_BYTES * block_size, hashlib.sha256
    hashes: list[bytes] = []
    parent = seed
    block_salt = salt
    for start in range(0, len(data), block_bytes):
        if media:
            first = start // _TOKEN_BYTES
            block_salt = media_salt(salt, media, first, first + block_size)
        # A salt of 16 bytes costs nothing: 32 bytes of the parent and 64 of a block of 16 tokens take two blocks of
        # SHA-256 with it and without it.
        parent = sha256(parent + data[start : start + block_bytes] + block_salt).digest()
        hashes.append(parent)
    return hashes


def specimen_hash(block_size: int, seed: bytes = b"") -> bytes:
    """Return the hash of the block of the ids 0, 1, 2 and so on: processes that agree on it agree on all hashes."""
    return block_hashes(range(block_size), block_size, seed)[0]


_STRIDES: Final = ((128, 1), (16, 2), (16, 4), (32, 8), (64, 32))
"""So many hashes, each of which stands for so many blocks more than the one before it."""
_NUM_LEADING: Final = _STRIDES[0][0]
"""So many blocks at the beginning are all named."""

LEADING_BLOCKS: Final = (0, *accumulate(chain.from_iterable(repeat(stride, count) for count, stride in _STRIDES)))
"""How many leading blocks of a prompt the first hashes stand for, by the number of hashes. Shape [257]."""
MAX_HASHES: Final = len(LEADING_BLOCKS) - 1
MAX_BLOCKS: Final = LEADING_BLOCKS[-1]
"""Blocks behind this one are not named."""
SESSION_HASHES: Final = 128
"""A prompt that names so many blocks, 2,048 tokens of 16 to a block, may be a turn of a session that its client does
not name: the coordinator looks for an earlier one. To compute a shorter one again costs less than that."""
_HASH_BYTES: Final = 8

T = TypeVar("T")


def scheduled(hashes: Sequence[T]) -> list[T]:
    """Return the hashes of the blocks that are named. ``hashes``: of all blocks of a prompt, from the first on."""
    # Tokenizers and the coordinator share the schedule, so hashes need no positions. With 256 neighbouring blocks they
    # would end at 4,096 tokens, and long prompts with a common beginning would look alike.
    named, num_blocks = list(hashes[:_NUM_LEADING]), len(hashes)
    for blocks in LEADING_BLOCKS[_NUM_LEADING + 1 :]:
        if blocks > num_blocks:
            break
        named.append(hashes[blocks - 1])
    return named


def prefix_hashes(
    token_ids: Sequence[int], block_size: int, salt: bytes = b"", media: Sequence[CoversTokens] = ()
) -> list[int]:
    """Return the prefixes of the hashes of the named blocks of a prompt, as ``Submit.block_hash_prefixes`` has them.
    ``media``: as :func:`media_salt` takes them.

    Takes 2 ms for the longest prompt in blocks of 16 tokens.
    """
    return shortened(block_hashes(token_ids[: MAX_BLOCKS * block_size], block_size, salt=salt, media=media))


def shortened(hashes: Sequence[bytes]) -> list[int]:
    """Return the prefixes of the hashes of the blocks that are named. ``hashes``: of all blocks of a prompt."""
    prefixes = []
    for each in scheduled(hashes):
        prefixes.append(int.from_bytes(each[:_HASH_BYTES], "little"))
    return prefixes


def named_within(num_before: int, num_blocks: int) -> Sequence[int]:
    """Return how many leading blocks the hashes stand for that name one of the ``num_blocks`` behind ``num_before``."""
    return LEADING_BLOCKS[bisect(LEADING_BLOCKS, num_before) : bisect(LEADING_BLOCKS, num_before + num_blocks)]


def num_named(num_blocks: int) -> int:
    """Return how many hashes a prompt of so many blocks has."""
    return bisect(LEADING_BLOCKS, num_blocks) - 1


def last_named(num_blocks: int) -> int:
    """Return how many leading blocks the last hash stands for among ``num_blocks``; 0: none is named."""
    return LEADING_BLOCKS[num_named(num_blocks)]
