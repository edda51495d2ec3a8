"""A line in the log for each step (vLLM's ``--enable-logging-iteration-details``)."""

import logging
import time
from collections import deque
from collections.abc import Callable

from ..wire.scheduler_output import SchedulerOutput

log = logging.getLogger(__name__)


class IterationLog:
    """Follows the steps of one core, which end in the order in which they begin."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: seconds."""
        self._clock = clock
        self._started: deque[float] = deque()  # bounded by the steps that may be under way at once

    def begin(self) -> None:
        self._started.append(self._clock())

    def end(self, step: int, scheduled: SchedulerOutput) -> None:
        """``step``: its number. A request that decodes is one the worker knows, with one token to compute."""
        milliseconds = (self._clock() - self._started.popleft()) * 1e3
        cached = scheduled.scheduled_cached_reqs
        num_scheduled = scheduled.num_scheduled_tokens
        decoding = sum(num_scheduled[r] == 1 and r not in cached.resumed_token_ids for r in cached.req_ids)
        log.info(
            "Iteration(%d): %d context requests, %d context tokens, %d generation requests, %d generation tokens, "
            "iteration elapsed time: %.2f ms",
            step,
            len(num_scheduled) - decoding,
            scheduled.total_num_scheduled_tokens - decoding,
            decoding,
            decoding,
            milliseconds,
        )

    def abandon(self) -> None:
        """No step is under way any more."""
        self._started.clear()
