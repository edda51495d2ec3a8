"""Keeps what operators want of the engines: pause, sleep, weights, and the role and weights of single ones. No I/O."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from tokenloom.request.errors import FailedPrecondition, InvalidArgument
from tokenloom.services.runtime.registry.registry_view import RegistryView
from tokenloom.v1 import engine_pb2
from tokenloom.v1.coordinator_pb2 import (
    DesiredState,
    EngineProgress,
    EngineReport,
    EngineSetting,
    SetDesiredStateRequest,
)
from tokenloom.v1.types_pb2 import Adapter

from .engine_record import EngineRecord

MAX_SETTINGS = 4096
"""Engines of which a role or weights are remembered; the names that were set first are forgotten first."""
MAX_PATH = 4096
"""Characters of a path, as of Linux: the state goes to every engine and watcher."""
MAX_STARTED = 64
"""Different weights of engines' options that are remembered."""
_NO_PAUSE = engine_pb2.PAUSE_MODE_UNSPECIFIED
_MODES = {
    engine_pb2.PAUSE_MODE_ABORT: "abort",
    engine_pb2.PAUSE_MODE_WAIT: "wait",
    engine_pb2.PAUSE_MODE_KEEP: "keep",
}
_LEVELS = (0, 1, 2)
_PARTS = frozenset((engine_pb2.WAKE_TAG_WEIGHTS, engine_pb2.WAKE_TAG_KV_CACHE))
_TAGS = _PARTS | {engine_pb2.WAKE_TAG_SCHEDULING}


