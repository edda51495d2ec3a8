"""Numbers what engines serve: a thousand engines have a few different fingerprints, which are compared once."""

import numpy as np

from tokenloom.services.runtime.peers.hello import fingerprint_difference
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint

from .engine_columns import BoolColumn

POOL_FIELDS = ("model", "weights", "tokenizer")
"""Engines that are equal in these fields give the same answers and form a pool."""
PAIR_FIELDS = (*POOL_FIELDS, "kv_layout")
"""Engines that are equal in these fields can read each other's KV."""

_DECODE = EngineRole.ENGINE_ROLE_DECODE


def in_pool(asked: Fingerprint, engine: Fingerprint, leg: EngineRole) -> bool:
    """Return whether ``engine`` may run this leg; for a decode leg, ``asked`` is the engine that has the KV."""
    return fingerprint_difference(asked, engine, PAIR_FIELDS if leg == _DECODE else POOL_FIELDS) is None


class FingerprintKinds:
    """Numbers fingerprints from 0 by the fields that placement compares."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}
        self._fingerprints: list[Fingerprint] = []

    def __len__(self) -> int:
        return len(self._fingerprints)

    def number(self, fingerprint: Fingerprint) -> int:
        """Return the number of a fingerprint, a new one if no engine had it before."""
        key = tuple(getattr(fingerprint, field) for field in PAIR_FIELDS)
        number = self._numbers.setdefault(key, len(self._fingerprints))
        if number == len(self._fingerprints):
            self._fingerprints.append(fingerprint)
        return number

    def clear(self) -> None:
        """Forget all fingerprints; the numbers begin at 0 again."""
        self._numbers.clear()
        self._fingerprints.clear()

    def of_pool(self, asked: Fingerprint, leg: EngineRole) -> BoolColumn:
        """Return for each kind whether its engines may run a leg (see :func:`in_pool`). Shape [kinds], at least 1."""
        return np.array([in_pool(asked, each, leg) for each in self._fingerprints] or [False], np.bool_)

    def can_continue(self, first: int, second: int) -> bool:
        """Return whether engines of the ``second`` kind can read the KV of the ``first``."""
        return in_pool(self._fingerprints[first], self._fingerprints[second], _DECODE)
