"""Numbers what engines serve: a thousand engines have a few different fingerprints, which are compared once."""

import numpy as np

from tokenloom.services.runtime.peers.hello import engine_difference, is_foreign
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint

from .engine_columns import BoolColumn

POOL_FIELDS = ("model", "weights", "tokenizer")
"""Engines that are equal in these fields form a pool: a request stays in one."""
PAIR_FIELDS = (*POOL_FIELDS, "kv_layout")
"""Engines that are equal in these fields can read each other's KV."""
ROUNDINGS = frozenset(("fp8", "int4", "int8"))
"""Words of an engine's numerics: the values of ``--quantization``."""
_KIND_FIELDS = (*PAIR_FIELDS, "numerics")

_DECODE = EngineRole.ENGINE_ROLE_DECODE


def in_pool(asked: Fingerprint, engine: Fingerprint, leg: EngineRole) -> bool:
    """Return whether ``engine`` may run this leg.

    ``asked``: what the engine serves on which the request began, for a decode leg the one that has the KV. Or what an
    output processor serves, perhaps with the weights and numerics of a request that it takes over: the fields that it
    leaves empty are not compared.
    """
    fields: tuple[str, ...] = PAIR_FIELDS if leg == _DECODE else POOL_FIELDS
    if not is_of_engine(asked):
        fields = tuple(field for field in fields if getattr(asked, field))
    return engine_difference(asked, engine, fields) is None


def weights_of(fingerprint: Fingerprint) -> tuple[bytes, frozenset[str]]:
    """Return what decides which answers an engine gives: its weights, and to what it rounds them when it loads them,
    which changes answers far more than the last bits of a logit."""
    return fingerprint.weights, ROUNDINGS.intersection(fingerprint.numerics.split("/"))


def _maker(fingerprint: Fingerprint) -> str:
    """Return whose code computes: the name of a server of others; empty: ours."""
    return fingerprint.numerics.partition("/")[0] if is_foreign(fingerprint.numerics) else ""


def is_of_engine(fingerprint: Fingerprint) -> bool:
    """Return whether a fingerprint is that of an engine, whose empty fields have a meaning."""
    return fingerprint.block_size > 0


def names_numerics(asked: Fingerprint) -> bool:
    """Return whether a request has begun on an engine whose numerics are known: it goes on where they are the same."""
    return bool(asked.numerics) or is_of_engine(asked)


class FingerprintKinds:
    """Numbers fingerprints from 0 by the fields that placement compares."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}
        self._fingerprints: list[Fingerprint] = []

    def __len__(self) -> int:
        return len(self._fingerprints)

    def number(self, fingerprint: Fingerprint) -> int:
        """Return the number of a fingerprint, a new one if no engine had it before."""
        key = tuple(getattr(fingerprint, field) for field in _KIND_FIELDS)
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

    def pools(self) -> list[BoolColumn]:
        """Return for each pool which kinds its engines have. Shape [kinds] each."""
        masks = [self.of_pool(each, EngineRole.ENGINE_ROLE_PREFILL) for each in self._fingerprints]
        return list({mask.tobytes(): mask for mask in masks}.values())

    def computing_as(self, asked: Fingerprint) -> BoolColumn:
        """Return for each kind whether its engines compute as that with ``asked`` does. Shape [kinds], at least 1."""
        return np.array([each.numerics == asked.numerics for each in self._fingerprints] or [False], np.bool_)

    def of_same_maker(self, asked: Fingerprint) -> BoolColumn:
        """Return for each kind whether its engines are ours where that with ``asked`` is, and otherwise compute by a
        server of others like it. Shape [kinds], at least 1."""
        maker = _maker(asked)
        return np.array([_maker(each) == maker for each in self._fingerprints] or [False], np.bool_)

    def can_continue(self, first: int, second: int) -> bool:
        """Return whether engines of the ``second`` kind can read the KV of the ``first``."""
        return in_pool(self._fingerprints[first], self._fingerprints[second], _DECODE)
