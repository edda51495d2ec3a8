"""Names the engines at which a prefix is at home. Every process names the same ones, without asking another. No I/O."""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Salts: TypeAlias = "NDArray[np.uint64]"
Loads: TypeAlias = "NDArray[np.float64]"

NUM_HOMES = 2
"""Engines that share a prefix. With two choices the longest queue grows with log log n instead of log n / log log n
(Mitzenmacher, The power of two choices in randomized load balancing, 2001); each further home is one more cache that
computes the prefix."""
LEADING_BLOCKS = (16, 64, 256)
"""Lengths of the prefixes that have homes, in blocks. The short one counts until its homes have too much to do: a
prefix that more requests share than two engines can take, such as the system prompt of everybody, is followed by its
longer ones."""
OVERLOAD = 1.5
"""A home is passed over when it has more to do than so many times the mean, and ``SLACK`` more (Mirrokni et al.,
Consistent hashing with bounded loads, 2018)."""
_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def salts_of(engine_ids: Iterable[str]) -> Salts:
    """Return a number for each engine (``[engines]``, uint64), which depends on its name only: an engine that starts
    again has the same homes, and one that joins or leaves moves few prefixes."""
    digests = b"".join(blake2b(name.encode(), digest_size=8).digest() for name in engine_ids)
    return np.frombuffer(digests, dtype="<u8").astype(np.uint64)


def keys_of(block_hashes: Sequence[int]) -> Iterator[int]:
    """Yield the hashes of the leading blocks of a prompt, at most one for each of :data:`LEADING_BLOCKS`. Hashes are
    chained: a block's stands for all of its prefix."""
    for length in LEADING_BLOCKS:
        if block_hashes:
            yield block_hashes[min(length, len(block_hashes)) - 1]
        if len(block_hashes) <= length:
            return


def in_order(salts: Salts, key: int) -> NDArray[np.intp]:
    """Return the indices of the engines, those at which ``key`` is at home first (rendezvous hashing: Thaler and
    Ravishankar, 1998; the weights are splitmix64's finalizer)."""
    mixed = salts ^ np.uint64(key & 0xFFFFFFFFFFFFFFFF)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * multiplier
    return np.argsort(mixed ^ (mixed >> np.uint64(31)))[::-1]


def best_home(salts: Salts, loads: Loads, keys: Iterable[int], slack: float) -> int:
    """Return the index of the engine that takes a prompt.

    Args:
        salts, loads: Of each engine (``[engines]``, at least one): :func:`salts_of`, and what it has to do.
        keys: Prefixes of the prompt, the one that most requests share first; at least one.
        slack: What a home may have to do in any case, in the unit of ``loads``.

    The home with the least to do takes it. If all homes have too much to do, so does the engine with the least to do.
    """
    limit = OVERLOAD * float(loads.mean()) + slack
    order = np.arange(len(salts))
    for key in keys:
        order = in_order(salts, key)
        homes = order[:NUM_HOMES]
        best = homes[loads[homes].argmin()]
        if loads[best] <= limit:
            return int(best)
    return int(order[loads[order].argmin()])
