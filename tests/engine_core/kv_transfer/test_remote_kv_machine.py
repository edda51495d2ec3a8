"""Random lives of requests whose KV moves between two engines, with faults on the way."""

from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine_core.executor.late import EXECUTORS
from tests.engine_core.helpers import VOCAB_SIZE
from tests.engine_core.invariants import check_idle, check_scheduler
from tests.engine_core.kv_cache.grouped_hash_worker import WINDOWS
from tests.engine_core.kv_transfer.kv_pair import Pair
from tokenloom.engine_core.data.config import KVConfig
from tokenloom.engine_core.fake_workers.hash_row import STATE_BYTES
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens

FAULTS = ("lease_expires", "blocks_reused", "wrong_layout", "copy_fails", "torn_copy", "verify_twice", "verdict_lost")
PROMPTS = st.tuples(st.integers(0, 3), st.integers(1, 40)).map(
    # Prompts of one family begin with each other.
    lambda family_and_length: [(family_and_length[0] * 31 + i) % VOCAB_SIZE for i in range(family_and_length[1])]
)
ENGINES = st.integers(0, 1)


class RemoteKVMachine(RuleBasedStateMachine):
    """Every engine takes both legs, in small pools: each may run out of blocks, and wait for the other."""

    windows: Sequence[int | None] = ()
    """Those of the groups of layers, if there are several."""
    state_chunk = 0
    """That of the layer that keeps a state; 0: none does."""
    state_bytes = STATE_BYTES

    @initialize(
        faults=st.lists(st.sampled_from(FAULTS), max_size=2, unique=True),
        num_blocks=st.sampled_from((12, 16, 40)),
        budget=st.sampled_from((8, 16, 64)),
        caching=st.booleans(),
        max_num_seqs=st.sampled_from((2, 8)),
        executor=st.sampled_from(list(EXECUTORS)),
        copies_at_once=st.booleans(),
        num_slots=st.integers(2, 12),
    )
    def start(
        self,
        faults: list[str],
        num_blocks: int,
        budget: int,
        caching: bool,
        max_num_seqs: int,
        executor: str,
        copies_at_once: bool,
        num_slots: int,
    ) -> None:
        if self.state_chunk:
            budget = max(budget, max_num_seqs + self.state_chunk)
        if self.windows:  # blocks of a request of 48 tokens, with all of its windows, and the block that is never used
            num_blocks = num_blocks * len(self.windows) + 1
        kv = KVConfig(transports=("memory",), checksum=True, failpoints=tuple(f"{name}=0.3" for name in faults))
        self.pair = Pair(
            kvs=[kv, kv],
            num_blocks=num_blocks,
            budget=budget,
            caching=caching,
            max_num_seqs=max_num_seqs,
            executor=executor,
            copies_at_once=copies_at_once,
            windows=self.windows,
            state_chunk=self.state_chunk,
            state_bytes=self.state_bytes,
            num_slots=num_slots if self.state_chunk else 0,
        )

    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 8), early=st.booleans(), swap=st.booleans(), salt=st.booleans())
    def add(self, prompt: list[int], max_tokens: int, early: bool, swap: bool, salt: bool) -> None:
        name = f"r{len(self.pair.requests)}"
        self.pair.add(name, prompt, max_tokens, early=early, swap=swap, salt=b"salt" * salt)

    @rule(engine=ENGINES)
    def step(self, engine: int) -> None:
        self.pair.step(self.pair.engines[engine])

    @rule(engine=ENGINES)
    def copy(self, engine: int) -> None:
        self.pair.engines[engine].copies.run_one()

    @rule(engine=ENGINES)
    def pump(self, engine: int) -> None:
        self.pair.pump(self.pair.engines[engine])

    @rule(turns=st.integers(1, 6))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.pair.turn()

    @rule(seconds=st.sampled_from((0.1, 10.0, 31.0)))
    def wait(self, seconds: float) -> None:
        self.pair.clock.now += seconds

    @precondition(lambda self: self.pair.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = [request for request in self.pair.requests.values() if not request.is_done]
        if live:
            self.pair.abort(data.draw(st.sampled_from(live)))

    @precondition(lambda self: self.pair.requests)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        self.pair.renew(data.draw(st.sampled_from(list(self.pair.requests.values()))))

    @rule(engine=ENGINES, preempt_running=st.booleans())
    def reset_prefix_cache(self, engine: int, preempt_running: bool) -> None:
        self.pair.engines[engine].core.reset_prefix_cache(preempt_running)

    @invariant()
    def nothing_is_out_of_place(self) -> None:
        for engine in self.pair.engines if hasattr(self, "pair") else ():
            check_scheduler(engine.core.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "pair"):
            return
        self.pair.settle()
        self.pair.shutdown()
        for engine in self.pair.engines:
            check_idle(engine.core.scheduler)
            is_wrong = any("wrong_layout" in failpoint for failpoint in engine.config.kv.failpoints)
            assert is_wrong or "layout" not in engine.stats.kv_recomputes, "the owner kept too little"
        for request in self.pair.requests.values():
            expected = expected_tokens(request.prompt, request.max_tokens, VOCAB_SIZE, state_chunk=self.state_chunk)
            assert request.tokens == expected[: len(request.tokens)]
            assert request.is_aborted or len(request.tokens) == request.max_tokens


_SETTINGS = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
TestRemoteKV = RemoteKVMachine.TestCase
TestRemoteKV.settings = _SETTINGS


class GroupedRemoteKVMachine(RemoteKVMachine):
    """Has layers with several windows, of which only the last blocks move."""

    windows = WINDOWS


TestGroupedRemoteKV = GroupedRemoteKVMachine.TestCase
TestGroupedRemoteKV.settings = settings(_SETTINGS, max_examples=20)


class StateRemoteKVMachine(RemoteKVMachine):
    """Has a layer that keeps a state: a slot that is read too early, too late or of another request gives other
    tokens."""

    state_chunk = 1
    state_bytes = 10_000


TestStateRemoteKV = StateRemoteKVMachine.TestCase
TestStateRemoteKV.settings = settings(_SETTINGS, max_examples=60)


class SmallStateRemoteKVMachine(StateRemoteKVMachine):
    """Keeps a state at the end of each block."""

    state_bytes = STATE_BYTES


TestSmallStateRemoteKV = SmallStateRemoteKVMachine.TestCase
TestSmallStateRemoteKV.settings = settings(_SETTINGS, max_examples=30)


class StrictStateRemoteKVMachine(StateRemoteKVMachine):
    """Has a layer whose result depends on where prompts are cut."""

    state_chunk = 6


TestStrictStateRemoteKV = StrictStateRemoteKVMachine.TestCase
TestStrictStateRemoteKV.settings = settings(_SETTINGS, max_examples=60)
