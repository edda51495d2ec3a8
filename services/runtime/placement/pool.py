"""Groups the engines of a pool by what they can do in a request, and holds what of the speed of those that are compared
is computed once for many picks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tokenloom.v1.coordinator_pb2 import EngineIdentity
from tokenloom.v1.types_pb2 import EngineRole

from .engine_columns import BoolColumn, EngineColumns, FloatColumn, Rows
from .fingerprint_kinds import FingerprintKinds

UNKNOWN_RATE = 10_000.0
"""Prompt tokens per second of engines of which none has measured its own."""
UNKNOWN_STEP_SECONDS = 0.02
"""Duration of a step of engines of which none has measured its own."""
BATCH_STEPS = 64.0
"""As many steps of a full batch count for the share of it that is taken: what a request costs and is cost after its
prefill, while it and the others decode together."""
_REPORTS_SHARE = 8
"""Speeds are computed again when so many reports have come as an eighth of the engines: they change slowly."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Holds what some engines need for their work.

    Attributes:
        step_seconds: Mean duration of a step of all of them.
        seconds_per_request: :data:`BATCH_STEPS` of these, divided among the requests that may run at the same time,
            shape [n].
        seconds_per_token: Of a prompt, shape [n].
    """

    step_seconds: float
    seconds_per_request: FloatColumn
    seconds_per_token: FloatColumn


@dataclass(slots=True, eq=False)
class Candidates:
    """Names the engines that a leg may be placed on.

    Attributes:
        rows: Their rows, growing, shape [n].
        index: Selects them from a column: the rows, or a slice where these follow each other. A slice reads a column
            without a copy, and nearly always all engines of a mesh serve the same model.
        native: What native code keeps for them (:mod:`tokenloom.services.coordinator.native_placement`).
    """

    rows: Rows
    index: Rows | slice = field(init=False)
    native: object = field(init=False, default=None)
    _speeds: Speeds | None = field(init=False, default=None)
    _speeds_at: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        first, count = (int(self.rows[0]), len(self.rows)) if len(self.rows) else (0, 0)
        is_run = count > 0 and int(self.rows[-1]) == first + count - 1
        self.index = slice(first, first + count) if is_run else self.rows

    def __len__(self) -> int:
        return len(self.rows)

    def positions(self, rows: Sequence[int]) -> list[int]:
        """Return where these engines are among the candidates; those that are none are left out."""
        if isinstance(self.index, slice):
            first, end = self.index.start, self.index.stop
            return [row - first for row in rows if first <= row < end]
        found = zip(np.searchsorted(self.rows, rows).tolist(), rows, strict=True)
        return [at for at, row in found if at < len(self.rows) and self.rows[at] == row]

    def speeds(self, engines: EngineColumns) -> Speeds:
        """Return what the engines have measured; one that has not measured its rate gets the mean of the others."""
        if self._speeds is None or engines.num_reports - self._speeds_at >= max(len(self.rows) // _REPORTS_SHARE, 1):
            self._speeds_at = engines.num_reports
            step_seconds = float(_known(engines.step_seconds[self.index], UNKNOWN_STEP_SECONDS).mean())
            self._speeds = Speeds(
                step_seconds=step_seconds,
                seconds_per_request=BATCH_STEPS * step_seconds / np.maximum(engines.seats[self.index], 1),
                seconds_per_token=1.0 / _known(engines.computed_rate[self.index], UNKNOWN_RATE),
            )
        return self._speeds


def _known(values: FloatColumn, default: float) -> FloatColumn:
    """Return the values with the mean of the known ones, or ``default``, in place of those that are 0."""
    is_known: NDArray[np.bool_] = values > 0
    if is_known.all():
        return values
    filled: FloatColumn = np.where(is_known, values, values[is_known].mean() if is_known.any() else default)
    return filled


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
