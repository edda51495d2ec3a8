"""Faults that tests inject, by name: each says where it lies, how often it is to happen, and how often it did."""

import random
import threading
from collections import Counter
from collections.abc import Iterable

FAILPOINTS = {
    "lease_expires": "owner: a lease ends as soon as it is acquired, as if its time had run out during the copy",
    "blocks_reused": "owner: the blocks of a finished prefill are free at once, though the lease goes on",
    "wrong_layout": "owner: finds the reader's layout different",
    "copy_fails": "reader: a batch cannot be copied",
    "torn_copy": "reader: the last byte of a copied batch is wrong",
    "slow_copy": "reader: a batch takes 50 ms longer",
    "verify_twice": "reader: asks for the verdict twice",
    "verdict_lost": "reader: a verdict does not arrive",
}


class Failpoints:
    """Which faults happen. Off where not named; thread-safe."""

    def __init__(self, specs: Iterable[str] = (), seed: int = 0) -> None:
        """``specs``: ``name`` (always) or ``name=share`` of the times. Raises ``ValueError`` for anything else."""
        self._shares = dict(_parse(spec) for spec in specs)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._fired: Counter[str] = Counter()

    def fires(self, name: str) -> bool:
        """Whether the fault is to happen now; then it counts as having happened."""
        assert name in FAILPOINTS, name
        if name not in self._shares:
            return False
        with self._lock:
            fires = self._random.random() < self._shares[name]
            self._fired[name] += fires
        return fires

    def fired(self) -> dict[str, int]:
        """How often each one that is set has happened."""
        with self._lock:
            return {name: self._fired[name] for name in self._shares}


def _parse(spec: str) -> tuple[str, float]:
    name, _, share = spec.partition("=")
    if name not in FAILPOINTS:
        raise ValueError(f"failpoints: {name!r} is unknown; there are {', '.join(FAILPOINTS)}")
    try:
        value = float(share or 1)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"failpoints: {spec!r} must be {name}=share, a share of the times in [0, 1]")
    return name, value
