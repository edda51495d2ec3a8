"""Faults that tests inject by name, with a probability; each fault is counted when it happens."""

import random
import threading
from collections import Counter
from collections.abc import Iterable

FAILPOINTS = {
    "lease_expires": "owner: a lease ends as soon as it is acquired, as if it had expired during the copy",
    "blocks_reused": "owner: the blocks of a finished prefill are freed at once, although the lease continues",
    "wrong_layout": "owner: the reader's layout seems to differ",
    "copy_fails": "reader: copying a batch fails",
    "torn_copy": "reader: the last byte of a copied batch is wrong",
    "slow_copy": "reader: a batch takes 50 ms longer",
    "verify_twice": "reader: asks for the verdict twice",
    "verdict_lost": "reader: a verdict does not arrive",
}


class Failpoints:
    """Decides which faults happen. Faults that are not named never do. Thread-safe."""

    def __init__(self, specs: Iterable[str] = (), seed: int = 0) -> None:
        """``specs``: ``name`` (always) or ``name=probability``. Raises ``ValueError`` for anything else."""
        self._shares = dict(_parse(spec) for spec in specs)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._fired: Counter[str] = Counter()

    def fires(self, name: str) -> bool:
        """Return whether the fault happens now, and count it if it does."""
        assert name in FAILPOINTS, name
        if name not in self._shares:
            return False
        with self._lock:
            fires = self._random.random() < self._shares[name]
            self._fired[name] += fires
        return fires

    def fired(self) -> dict[str, int]:
        """Return how often each fault that is set has happened."""
        with self._lock:
            return {name: self._fired[name] for name in self._shares}


def _parse(spec: str) -> tuple[str, float]:
    name, _, share = spec.partition("=")
    if name not in FAILPOINTS:
        raise ValueError(f"failpoints: {name!r} is unknown; use one of {', '.join(FAILPOINTS)}")
    try:
        value = float(share or 1)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"failpoints: {spec!r} must be {name}=probability, a number from 0 to 1")
    return name, value
