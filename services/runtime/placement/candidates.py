"""Holds engines that are compared with each other, and what of their speed is computed once for many picks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .engine_columns import EngineColumns, FloatColumn, Rows

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
