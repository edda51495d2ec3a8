"""An engine that gives its memory back and waits: levels, tags and their meaning as in vLLM V1."""

from concurrent.futures import Future

from ..executor.executor import Executor
from ..scheduling.scheduler import Scheduler
from ..scheduling.step_planner import PauseState
from .pausing import Pausing

LEVELS = (0, 1, 2)
TAGS = ("weights", "kv_cache")
"""What can be woken apart from the other."""


class Sleeping:
    """Sends one core to sleep and wakes it. Belongs to the thread that steps."""

    def __init__(self, scheduler: Scheduler, pausing: Pausing, executor: Executor) -> None:
        self._scheduler = scheduler
        self._pausing = pausing
        self._executor = executor
        self._level: int | None = None
        self._asleep: set[str] = set()
        self._falling: Future[None] | None = None
        self.is_settling = False
        """Whether memory is about to be given back: then :meth:`settle` must be called after each step."""

    def is_sleeping(self) -> bool:
        """From the call of :meth:`sleep` on, until everything is awake again."""
        return self._level is not None

    def sleep(self, level: int = 1, mode: str = "abort") -> "Future[None]":
        """Pauses in ``mode`` and, once nobody runs, gives memory back; done when that is done.

        Args:
            level: 0: only pauses; 1: weights, which come back on waking, and KV; 2: weights that
                :meth:`reload_weights` must bring before waking, and KV.

        Raises ``ValueError`` for an unknown level or mode, and while asleep in another level.
        """
        if level not in LEVELS:
            raise ValueError(f"level {level} is unknown; there are 0, 1 and 2")
        if self._level not in (None, level):
            raise ValueError(f"the engine sleeps in level {self._level}; wake it up first")
        if self._level is not None:
            return self._falling or _done()
        quiet = self._pausing.pause(mode, clear_cache=level > 0)
        self._level = level
        self._falling = Future()
        falling = self._falling
        quiet.add_done_callback(self._on_quiet)
        return falling

    def settle(self) -> None:
        """Gives memory back as soon as no block is held: leases end now, loads in flight by themselves."""
        if not self.is_settling or not self._release_blocks():
            return
        assert self._level is not None
        assert self._falling is not None
        falling, self._falling = self._falling, None
        self.is_settling = False
        self._scheduler.set_pause_state(PauseState.PAUSED_ALL)  # nobody may touch what is not there
        self._executor.collective_rpc("sleep", self._level)
        self._asleep = set(TAGS)
        falling.set_result(None)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Takes into use what ``tags`` name (None: all); once all is awake, requests go on. Awake, nothing happens.

        Raises ``ValueError`` for an unknown tag, and when the weights cannot be the same again.
        """
        wanted = TAGS if tags is None else tags
        for tag in wanted:
            if tag not in TAGS:
                raise ValueError(f"tag {tag!r} is unknown; there are {' and '.join(TAGS)}")
        if self._level is None:
            return
        if waking := [tag for tag in TAGS if tag in wanted and tag in self._asleep]:
            self._executor.collective_rpc("wake_up", waking)
            self._asleep.difference_update(waking)
        if not self._asleep:
            self._level = None
            self.is_settling = False
            falling, self._falling = self._falling, None
            self._pausing.resume()
            if falling is not None and not falling.done():
                falling.set_exception(ValueError("the engine was woken before it slept"))

    def reload_weights(self, path: str) -> None:
        """Takes the weights of another checkpoint, awake or asleep; cached prefixes are forgotten.

        Awake, nobody may run unless paused: who is frozen then is computed anew. Raises ``ValueError`` when somebody
        does, or when the checkpoint is not of the same architecture.
        """
        if not self._asleep:
            if self._scheduler.running and not self._pausing.is_paused:
                raise ValueError("requests are running: pause the engine, or wait until it is idle")
            if not self._release_blocks():
                raise ValueError("KV from other engines is being loaded: try again")
        self._executor.collective_rpc("reload_weights", path)
        self._asleep.discard("weights")

    def _on_quiet(self, quiet: "Future[None]") -> None:
        if self._falling is None:
            return  # woken meanwhile
        if (error := quiet.exception()) is not None:
            self._level = None
            falling, self._falling = self._falling, None
            falling.set_exception(error)
        elif self._level == 0:
            falling, self._falling = self._falling, None
            falling.set_result(None)
        else:
            self.is_settling = True
            self.settle()

    def _release_blocks(self) -> bool:
        """Takes back every block that can be; whether nobody holds any more."""
        self._scheduler.reset_prefix_cache(preempt_running=True)
        self._scheduler.end_leases()
        pool = self._scheduler.kv.pool
        return pool.num_free == pool.num_blocks


def _done() -> "Future[None]":
    future: Future[None] = Future()
    future.set_result(None)
    return future
