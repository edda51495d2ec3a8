"""The registry chooses what a plain reading of the rule chooses, after any history."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.services.coordinator.engines.test_engine_registry import Clock
from tokenloom.request.errors import ResourceExhausted, Unavailable
from tokenloom.services.coordinator.engines.engine_placement import Policy
from tokenloom.services.coordinator.engines.engine_registry import Registry
from tokenloom.services.runtime.placement.rules import score
from tokenloom.v1.coordinator_pb2 import EngineIdentity, EngineRef, EngineReport, EngineState, PickRequest
from tokenloom.v1.engine_pb2 import PickId
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint, ModelLimits

BOTH, PREFILL, DECODE = EngineRole.ENGINE_ROLE_BOTH, EngineRole.ENGINE_ROLE_PREFILL, EngineRole.ENGINE_ROLE_DECODE
SERVING, DRAINING = EngineState.ENGINE_STATE_SERVING, EngineState.ENGINE_STATE_DRAINING
BLOCK_SIZE, NUM_BLOCKS, THRESHOLD = 16, 1000, 64

roles = st.sampled_from([BOTH, PREFILL, DECODE])


@dataclass
class Engine:
    """What the rule needs to know of an engine, and the rule itself."""

    name: str
    epoch: int
    layout: str
    max_model_len: int
    role: EngineRole = BOTH
    state: EngineState = SERVING
    waiting: int = 0
    running: int = 0
    waiting_tokens: int = 0
    free_blocks: int = NUM_BLOCKS
    reported_at: float = 0.0
    last_turn: int = 0
    counted: dict[int, tuple[int, float]] = field(default_factory=dict)
    blocks: set[int] = field(default_factory=set)
    shown_state: EngineState = SERVING
    is_late: bool = False

    def refresh(self, now: float) -> None:
        silence = now - self.reported_at
        self.is_late = silence > 3.0
        self.shown_state = EngineState.ENGINE_STATE_DEAD if silence > 10.0 else self.state

    def cached(self, request: PickRequest) -> int:
        hashes = request.block_hash_prefixes
        count = next((end for end, each in enumerate(hashes) if each not in self.blocks), len(hashes))
        return min(count * BLOCK_SIZE, request.prompt_tokens)

    def rank(self, request: PickRequest) -> tuple[float, ...]:
        ahead = self.waiting_tokens + sum(tokens for tokens, _ in self.counted.values())
        cached = self.cached(request)
        saved = 0 if request.role == DECODE else round(4 * cached / request.prompt_tokens)
        score = (self.waiting + len(self.counted)) * 4 + self.running
        has_no_room = request.prompt_tokens >= self.free_blocks * BLOCK_SIZE - ahead
        return self.is_late, has_no_room, max(score - saved, 0), -cached, self.last_turn

    def hands_over_to(self, other: "Engine") -> bool:
        return self.role != DECODE and (other.role == DECODE or self.role == PREFILL) and self.layout == other.layout


def choose(engines: list[Engine], request: PickRequest) -> tuple[Engine, bool]:
    """Return the engine, and whether it does the whole request. ``engines``: in the order of their joins, not empty."""

    def best(among: list[Engine]) -> Engine:
        return min(among, key=lambda engine: engine.rank(request))

    decoders = [engine for engine in engines if engine.role in (BOTH, DECODE)]
    if request.role != PREFILL:
        return best(decoders or engines), request.role == BOTH
    if decoders:
        straight = best(decoders)
        if request.prompt_tokens - straight.cached(request) < (0 if request.pools else THRESHOLD):
            return straight, True
    able = [each for each in engines if each.role == BOTH or any(each.hands_over_to(other) for other in decoders)]
    chosen = best(able or engines)
    return chosen, not any(chosen.hands_over_to(other) for other in decoders)


class SameChoiceMachine(RuleBasedStateMachine):
    """Joins, reports, leaves, time and picks: both sides see the same, and must choose the same."""

    names = st.sampled_from("abcdef")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        policy = Policy(pd_threshold=THRESHOLD, rule=score)
        self.registry = Registry(1, self.clock, policy=policy, settle_seconds=0)
        self.records = {}
        self.engines: dict[str, Engine] = {}
        self.num_epochs = 0

    @rule(name=names, role=roles, layout=st.sampled_from("xy"), max_model_len=st.sampled_from([0, 100, 4000]))
    def join(self, name: str, role: EngineRole, layout: str, max_model_len: int) -> None:
        self.num_epochs += 1
        engine = Engine(name, self.num_epochs, layout, max_model_len, role, reported_at=self.clock.now)
        self.engines.pop(name, None)  # an engine that was restarted comes after the others
        self.engines[name] = engine
        self.join_registry(engine)

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def join_again(self, data: st.DataObject) -> None:
        """The same incarnation, after its stream was cut."""
        engine = self.engines[data.draw(st.sampled_from(sorted(self.engines)))]
        engine.reported_at = self.clock.now
        engine.refresh(self.clock.now)
        self.join_registry(engine)

    def join_registry(self, engine: Engine) -> None:
        identity = EngineIdentity(
            engine_id=engine.name,
            epoch=engine.epoch,
            address=engine.name,
            num_kv_blocks=NUM_BLOCKS,
            fingerprint=Fingerprint(model="m", block_size=BLOCK_SIZE, kv_layout=engine.layout),
            limits=ModelLimits(max_model_len=engine.max_model_len),
        )
        self.records[engine.name] = self.registry.join(identity, self.report_of(engine))

    def report_of(self, engine: Engine) -> EngineReport:
        return EngineReport(
            role=engine.role,
            state=engine.state,
            waiting=engine.waiting,
            running=engine.running,
            waiting_tokens=engine.waiting_tokens,
            free_kv_blocks=engine.free_blocks,
            step=round(self.clock.now * 1000),
        )

    @precondition(lambda self: self.engines)
    @rule(
        data=st.data(),
        role=roles,
        state=st.sampled_from([SERVING, SERVING, SERVING, DRAINING]),
        loads=st.tuples(st.integers(0, 3), st.integers(0, 6), st.sampled_from([0, 300])),
        free_blocks=st.sampled_from([NUM_BLOCKS, 20, 0]),
    )
    def report(
        self,
        data: st.DataObject,
        role: EngineRole,
        state: EngineState,
        loads: tuple[int, int, int],
        free_blocks: int,
    ) -> None:
        engine = self.engines[data.draw(st.sampled_from(sorted(self.engines)))]
        engine.role, engine.state, engine.free_blocks = role, state, free_blocks
        engine.waiting, engine.running, engine.waiting_tokens = loads
        engine.reported_at = self.clock.now
        engine.refresh(self.clock.now)
        report = self.report_of(engine)
        for number in data.draw(st.sets(st.sampled_from(sorted(engine.counted)))) if engine.counted else ():
            del engine.counted[number]
            report.picks_arrived.append(PickId(coordinator_epoch=1, number=number))
        self.registry.report(self.records[engine.name], report)

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.engines)))
        self.registry.leave(self.records.pop(name))
        del self.engines[name]

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.registry.refresh()
        for engine in self.engines.values():
            engine.refresh(self.clock.now)
            for number in [number for number, (_, at) in engine.counted.items() if at <= self.clock.now]:
                del engine.counted[number]

    @rule(
        leg=roles,
        prompt=st.lists(st.integers(0, 1), max_size=8),
        more_tokens=st.integers(1, 200),
        excluded=st.sets(names, max_size=2),
        pools=st.booleans(),
        layout=st.sampled_from(["", "x"]),
    )
    def pick(
        self, leg: EngineRole, prompt: list[int], more_tokens: int, excluded: set[str], pools: bool, layout: str
    ) -> None:
        hashes = [hash(tuple(prompt[: end + 1])) & 0xFFFFFFFF for end in range(len(prompt))]
        refs = [EngineRef(engine_id=each.name, epoch=each.epoch) for each in self.engines.values()]
        request = PickRequest(
            fingerprint=Fingerprint(model="m", kv_layout=layout),
            role=leg,
            prompt_tokens=len(prompt) * BLOCK_SIZE + more_tokens,
            block_hash_prefixes=hashes,
            exclude=[ref for ref in refs if ref.engine_id in excluded],
            pools=pools,
        )
        left = [
            engine
            for engine in self.engines.values()
            if engine.shown_state == SERVING
            and engine.name not in excluded
            and (leg != DECODE or layout in ("", engine.layout))
        ]
        able = [each for each in left if self.limit(each) >= request.prompt_tokens + (not pools)]
        try:
            response = self.registry.pick(request)
        except Unavailable:
            assert not left
            return
        except ResourceExhausted:
            assert left
            assert not able
            return
        engine, whole = choose(able, request)
        assert (response.engine.engine_id, response.whole_request) == (engine.name, whole)
        engine.last_turn = response.pick.number
        engine.counted[response.pick.number] = (request.prompt_tokens, self.clock.now + 2.0)
        engine.blocks.update(hashes)

    def limit(self, engine: Engine) -> int:
        size = NUM_BLOCKS * BLOCK_SIZE
        return min(size, engine.max_model_len or size)


TestSameChoiceMachine = SameChoiceMachine.TestCase
TestSameChoiceMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
