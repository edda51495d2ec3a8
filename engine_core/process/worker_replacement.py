"""Replaces a worker that has ended, unless workers end again and again: then another engine may do better."""

import logging
import time
from collections.abc import Callable

from ..core import EngineCore
from ..data.errors import ExecutorFailedError

log = logging.getLogger(__name__)

# A request whose computation kills workers is retried once here. After that the core ends, and the output processor
# blames a request that was alone.
AGAIN_SECONDS = 30.0
"""A worker that ends so soon after a replacement ends the core: what it computes may be the cause."""
_ATTEMPTS = 2


class WorkerReplacement:
    """Belongs to the thread that steps the core."""

    def __init__(self, core: EngineCore, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: returns seconds."""
        self._core = core
        self._clock = clock
        self._replaced_at: float | None = None

    def replace(self, lost: ExecutorFailedError) -> None:
        """Replace the workers, of which one has ended. Raises ``lost`` if that happened a short while ago too, and
        ``ExecutorFailedError`` if no worker can be started."""
        if self._replaced_at is not None and self._clock() - self._replaced_at < AGAIN_SECONDS:
            raise lost
        log.error("%s; it is replaced, and its requests are computed anew", lost)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._core.replace_workers()
                break
            except ExecutorFailedError as error:
                if attempt == _ATTEMPTS:
                    raise
                log.error("%s; trying once more", error)
        self._replaced_at = self._clock()
        log.info("the workers were replaced")
