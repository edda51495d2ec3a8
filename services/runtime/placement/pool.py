"""Groups the engines of a pool by what they can do in a request."""

from dataclasses import dataclass, field

import numpy as np

from tokenloom.v1.coordinator_pb2 import EngineIdentity
from tokenloom.v1.types_pb2 import EngineRole

from .candidates import Candidates
from .engine_columns import BoolColumn, EngineColumns, Rows
from .fingerprint_kinds import FingerprintKinds


def has_rank(identity: EngineIdentity, rank: int) -> bool:
    """Return whether an engine has this number. Engines outside of groups have none."""
    return bool(identity.data_parallel_group) and identity.data_parallel_rank == rank


def longest_request(engine: EngineIdentity) -> int:
    """Return the tokens of one request that an engine holds at most: its KV cache or, for an encoder, which keeps no
    KV, its limit."""
    size = engine.num_kv_blocks * engine.fingerprint.block_size
    limit = engine.limits.max_model_len
    return min(size, limit or size) if size else limit


_BOTH, _PREFILL, _DECODE = EngineRole.ENGINE_ROLE_BOTH, EngineRole.ENGINE_ROLE_PREFILL, EngineRole.ENGINE_ROLE_DECODE
_NUM_ROLES = 1 + max(EngineRole.values())


@dataclass(frozen=True, slots=True)
class Pool:
    """Holds the engines that could run a leg. It is valid until one of them changes its role or is gone.

    Attributes:
        engines: All of them.
        decoders: Those that decode.
        prefillers: Those that do everything, or prefill and can hand over; the same object as ``decoders`` if they are
            the same engines.
        hands_over: Whether another engine of the pool can continue from its KV, by row, shape [capacity].
        min_max_tokens: A prompt of so many tokens fits into any of them.
        homes: Where prefixes are at home that were asked for, by the hash of the prefix (:mod:`.prefix_homes`).
    """

    engines: Candidates
    decoders: Candidates
    prefillers: Candidates
    hands_over: BoolColumn
    min_max_tokens: int
    homes: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def rows(self) -> Rows:
        """The rows of all engines."""
        return self.engines.rows


def make_pool(engines: EngineColumns, kinds: FingerprintKinds, rows: Rows) -> Pool:
    """Return the pool of the engines in ``rows``."""
    roles = engines.role[rows]
    decoders = rows[(roles == _BOTH) | (roles == _DECODE)]
    if len(decoders) == len(rows):
        decoders = rows
    hands_over = np.zeros(engines.capacity, np.bool_)
    hands_over[rows] = _handing_over(engines, kinds, rows, decoders)
    prefillers = rows[(roles == _BOTH) | hands_over[rows]]
    everything = Candidates(rows)

    def among(some: Rows) -> Candidates:
        return everything if len(some) == len(rows) else Candidates(some)

    return Pool(
        engines=everything,
        decoders=among(decoders),
        prefillers=among(prefillers),
        hands_over=hands_over,
        min_max_tokens=int(engines.max_tokens[rows].min(initial=np.iinfo(np.int64).max)),
    )


def _handing_over(engines: EngineColumns, kinds: FingerprintKinds, rows: Rows, decoders: Rows) -> BoolColumn:
    """Return for each of ``rows`` whether another engine can continue from its KV, shape [n]. An engine of both roles
    hands over only to one that only decodes: otherwise nothing is gained."""
    able = np.zeros(max(len(kinds), 1) * _NUM_ROLES, np.bool_)
    present = _sorts(engines, decoders)
    for sort in _sorts(engines, rows):
        kind, role = divmod(sort, _NUM_ROLES)
        able[sort] = role != _DECODE and any(
            (other % _NUM_ROLES == _DECODE or role == _PREFILL) and kinds.can_continue(kind, other // _NUM_ROLES)
            for other in present
        )
    handing_over: BoolColumn = able[engines.kind[rows] * _NUM_ROLES + engines.role[rows]]
    return handing_over


def _sorts(engines: EngineColumns, rows: Rows) -> list[int]:
    """Return the combinations of kind and role that occur: a few, however many engines there are."""
    sorts: list[int] = np.flatnonzero(np.bincount(engines.kind[rows] * _NUM_ROLES + engines.role[rows])).tolist()
    return sorts
