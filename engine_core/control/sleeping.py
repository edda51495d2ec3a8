"""Puts an engine to sleep, which releases its memory, and wakes it up. Levels and tags are those of vLLM V1."""

from concurrent.futures import Future

import msgspec

from ..data.errors import ExecutorFailedError
from ..data.model_info import FreedMemory
from ..executor.executor import Executor
from ..scheduling.scheduler import Scheduler
from ..scheduling.step_planner import PauseState
from .pausing import Pausing

LEVELS = (0, 1, 2)
TAGS = ("weights", "kv_cache")
"""Parts that can be woken independently."""
SCHEDULING = "scheduling"
"""The tag that resumes an engine which sleeps at level 0, where no part is asleep."""


class Sleeping:
    """Puts one core to sleep and wakes it up. Belongs to the thread that steps."""

    def __init__(self, scheduler: Scheduler, pausing: Pausing, executor: Executor) -> None:
        self._scheduler = scheduler
        self._pausing = pausing
        self._executor = executor
        self._level: int | None = None
        self._asleep: set[str] = set()  # parts that are asleep in any worker, or may be
        self._is_released = False  # whether all workers have released all parts
        self._has_mixed_weights = False  # whether a reload has failed in some workers, and maybe not in others
        self._falling: Future[FreedMemory] | None = None
        self.is_settling = False
        """Whether the engine is about to sleep: then :meth:`settle` must be called after each step and each abort."""

    def is_sleeping(self) -> bool:
        """Return whether the engine sleeps: from the call of :meth:`sleep` until all parts are awake again."""
        return self._level is not None

    def calls_to_wake(self) -> str:
        """Return what is asleep and which calls let requests run again, as a sentence; empty if the engine is awake."""
        if self._level is None:
            return ""
        if self._level == 2 and "weights" in self._asleep:
            return "the engine has no weights; call reload_weights() and then wake_up()"
        if self._asleep == {"kv_cache"}:
            return "the KV cache is asleep; call wake_up() first"
        state = "asleep" if self._asleep or self._level else "paused"
        return f"the engine is {state}; call wake_up() first"

    def sleep(self, level: int = 1, mode: str = "abort") -> "Future[FreedMemory]":
        """Pause in ``mode`` and, once no request runs, release memory. The future then holds how much, of all workers.

        The future fails if a worker does, or if the engine is woken up before. After a worker's failure the engine
        stays asleep, because some parts may be: :meth:`wake_up` restores them, and another call tries again.

        Raises ``ValueError`` for an unknown level or mode, and while asleep at another level.

        Args:
            level: 0 only pauses. 1 releases the KV pool and the weights, which waking restores. 2 releases both, and
                :meth:`reload_weights` must load weights before waking.
        """
        if level not in LEVELS:
            raise ValueError(f"level {level} is unknown; use 0, 1 or 2")
        if self._level not in (None, level):
            raise ValueError(f"the engine sleeps at level {self._level}; call wake_up first")
        if self._falling is not None:
            return self._falling
        if self._level is not None and (level == 0 or self._is_released):
            return _done()
        if self._level is None:
            self._pausing.pause(mode, clear_cache=level > 0)
            self._level = level
        falling = self._falling = Future()
        self.is_settling = True
        self.settle()
        return falling

    def settle(self) -> None:
        """Fall asleep once no request runs and no block is held. Leases are ended now; loads in flight end by
        themselves. Errors are those of the future that :meth:`sleep` returned."""
        falling = self._falling
        if falling is None or self._pausing.quiet is not None:
            return
        try:
            if self._level and not self._release_blocks():
                return
            freed = self._release() if self._level else FreedMemory()
        except Exception as error:
            self._end_falling()
            falling.set_exception(error)
        except BaseException:  # from the keyboard: the future must not stay open
            self._end_falling()
            falling.set_exception(ExecutorFailedError("falling asleep was interrupted"))
            raise
        else:
            self._end_falling()
            falling.set_result(freed)

    def _release(self) -> FreedMemory:
        """Release the memory of all workers."""
        self._scheduler.set_pause_state(PauseState.PAUSED_ALL)  # no request may touch released memory
        self._asleep = set(TAGS)  # before the call: after an error or an interrupt some workers sleep, or will
        freed = msgspec.convert(self._executor.collective_rpc("sleep", self._level), list[FreedMemory])
        self._is_released = True
        return sum(freed, FreedMemory())

    def _end_falling(self) -> None:
        self._falling = None
        self.is_settling = False

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Restore the parts that ``tags`` name, or all if None. Once all are awake, requests continue; ``scheduling``
        names no part, and alone resumes what sleeps at level 0. Do nothing if awake. Returns whether this call has
        ended the sleep, and with it the pause.

        At level 2 only ``reload_weights`` restores the weights, so waking them alone does nothing: as in vLLM, a caller
        may wake the weights, reload them and then wake the KV cache.

        Raises ``ValueError`` for an unknown tag, and if the weights cannot be restored unchanged. If only some workers
        fail, the parts stay asleep, and another call wakes the rest.
        """
        wanted = TAGS if tags is None else tags
        for tag in wanted:
            if tag not in (*TAGS, SCHEDULING):
                raise ValueError(f"tag {tag!r} is unknown; use {', '.join(TAGS)} or {SCHEDULING}")
        if self._level is None:
            return False
        # In vLLM this allocates memory that reload_weights fills later. Here reload_weights does both, so vLLM's order
        # of calls works when this one does nothing.
        if self._level == 2 and set(wanted) - {SCHEDULING} == {"weights"}:
            return False
        if self._has_mixed_weights and "weights" in wanted:
            raise ValueError(self.calls_to_wake())
        if waking := [tag for tag in TAGS if tag in wanted and tag in self._asleep]:
            self._is_released = False  # some workers may wake up even if the call fails
            self._executor.collective_rpc("wake_up", waking)
            self._asleep.difference_update(waking)
        if not self._asleep:
            self._level = None
            falling = self._falling
            self._end_falling()
            self._pausing.resume()
            if falling is not None:
                falling.set_exception(ValueError("the engine was woken up before it slept"))
        return self._level is None

    def check_weights(self, path: str) -> None:
        """Check that all workers could load a checkpoint. Raises as :meth:`reload_weights` before it replaces any."""
        self._executor.collective_rpc("check_weights", path)

    def reload_weights(self, path: str) -> None:
        """Load the weights of another checkpoint, awake or asleep, and forget cached prefixes.

        All workers check the checkpoint before any of them replaces its weights: if one refuses, all keep the old ones.
        Weights are replaced piece by piece, and in several workers: any later error leaves none that fit together, and
        the engine sleeps at level 2 until weights are loaded and it is woken up.

        Raises ``ValueError`` if the engine is awake and requests run without being paused (frozen requests are computed
        anew) or until a pause has begun, and if the checkpoint is not of the same architecture; ``RanksDifferError`` if
        only some workers refuse it; ``ExecutorFailedError`` if no weights are left.
        """
        if not self._asleep:
            if self._scheduler.running and not self._pausing.is_paused:
                raise ValueError("requests are running; pause the engine, or wait until it is idle")
            if self._pausing.quiet is not None:
                # A pause in the mode WAIT lets them end: with the new weights their answers would be of both.
                raise ValueError("requests are running that the pause waits for; retry when they have ended")
            if not self._release_blocks():
                raise ValueError("KV from other engines is being loaded; retry")
        # A worker that refused a checkpoint after others had loaded it left a tensor-parallel engine answering from a
        # mixture.
        self.check_weights(path)
        self._scheduler.share_kv(b"")  # until the front says which weights these are
        try:
            self._executor.collective_rpc("reload_weights", path)
        except BaseException as error:
            self._lose_weights()
            if not isinstance(error, Exception):
                raise
            raise ExecutorFailedError(f"{error}; the engine has no weights now: call reload_weights again") from error
        self._scheduler.reset_rows()  # they are of the old tower
        self._asleep.discard("weights")
        self._has_mixed_weights = False
        self._is_released = False

    def _lose_weights(self) -> None:
        self._level = 2
        self._asleep.add("weights")
        self._has_mixed_weights = True
        self._is_released = False
        self._scheduler.set_pause_state(PauseState.PAUSED_ALL)

    def _release_blocks(self) -> bool:
        """Take back all blocks that can be taken back. Returns whether no block is held any more."""
        self._scheduler.reset_prefix_cache(preempt_running=True)
        self._scheduler.end_leases()
        pool = self._scheduler.kv.pool
        return pool.num_free == pool.num_blocks


def _done() -> "Future[FreedMemory]":
    """Return the result of falling asleep again, which releases nothing more."""
    future: Future[FreedMemory] = Future()
    future.set_result(FreedMemory())
    return future
