"""Runs an engine core at random: after any adds, aborts and failures, blocks add up and tokens follow from prefixes."""

import itertools
import os
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from tests.engine_core.executor.late import EXECUTORS
from tests.engine_core.helpers import VOCAB_SIZE, make_config, make_request
from tests.engine_core.invariants import check_idle, check_scheduler
from tests.engine_core.kv_cache.grouped_hash_worker import WINDOWS, GroupedHashWorker, groups_of
from tests.engine_core.random_requests import (
    ARRIVALS,
    MAX_MODEL_LEN,
    Arrival,
    Expected,
    Mortal,
    StepLostError,
    expect,
)
from tokenloom.engine_core.control.pausing import PauseMode
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import EngineConfig, ParallelConfig
from tokenloom.engine_core.data.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    StateRemoved,
    StateStored,
)
from tokenloom.engine_core.data.kv_groups import KVNeed
from tokenloom.engine_core.data.messages import FinishReason, RowsWanted
from tokenloom.engine_core.fake_workers.hash_row import STATE_BYTES
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker
from tokenloom.engine_core.kv_cache.kv_manager import largest_chunk
from tokenloom.engine_core.scheduling.drafts import DraftCosts
from tokenloom.engine_core.scheduling.request_order import QueuedRequest, Rank, RequestOrder, SchedulingPolicy
from tokenloom.process.plugins import load

SESSION = "session"


def shortest_first(request: QueuedRequest) -> int:
    return request.num_prompt_tokens + request.max_output_tokens


def newest_first(request: QueuedRequest) -> int:
    return -request.arrival_ns


def tenant_first(request: QueuedRequest) -> int:
    return -(2**63) if request.tenant == "b" else 2**63 - 1


RANKS: tuple[Rank | None, ...] = (None, None, shortest_first, newest_first, tenant_first)
"""Those of schedulers of plugins; None: the policy is built in."""
if named := os.environ.get("TOKENLOOM_TEST_SCHEDULER"):  # PACKAGE:NAME: that of its author
    RANKS = (load("schedulers", named, (named.partition(":")[0],)),)


