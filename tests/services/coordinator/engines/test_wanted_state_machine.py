"""States of engines by random changes, losses and successors of coordinators."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.services.coordinator.engines.test_wanted_state import (
    LOAD,
    PAUSE,
    RESUME,
    SLEEP,
    WAKE,
    first,
    join,
    make_registry,
)
from tokenloom.services.coordinator.engines.engine_record import (
    EngineRecord,
)
from tokenloom.v1.coordinator_pb2 import (
    DesiredState,
    EngineReport,
    EngineState,
    JoinFacts,
    StateProgress,
)
from tokenloom.v1.coordinator_pb2 import SetDesiredStateRequest as Change
from tokenloom.v1.types_pb2 import EngineRole

SERVING, PAUSED = EngineState.ENGINE_STATE_SERVING, EngineState.ENGINE_STATE_PAUSED
PREFILL, DECODE = EngineRole.ENGINE_ROLE_PREFILL, EngineRole.ENGINE_ROLE_DECODE


@dataclass
class Process:
    """An engine's process: what it is in, and what it was sent."""

    epoch: int
    record: EngineRecord | None = None
    incarnation: int = 0
    sent: DesiredState = field(default_factory=DesiredState)
    reached: int = 0
    is_paused: bool = False

    def report(self, name: str) -> EngineReport:
        facts = JoinFacts(incarnation=self.incarnation, desired=self.sent, supervisor="s")
        state = PAUSED if self.is_paused else SERVING
        return first(name, self.epoch, joins=facts, state=state, progress=StateProgress(reached=self.reached))


NAMES = st.sampled_from("ab")


class States(RuleBasedStateMachine):
    """Two engines, any of which dies, joins or lags behind, and a coordinator that dies without a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs = 0
        self.processes: dict[str, Process] = {}
        self.registry = make_registry()
        self.latest = DesiredState(revision=1)

    def _settle(self) -> None:
        self.registry._clock.now += 3  # type: ignore[attr-defined]
        for process in self.processes.values():
            if process.record is not None:
                process.record._columns.reported_at[process.record.row] = self.registry._clock()
        self.registry.refresh()

    @rule(name=NAMES)
    def start(self, name: str) -> None:
        """A process ends, and its supervisor starts the next one."""
        if (before := self.processes.get(name)) is not None and before.record is not None:
            self.registry.leave(before.record)
        self.epochs += 1
        process = self.processes[name] = Process(self.epochs)
        self._join(name, process)

    @rule(name=NAMES)
    def break_stream(self, name: str) -> None:
        if (process := self.processes.get(name)) is not None and process.record is not None:
            self.registry.leave(process.record)
            process.record = None

    @rule(name=NAMES)
    def rejoin(self, name: str) -> None:
        if (process := self.processes.get(name)) is not None and process.record is None:
            self._join(name, process)

    def _join(self, name: str, process: Process) -> None:
        process.record = join(self.registry, process.report(name))
        assert process.record.incarnation >= process.incarnation
        process.incarnation = process.record.incarnation
        self.receive(name)

    @rule(name=NAMES)
    def receive(self, name: str) -> None:
        """The engine is sent what it does not have."""
        if (process := self.processes.get(name)) is None or process.record is None:
            return
        message = self.registry.desired(process.record)
        if message is not None and message.revision > process.sent.revision:
            process.sent = message

    @rule(name=NAMES)
    def begin(self, name: str) -> None:
        """The engine is half in the state, and reports nothing yet."""
        if (process := self.processes.get(name)) is not None and process.reached < process.sent.revision:
            process.is_paused = process.is_paused or bool(process.sent.pause_mode)

    @rule(name=NAMES)
    def obey(self, name: str) -> None:
        """The engine reaches what it was sent, and reports it if it can."""
        if (process := self.processes.get(name)) is None:
            return
        process.is_paused = bool(process.sent.pause_mode)
        process.reached = process.sent.revision
        if process.record is not None:
            self.registry.report(process.record, process.report(name))

    @rule(change=st.sampled_from([PAUSE, RESUME, SLEEP, WAKE, LOAD]))
    @precondition(lambda self: self.registry.is_complete)
    def administer(self, change: Change) -> None:
        self.registry.set_state(change)
        self.latest = self.registry.wanted.state

    @rule()
    @precondition(lambda self: any(each.sent.revision == self.latest.revision for each in self.processes.values()))
    def lose_the_coordinator(self) -> None:
        """A new one knows nothing, but an engine that was sent the latest state joins it while it waits for engines."""
        self.registry = make_registry(settle_seconds=2.0)
        for process in self.processes.values():
            process.record = None
        for name, process in self.processes.items():
            if process.sent.revision == self.latest.revision and process.incarnation:
                self._join(name, process)
        self._settle()

    @invariant()
    def an_engine_that_is_not_in_the_state_gets_no_requests(self) -> None:
        paused = bool(self.registry.wanted.state.pause_mode)
        for name, process in self.processes.items():
            if process.record is not None and process.record.own_state == SERVING:
                assert not paused, name
                assert not process.is_paused, name
            if process.record is not None and process.record.state == SERVING:
                assert process.reached >= self.registry.wanted.state.weights_version, name

    @invariant()
    def nothing_is_forgotten(self) -> None:
        assert self.registry.wanted.state == self.latest

    def teardown(self) -> None:
        """Whatever happened: when all have joined and obeyed, all are equal, and serve if that is wanted."""
        if not self.registry.is_complete:
            self._settle()
        for name in self.processes:
            self.rejoin(name)
            self.receive(name)
            self.obey(name)
        wanted = PAUSED if self.latest.pause_mode else SERVING
        assert {process.record.own_state for process in self.processes.values() if process.record} <= {wanted}


TestStates = States.TestCase
TestStates.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
