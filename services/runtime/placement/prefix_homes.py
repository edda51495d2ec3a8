"""Names the engines at which a prefix is at home. Every process names the same ones, without asking another: output
processors place by them while the coordinator is away, and with ``--placement cost`` the coordinator prefers them, so
that cached prefixes are found there. Every process chooses the same engine for a name (rendezvous hashing: Thaler and
Ravishankar, 1998), and an engine that joins or leaves moves few names. No I/O."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from .engine_columns import EngineColumns, FloatColumn, Rows
from .pool import Candidates, Pool
from .rules import WAITING_WEIGHT, Ask, Rule

NUM_HOMES = 2
"""Engines that share a prefix. With two choices the longest queue grows with log log n instead of log n / log log n
(Mitzenmacher, The power of two choices in randomized load balancing, 2001); each further home is one more cache that
computes the prefix."""
LEADING_BLOCKS = (16, 64, 256)
"""Lengths of the prefixes that have homes, in blocks. The short one counts until its homes have too much to do: a
prefix that more requests share than two engines can take, such as a system prompt that all requests begin with, is
followed by its longer ones."""
OVERLOAD = 1.5
"""A home is passed over when it has more to do than so many times the mean (Mirrokni et al., Consistent hashing with
bounded loads, 2018)."""
_SLACK = 2 * WAITING_WEIGHT
"""A home may have so much more to do in any case: one process sees few requests, which are no burden yet."""
MAX_KEYS = 4096
"""Prefixes whose homes are remembered of a pool: to rank a thousand engines takes longer than the rest of a pick."""
_KEY_BITS = (1 << 64) - 1


def keys_of(block_hashes: Sequence[int]) -> list[int]:
    """Return the hashes of the leading blocks of a prompt, at most one for each of :data:`LEADING_BLOCKS`. Hashes are
    chained: a block's stands for all of its prefix."""
    count = len(block_hashes)
    keys = [block_hashes[length - 1] for length in LEADING_BLOCKS if length < count]
    if count and len(keys) < len(LEADING_BLOCKS):
        keys.append(block_hashes[count - 1])
    return keys


def homes_of(engines: EngineColumns, pool: Pool, block_hashes: Sequence[int]) -> Sequence[int]:
    """Return the rows of the engines at which the beginning of a prompt is at home; none if it is at home on no engine,
    or on all that prefill."""
    rows = pool.prefillers.rows
    if not block_hashes or len(rows) <= NUM_HOMES:
        return ()
    key = block_hashes[min(LEADING_BLOCKS[0], len(block_hashes)) - 1]
    if (homes := pool.homes.get(key)) is None:
        if len(pool.homes) >= MAX_KEYS:
            pool.homes.clear()
        highest = np.argpartition(weights(engines.name_hash[rows], key), -NUM_HOMES)[-NUM_HOMES:]
        homes = pool.homes[key] = tuple(rows[highest].tolist())
    return homes


def rule(keys: Sequence[int], loads: FloatColumn, holders: Sequence[int] = ()) -> Rule:
    """Return the rule by which the engine of a prompt is best: a holder or, if there is none that has not too much to
    do, its home with the least to do. If all homes have too much to do, so is the engine with the least to do.

    Args:
        keys: Hashes of prefixes of the prompt, the one that most requests share first; at least one.
        loads: What each engine has to do, by row, shape [capacity].
        holders: Rows of engines that have the prompt's beginning in their caches.
    """

    def cost(engines: EngineColumns, candidates: Candidates, ask: Ask) -> FloatColumn:
        costs = np.ones(len(candidates))
        able = np.isin(candidates.rows, holders).nonzero()[0]
        costs[_best(engines.name_hash[candidates.index], loads[candidates.index], keys, able)] = 0
        return costs

    return cost


def _best(
    names: np.ndarray[tuple[int], np.dtype[np.uint64]], loads: FloatColumn, keys: Sequence[int], holders: Rows
) -> int:
    """Return the position of the best engine; ``names``, ``loads``: shape [n], at least one; ``holders``: positions."""
    limit = OVERLOAD * float(loads.mean()) + _SLACK
    if len(holders) and loads[holders].min() <= limit:
        return int(holders[loads[holders].argmin()])
    order = np.arange(len(names))
    for key in keys:
        order = weights(names, key & _KEY_BITS).argsort()[::-1]
        homes = order[:NUM_HOMES]
        best = homes[loads[homes].argmin()]
        if loads[best] <= limit:
            return int(best)
    return int(order[loads[order].argmin()])


_MULTIPLIERS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


def name_hash(name: str) -> int:
    """Return 64 bits of a name, the same in every process."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def weights(members: NDArray[np.uint64], name: int) -> NDArray[np.uint64]:
    """Return the weight of each member for a name: the highest is chosen. ``members``, ``name``: hashes of names.

    The bits are mixed as in SplitMix64 (Steele, Lea and Flood, 2014), on all members at once.
    """
    mixed = members ^ np.uint64(name)
    mixed = (mixed ^ (mixed >> _SHIFTS[0])) * _MULTIPLIERS[0]
    mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return mixed ^ (mixed >> _SHIFTS[2])