class CoreMachine(RuleBasedStateMachine):
    """Uses pools that hold hardly more than one long request, so that preemption is frequent, and some in which all
    seats are taken before all blocks."""

    requests = Bundle("requests")
    windows: Sequence[int | None] = ()
    """Those of the groups of layers, if there are several."""
    state_chunk = 0
    """That of the layer that keeps a state; 0: none does."""
    state_bytes = STATE_BYTES
    cross_rows = 0
    """Rows that stand beside each prompt; 0: there are none."""

    @initialize(
        block_size=st.sampled_from([1, 3, 4, 16]),
        spare_blocks=st.integers(0, 8) | st.just(60),
        caching=st.sampled_from([True, True, False]),
        chunked=st.booleans(),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(6, 64),
        beside_decode=st.none() | st.integers(1, 16),
        executor=st.sampled_from(list(EXECUTORS)),
        num_stages=st.sampled_from([1, 1, 2]),
        policy=st.sampled_from(SchedulingPolicy),
        rank=st.sampled_from(RANKS),
        long_prefill=st.sampled_from([0, 0, 1, 5]),
        reserve_full_prompt=st.booleans(),
        watermark=st.sampled_from([0.0, 0.01, 0.3]),
        num_drafts=st.sampled_from([0, 0, 1, 3, 6]),
        draft_accuracy=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
        draft_model=st.sampled_from(["", "small"]),
        free_rows=st.sampled_from([None, None, 1, 4, 9]),
    )
    def start(
        self,
        block_size: int,
        spare_blocks: int,
        caching: bool,
        chunked: bool,
        max_num_seqs: int,
        budget: int,
        beside_decode: int | None,
        executor: str,
        num_stages: int,
        policy: SchedulingPolicy,
        rank: Rank | None,
        long_prefill: int,
        reserve_full_prompt: bool,
        watermark: float,
        num_drafts: int,
        draft_accuracy: float,
        draft_model: str,
        free_rows: int | None,
    ) -> None:
        if self.cross_rows:
            num_drafts = 0  # models with rows beside prompts refuse drafts
        policy = policy if rank is None else SchedulingPolicy.PRIORITY
        config = make_config(
            block_size=block_size,
            num_blocks=None,
            caching=caching,
            chunked=chunked,
            max_num_seqs=max_num_seqs,
            budget=budget if chunked else MAX_MODEL_LEN,
            beside_decode=beside_decode,
            max_model_len=MAX_MODEL_LEN,
            async_scheduling=executor != "uniproc" and num_stages == 1,
            policy=policy,
            long_prefill=long_prefill if chunked else 0,
            reserve_full_prompt=reserve_full_prompt,
            watermark=watermark,
            num_drafts=num_drafts,
            draft_accuracy=draft_accuracy,
            draft_model=draft_model,
        )
        config = msgspec.structs.replace(config, parallel=ParallelConfig(pipeline_parallel_size=num_stages))
        num_blocks = self._num_blocks(config) + spare_blocks
        cache = msgspec.structs.replace(config.cache, kv_events=True, num_blocks=num_blocks)
        config = msgspec.structs.replace(config, cache=cache)
        if self.state_chunk:
            config = self._with_states(config, num_slots=2 + spare_blocks % 14)
        self.policy = policy
        self.told_blocks: set[bytes] = set()
        """The blocks that can be hit according to the events."""
        self.told_states: set[bytes] = set()
        self.spoken: list[int] = []
        """The prompt of the session's current turn, with its output."""
        self.inputs: list[tuple[list[int], int]] = []
        self.mortal = Mortal(self._make_worker(config))
        self.worker = self.mortal.worker
        self.core = EngineCore(config, EXECUTORS[executor](self.worker))
        if rank is not None:
            self.core.scheduler._order = RequestOrder("acme:rank", rank)
        if self.core.scheduler.kv.states is not None:
            self.core.scheduler.kv.states.fork_tokens = 8
            self.core.scheduler.kv.states.far_tokens = 24
        if self.core.scheduler.drafts is not None:
            self.core.scheduler.drafts.free_rows = free_rows
            clock = itertools.count().__next__  # steps take the same time whatever they compute
            self.core.scheduler.drafts.costs = DraftCosts(clock, drafting_takes_time=bool(draft_model))
        self.live: dict[str, Expected] = {}
        self.num_added = 0

    @rule(target=requests, arrivals=st.lists(ARRIVALS, min_size=1, max_size=6), tenant=st.sampled_from(["", "a", "b"]))
    def add(self, arrivals: list[Arrival], tenant: str) -> MultipleResults[str]:
        return multiple(*(self._add(arrival, tenant) for arrival in arrivals))

    @rule(request_id=consumes(requests))
    def abort(self, request_id: str) -> None:
        self.core.abort_requests([request_id, "unknown"])
        self.live.pop(request_id, None)

    @rule(prompt=st.lists(st.integers(0, 3), min_size=1, max_size=4), max_tokens=st.integers(1, 6))
    def speak(self, prompt: list[int], max_tokens: int) -> None:
        message = make_request(SESSION, prompt, max_tokens)
        message.resumable = True
        self.inputs.append((prompt, max_tokens))
        if SESSION not in self.live:
            self._next_turn()
        self.core.add_request(message)

    @rule()
    def fall_silent(self) -> None:
        self.core.abort_requests([SESSION])
        self.live.pop(SESSION, None)
        self.spoken, self.inputs = [], []

    @rule(request_id=consumes(requests))
    def abort_during_a_step(self, request_id: str) -> None:
        self._step([request_id])
        # Without work there was no step to abort in.
        self.abort(request_id)

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @precondition(lambda self: self.core.scheduler.requests and not self.core.pausing.is_paused)
    @rule()
    def lose_a_step(self) -> None:
        self.mortal.dies = True
        for _ in range(3):  # overlapping steps: computed one or two turns after it is scheduled
            try:
                self._step()
            except StepLostError:
                return
            assert self.core._max_in_flight > 1, "requests were live, but nothing was executed"
            if not self.core.scheduler.requests:
                break  # all ended by what was in flight
        assert not self.core.scheduler.requests, "requests were live, but nothing was executed"
        self.mortal.dies = False

    @rule()
    def reset_prefix_cache(self) -> None:
        assert self.core.reset_prefix_cache() == (not self.core.scheduler.running)

    @rule()
    def reset_prefix_cache_of_all(self) -> None:
        assert self.core.reset_prefix_cache(preempt_running=True)
        assert not self.core.scheduler.running
        assert not self.core.scheduler.kv.pool._by_hash

    @precondition(lambda self: not self.core.pausing.is_paused)
    @rule(mode=st.sampled_from(list(PauseMode)), clear_cache=st.booleans())
    def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        begun = {r.request_id for r in self.core.scheduler.requests.values() if r.is_known_to_worker}
        quiet = self.core.pause(mode, clear_cache)
        assert quiet.done() == (not self.core.steps_in_flight and (mode is not PauseMode.WAIT or not begun))
        if mode is PauseMode.ABORT:
            assert not self.core.scheduler.requests
            for expected in self.live.values():
                expected.may_abort = True
        elif mode is PauseMode.WAIT:
            for _ in range(500):
                if quiet.done():
                    break
                self._step()
            assert not begun & set(self.core.scheduler.requests), "it had begun, and did not finish"
        while self.core.steps_in_flight:
            self._step()
        assert quiet.done()
        waiting = [request.kv.num_computed_tokens for request in self.core.scheduler.requests.values()]
        for _ in range(3):
            self._step()
        assert waiting == [request.kv.num_computed_tokens for request in self.core.scheduler.requests.values()]
        assert not self.core.has_work()

    @rule()
    def resume(self) -> None:
        self.core.resume()
        assert self.core.has_work() or not self.core.has_requests()

    @invariant()
    def adds_up(self) -> None:
        scheduler = self.core.scheduler
        check_scheduler(scheduler)
        to_forget = {*scheduler.ended.req_ids}
        for step in self.core.steps_in_flight:
            to_forget.update(step.scheduled.finished_req_ids)
        self.core.executor.collective_rpc("resident_bytes")  # a worker on a thread of its own is idle after this
        assert self.worker._rows.keys() <= {*scheduler.requests, *to_forget}, "the worker keeps the dead"

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.resume()
        for _ in range(2000):
            if not self.core.has_work():
                break
            self._step()
        self.core.shutdown()
        assert not self.live, "requests never ended"
        check_idle(self.core.scheduler)

    def _num_blocks(self, config: EngineConfig) -> int:
        """Return how many blocks the longest request needs."""
        size = config.cache.block_size
        num_blocks = -(-MAX_MODEL_LEN // size) + -(-self.cross_rows // size)
        if not self.windows:
            return num_blocks
        chunk = largest_chunk(config.scheduler)
        return KVNeed(groups_of(self.windows), config.cache.block_size, chunk, lends=False).of_blocks(num_blocks) + 1

    def _make_worker(self, config: EngineConfig) -> HashWorker:
        if self.windows:
            return GroupedHashWorker(config, self.windows, MAX_MODEL_LEN)
        return HashWorker(
            config,
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            state_chunk=self.state_chunk,
            state_bytes=self.state_bytes,
            cross_rows=self.cross_rows,
        )

    def _with_states(self, config: EngineConfig, num_slots: int) -> EngineConfig:
        """Return a configuration that a model of the machine's states can have."""
        replace, chunk, scheduler = msgspec.structs.replace, self.state_chunk, config.scheduler
        if chunk > 1:
            scheduler = replace(
                scheduler,
                max_num_batched_tokens=max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs + chunk),
                long_prefill_token_threshold=scheduler.long_prefill_token_threshold and chunk + 1,
            )
        cache = replace(config.cache, state_memory_bytes=num_slots * self.state_bytes)
        return replace(config, cache=cache, scheduler=scheduler)

    def _add(self, arrival: Arrival, tenant: str) -> str:
        prompt = [7] * arrival.shared + arrival.tail
        expected = expect(prompt, arrival.max_tokens, arrival.stop, self.state_chunk)
        expected.received.extend(expected.tokens[: arrival.num_accepted])
        request_id = f"r{self.num_added}"
        self.num_added += 1
        self.live[request_id] = expected
        self.core.add_request(
            make_request(
                request_id,
                prompt,
                arrival.max_tokens,
                accepted=expected.received,
                stop=arrival.stop,
                salt=arrival.salt,
                session=arrival.session,
                priority=arrival.priority if self.policy is SchedulingPolicy.PRIORITY else 0,
                tenant=tenant,
            )
        )
        return request_id

    def _next_turn(self) -> None:
        prompt, max_tokens = self.inputs.pop(0)
        self.spoken = self.spoken + prompt
        if len(self.spoken) >= MAX_MODEL_LEN:
            self.live[SESSION] = Expected([], FinishReason.ERROR)
            self.inputs.clear()
        else:
            self.live[SESSION] = expect(self.spoken, max_tokens, (), self.state_chunk)

    def _turn_ended(self, expected: Expected, reason: FinishReason) -> None:
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            self.spoken, self.inputs = [], []
            return
        self.spoken += expected.tokens[:-1]
        if self.inputs:
            self._next_turn()

    def _step(self, aborted: Sequence[str] = ()) -> None:
        outputs = self.core.step(lambda: aborted)
        self._take_events(outputs.kv_events)
        self._note_wanted(outputs.rows_wanted)
        for output in outputs.outputs:
            expected = self.live[output.request_id]
            assert output.token_index == len(expected.received)
            expected.received.extend(output.new_token_ids)
            assert expected.received == expected.tokens[: len(expected.received)]
            if output.finish_reason is FinishReason.ABORT:
                assert expected.may_abort
                del self.live[output.request_id]
                if output.request_id == SESSION:
                    self._turn_ended(expected, output.finish_reason)
            elif output.finish_reason is not None:
                assert output.finish_reason is expected.reason
                assert expected.received == expected.tokens
                del self.live[output.request_id]
                if output.request_id == SESSION:
                    self._turn_ended(expected, output.finish_reason)
        check_scheduler(self.core.scheduler)

    def _note_wanted(self, wanted: list[RowsWanted]) -> None:
        """Note which rows the core asks for."""
        assert not wanted, "no request has an image"

    def _take_events(self, events: list[KVCacheEvent]) -> None:
        for event in events:
            match event:
                case BlockStored():
                    assert event.parent_block_hash is None or event.parent_block_hash in self.told_blocks
                    assert not self.told_blocks & set(event.block_hashes)
                    self.told_blocks.update(event.block_hashes)
                case BlockRemoved():
                    self.told_blocks.difference_update(event.block_hashes)
                case AllBlocksCleared():
                    self.told_blocks.clear()
                    self.told_states.clear()
                case StateStored():
                    assert event.named_block not in self.told_states
                    self.told_states.add(event.named_block)
                case StateRemoved():
                    self.told_states.remove(event.named_block)
        if (states := self.core.scheduler.kv.states) is not None and states.events is not None:
            assert states.events._named.keys() == states.pool._by_hash.keys() - states.pool.parked
            assert set(states.events._named.values()) == self.told_states
        assert self.told_blocks == self._blocks_to_hit()

    def _blocks_to_hit(self) -> set[bytes]:
        keys = self.core.scheduler.kv.pool._by_hash
        if self.windows:
            return {key[:-1] for key in keys if key[-1] == 0}
        return {key for key in keys if len(key) == 32}  # and not those of rows beside prompts