class WantedState:
    """Keeps the state that all engines should be in, and what single ones were set to.

    A new coordinator takes the latest state that its predecessor or a joining engine knows. Its own changes have larger
    revisions than any before, also if no engine remembers one, because revisions follow the wall clock.

    Attributes:
        state: What all engines should be in.
        version: Grows when anything has changed.
    """

    def __init__(self, wall_milliseconds: Callable[[], int]) -> None:
        """``wall_milliseconds`` returns the milliseconds since 1970; it may jump."""
        self.state = DesiredState(revision=1)
        self.version = 0
        self._wall_milliseconds = wall_milliseconds
        self._settings: OrderedDict[str, EngineSetting] = OrderedDict()
        self._started: OrderedDict[bytes, None] = OrderedDict()  # weights that engines' options name, the latest last

    @property
    def revision(self) -> int:
        """That of the state; at least 1."""
        return self.state.revision

    @property
    def is_neutral(self) -> bool:
        """Whether engines should be as they are after a start: neither paused nor asleep, with their own weights."""
        return self._runs and not self.state.weights_version

    @property
    def _runs(self) -> bool:
        """Whether requests should run."""
        return self.state.pause_mode == _NO_PAUSE and not self.state.HasField("sleep_level")

    def after(self, number: int) -> int:
        """Return a number that is larger than this one and, unless the clock went back, than all given before."""
        return max(number + 1, self._wall_milliseconds())

    def change(self, request: SetDesiredStateRequest) -> None:
        """Do what an operator asks. Raises ``InvalidArgument``, and ``FailedPrecondition`` if it does not follow from
        the state; then nothing changes."""
        kind, wanted = request.WhichOneof("change"), DesiredState()
        wanted.CopyFrom(self.state)
        if kind == "pause":
            _pause(wanted, request.pause.mode)
            wanted.clear_cache = request.pause.clear_cache
        elif kind == "sleep":
            _sleep(wanted, request.sleep)
        elif kind == "wake_up":
            _wake(wanted, request.wake_up)
        elif kind == "resume":
            # Also out of a sleep: an operator who resumes wants requests to run, and a mesh of which only some engines
            # have fallen asleep had no call that ended it.
            _run(wanted)
        elif kind == "weights":
            _load(wanted, request.weights)
            wanted.replaced_weights[:] = self._started
        else:
            raise InvalidArgument("no change is set", "change")
        # Every call is a new revision: engines that an operator has set otherwise, one by one, follow again.
        wanted.revision = self.after(self.revision)
        if kind == "weights":
            wanted.weights_version = wanted.revision
        self.state = wanted
        self.version += 1

    def adopt(self, known: DesiredState) -> bool:
        """Take over a state that another coordinator wanted, if it is later than this one, and what it set on single
        engines. Returns whether the state has changed."""
        for setting in known.engines:
            if setting.engine_id not in self._settings:
                self._set(setting)
        if known.revision <= self.revision:
            return False
        self.state = DesiredState()
        self.state.CopyFrom(known)
        del self.state.engines[:]
        self.version += 1
        return True

    def join(self, record: EngineRecord) -> bool:
        """Take what an engine that joins knows. Returns whether the state has changed."""
        if record.first.join.incarnation:
            self.learn(record, record.first)
        self._started[record.first.join.start_weights] = None
        self._started.move_to_end(record.first.join.start_weights)
        while len(self._started) > MAX_STARTED:
            self._started.popitem(last=False)
        return self.adopt(record.first.join.desired)

    def learn(self, record: EngineRecord, report: EngineReport) -> None:
        """Note which role and weights an operator has set on an engine, by one of its reports."""
        start, setting = record.first.join, EngineSetting(engine_id=record.identity.engine_id)
        # Before it has reached a state, an engine may still have to take what the one before it was set to.
        if not report.progress.reached:
            return
        if report.role != start.start_role:
            setting.role, setting.start_role = report.role, start.start_role
        if start.weights_path:
            setting.weights_path, setting.start_weights = start.weights_path, start.start_weights
        self._set(setting)

    def want_of(self, record: EngineRecord, *, is_complete: bool, is_join: bool = False) -> None:
        """Note which revision an engine must have reached to get requests. ``is_complete``: whether what the engines of
        a former coordinator know is known here too. ``is_join``: it joins now."""
        if not record.follows:
            # It cannot take the state, so that of a pause or a sleep nothing is known of it.
            is_free = self._runs
        else:
            is_free = record.is_fresh and is_complete and self.is_neutral and not self._setting(record)
        version = self.state.weights_version
        record.takes_weights = not version or record.first.join.start_weights in self.state.replaced_weights
        record.weights_version = version if record.follows and record.takes_weights else 0
        if version == self.revision and self._runs and not is_join:
            return  # what began there may go on until it has the weights
        record.wanted_revision = 0 if is_free else self.revision

    def message(self, record: EngineRecord, *, is_complete: bool) -> DesiredState | None:
        """Return what an engine is sent; None if it has to wait until the state is known."""
        # One that has joined before, but never heard of a state, knows as little as one that joins for the first time.
        has_state = record.first.join.incarnation and record.first.progress.reached
        if not record.follows or not (is_complete or has_state):
            return None
        state, setting = DesiredState(), self._setting(record)
        state.CopyFrom(self.state)
        if setting is not None:
            state.engines.append(setting)
        record.is_fresh = record.is_fresh and self.is_neutral and setting is None
        return state

    def progress(self, name: str, record: EngineRecord | None) -> EngineProgress:
        """Return how far an engine is; None: it has left."""
        if record is None:
            cause = "it has left; it takes the state when it joins again"
            return EngineProgress(engine_id=name, cause=cause, follows=True)
        if not record.follows:
            return EngineProgress(engine_id=name, is_done=self._runs, cause="it is of an older release")
        known, is_done = record.report.progress, record.is_in_state
        cause = known.cause if known.failed == self.revision and not is_done else ""
        if is_done and self.state.weights_version and record.waits_aside:
            # Its file system has other weights at that path, or its options were changed.
            is_done, cause = False, record.waits_aside
        return EngineProgress(engine_id=name, is_done=is_done, cause=cause, follows=True)

    def whole(self) -> DesiredState:
        """Return everything, for watchers."""
        state = DesiredState(engines=self._settings.values())
        state.MergeFrom(self.state)
        return state

    def _setting(self, record: EngineRecord) -> EngineSetting | None:
        """Return what a process that has not joined before takes over from the one before; None: nothing. An option
        that was changed since then counts instead."""
        start, found = record.first.join, EngineSetting(engine_id=record.identity.engine_id)
        known = self._settings.get(found.engine_id)
        if known is None or start.incarnation:
            return None
        if known.role and known.start_role == start.start_role:
            found.role = known.role
        # The weights of all engines are loaded instead of those that single ones had before.
        is_kept = known.start_weights == start.start_weights and not self.state.weights_version
        if known.weights_path and is_kept:
            found.weights_path = known.weights_path
        return found if found.role or found.weights_path else None

    def _set(self, setting: EngineSetting) -> None:
        name = setting.engine_id
        if setting == self._settings.get(name, EngineSetting(engine_id=name)):
            return
        self.version += 1
        self._settings.pop(name, None)
        if setting.role or setting.weights_path:
            self._settings[name] = setting
        while len(self._settings) > MAX_SETTINGS:
            self._settings.popitem(last=False)


