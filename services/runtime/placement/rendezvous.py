"""Chooses an engine by a name alone, so that every process chooses the same (rendezvous hashing: Thaler and
Ravishankar, 1998): an engine that joins or leaves moves few names."""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

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