pytestmark = pytest.mark.timeout(600)  # shrinking a failure takes minutes
_SETTINGS = settings(
    max_examples=120,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = _SETTINGS


class GroupedCoreMachine(CoreMachine):
    """Has layers with several windows."""

    windows = WINDOWS


TestGroupedCoreMachine = GroupedCoreMachine.TestCase
TestGroupedCoreMachine.settings = settings(_SETTINGS, max_examples=30)


class StateCoreMachine(CoreMachine):
    """Has a layer that keeps a state, which nothing but its tokens decides."""

    state_chunk = 1
    state_bytes = 10_000


TestStateCoreMachine = StateCoreMachine.TestCase
TestStateCoreMachine.settings = settings(_SETTINGS, max_examples=60)


class SmallStateCoreMachine(StateCoreMachine):
    """Keeps a state at the end of each block, also of outputs."""

    state_bytes = STATE_BYTES


TestSmallStateCoreMachine = SmallStateCoreMachine.TestCase
TestSmallStateCoreMachine.settings = settings(_SETTINGS, max_examples=60)


class StrictStateCoreMachine(StateCoreMachine):
    """Has a layer whose result depends on where prompts are cut, and on which tokens were decoded."""

    state_chunk = 6


TestStrictStateCoreMachine = StrictStateCoreMachine.TestCase
TestStrictStateCoreMachine.settings = settings(_SETTINGS, max_examples=60)


class SmallStrictStateCoreMachine(StrictStateCoreMachine):
    """Keeps a state at each boundary of prompts."""

    state_bytes = STATE_BYTES


TestSmallStrictStateCoreMachine = SmallStrictStateCoreMachine.TestCase
TestSmallStrictStateCoreMachine.settings = settings(_SETTINGS, max_examples=30)