def _pause(wanted: DesiredState, mode: engine_pb2.PauseMode) -> None:
    if mode not in _MODES:
        raise InvalidArgument("mode must be ABORT, WAIT or KEEP", "mode")
    if wanted.pause_mode not in (_NO_PAUSE, mode):
        raise FailedPrecondition(f"the engines are paused in mode {_MODES[wanted.pause_mode]}; resume them first")
    wanted.pause_mode = mode


def _sleep(wanted: DesiredState, request: engine_pb2.SleepRequest) -> None:
    if request.level not in _LEVELS:
        raise InvalidArgument(f"level must be 0, 1 or 2, not {request.level}", "level")
    if wanted.HasField("sleep_level") and wanted.sleep_level != request.level:
        raise FailedPrecondition(f"the engines sleep at level {wanted.sleep_level}; wake them up first")
    _pause(wanted, request.mode)
    wanted.sleep_level = request.level
    del wanted.awake[:]


def _wake(wanted: DesiredState, request: engine_pb2.WakeUpRequest) -> None:
    """Wake parts as a core does: the pause ends with the last one."""
    tags = set(request.tags) or _TAGS
    if not tags <= _TAGS:
        raise InvalidArgument("tags must be WEIGHTS, KV_CACHE or SCHEDULING", "tags")
    if not wanted.HasField("sleep_level"):
        return
    awake = _PARTS & (tags | set(wanted.awake))
    # At level 2 only new weights wake the weights, and nothing is left to wake after the KV cache.
    needed = {0: set(), 1: set(_PARTS), 2: {engine_pb2.WAKE_TAG_KV_CACHE}}[wanted.sleep_level]
    if needed <= awake:
        _run(wanted)
    else:
        wanted.awake[:] = sorted(awake)


def _load(wanted: DesiredState, request: engine_pb2.ReloadWeightsRequest) -> None:
    if not request.path.startswith("/") or len(request.path) > MAX_PATH:
        raise InvalidArgument(f"path must be absolute, and have at most {MAX_PATH} characters", "path")
    if request.mode and request.mode not in _MODES:
        raise InvalidArgument("mode must be ABORT, WAIT or KEEP", "mode")
    wanted.weights_path, wanted.weights_mode = request.path, request.mode
    if wanted.sleep_level and engine_pb2.WAKE_TAG_WEIGHTS not in wanted.awake:
        wanted.awake.append(engine_pb2.WAKE_TAG_WEIGHTS)  # loaded weights are awake


def _run(wanted: DesiredState) -> None:
    wanted.pause_mode, wanted.clear_cache = _NO_PAUSE, False
    wanted.ClearField("sleep_level")
    del wanted.awake[:]


class Predecessor:
    """Takes the views of the active coordinator.

    Attributes:
        engine_ids: The engines of its last complete view: a new coordinator's view is complete once they are back.
        adapters: The LoRA adapters that all engines should have.
        unloaded: Names of adapters that were unloaded, the latest last.
        desired: The state that the engines should be in.
    """

    def __init__(self) -> None:
        self.engine_ids: Collection[str] = ()
        self.desired = DesiredState()
        self.adapters: Sequence[Adapter] = ()
        self.unloaded: Sequence[str] = ()

    def take(self, view: RegistryView) -> None:
        """Take a view after a change. An incomplete one, of a coordinator that is new itself, says less than the one
        before."""
        if view.complete:
            self.engine_ids = [entry.identity.engine_id for entry in view.engines]
            self.adapters, self.unloaded = view.adapters, view.unloaded_adapters
        # What is set on single engines changes within a revision, so that of two with the same one the later counts.
        if view.desired.revision + view.complete > self.desired.revision:
            self.desired = view.desired
