"""Offloading with several KV groups: each group loads only what its window needs, and the worker checks all of it."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engine_core.executor.late import EXECUTORS
from tests.engine_core.helpers import make_request
from tests.engine_core.invariants import check_idle, check_scheduler
from tests.engine_core.kv_cache.grouped_hash_worker import WINDOWS
from tests.engine_core.kv_transfer.offloading_core import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    OffloadingCore,
    expected,
    prompt_of,
    rot,
)
from tokenloom.engine_core.kv_cache.prefix_search import group_key
from tokenloom.request.prefix_schedule import block_hashes

MakeCore = Callable[..., OffloadingCore]


@pytest.fixture
def make_core(tmp_path: Path) -> Iterator[MakeCore]:
    made = []

    def make(**settings: object) -> OffloadingCore:
        made.append(OffloadingCore(tmp_path, **{"windows": (None, 8), "slots": 200, "budget": 8, **settings}))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for core in made:
        check_idle(core.core.scheduler)
        core.core.shutdown()


def test_a_prefix_that_the_pool_lost_comes_back_with_its_last_window_only(make_core: MakeCore) -> None:
    core = make_core(num_blocks=25)
    prompt, filler = prompt_of(1, 41), prompt_of(2, 60)
    for asked in (prompt, filler):
        assert core.run(asked) == [expected(asked)]
    assert core.blocks_loaded == 0
    core.settle()
    assert core.run(prompt) == [expected(prompt)]
    # All ten blocks of full attention, and blocks 8 and 9 of the window of 8.
    stats = core.core.scheduler.stats()
    assert (stats.kv_blocks_received, stats.kv_bytes_received) == (12, {"offload": 12 * BLOCK_BYTES})
    assert stats.kv_recomputes == {}


def test_blocks_of_the_pool_and_of_the_file_make_one_hit(make_core: MakeCore) -> None:
    """Blocks that the window left are evicted first, so that a shorter prefix is in both tiers."""
    core = make_core(num_blocks=22)
    core.run(prompt_of(1, 41))
    core.run(prompt_of(2, 12))
    core.settle()
    short = prompt_of(1, 18)
    assert core.run(short) == [expected(short)]
    assert core.blocks_loaded == 2, "blocks 2 and 3 of the window; the pool has those of full attention"
    assert core.core.scheduler.stats().kv_recomputes == {}


def test_what_was_loaded_can_be_hit(make_core: MakeCore) -> None:
    core = make_core(num_blocks=40)
    prompt = prompt_of(1, 41)
    for asked in (prompt, prompt_of(2, 100), prompt):
        assert core.run(asked) == [expected(asked)]
    loaded = core.blocks_loaded
    assert loaded > 0
    assert core.run(prompt) == [expected(prompt)]
    assert core.blocks_loaded == loaded


@pytest.mark.parametrize("num_sound", [0, 1])
def test_a_file_that_rots_costs_one_load_and_no_token(make_core: MakeCore, num_sound: int) -> None:
    """A request whose load failed does not try a shorter one."""
    core = make_core(num_blocks=25)
    prompt = prompt_of(1, 41)
    for asked in (prompt, prompt_of(2, 60)):
        core.run(asked)
    rot(core, spared=[group_key(block_hash, 0) for block_hash in block_hashes(prompt[:4], BLOCK_SIZE)][:num_sound])
    assert core.run(prompt) == [expected(prompt)]
    stats = core.core.scheduler.stats()
    assert (stats.kv_blocks_received, stats.kv_recomputes) == (num_sound, {"checksum": 1})


def test_a_request_of_the_whole_context_is_served(make_core: MakeCore) -> None:
    """The pool is as large as the longest request needs; nothing is kept for other engines."""
    core = make_core(num_blocks=12 + 5 + 1, max_model_len=48, budget=8)
    prompt = prompt_of(1, 44)
    for _ in range(3):
        assert core.run(prompt) == [expected(prompt)]


class GroupedOffloadMachine(RuleBasedStateMachine):
    """Random lives of requests over a small pool with groups and a file that is small, damaged or forgotten."""

    @initialize(
        num_blocks=st.sampled_from((60, 70, 100)),
        slots=st.sampled_from((1, 10, 60, 400)),
        budget=st.sampled_from((8, 16, 64)),
        executor=st.sampled_from(list(EXECUTORS)),
        windows=st.sampled_from((WINDOWS, (None, 8), (None, 30))),
    )
    def start(self, num_blocks: int, slots: int, budget: int, executor: str, windows: tuple[int | None, ...]) -> None:
        self.core = OffloadingCore(
            Path(tempfile.gettempdir()),
            slots=slots,
            windows=windows,
            num_blocks=num_blocks if len(windows) > 2 else num_blocks // 2,
            budget=budget,
            executor=executor,
        )
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.is_damaged = False

    @rule(seed=st.integers(0, 2), length=st.integers(1, 40), max_tokens=st.integers(1, 8))
    def add(self, seed: int, length: int, max_tokens: int) -> None:
        name = f"r{len(self.asked)}"
        self.asked[name] = prompt_of(seed, length), max_tokens
        self.tokens[name] = []
        self.core.core.add_request(make_request(name, prompt_of(seed, length), max_tokens))

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            if not self.core.core.has_requests():
                break
            for output in self.core.step():
                assert not output.error
                self.tokens[output.request_id] += output.new_token_ids

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.asked)))
        if name in self.core.core.scheduler.requests:
            self.aborted.add(name)
            self.core.core.abort_requests([name])

    @rule(preempt_running=st.booleans())
    def reset_prefix_cache(self, preempt_running: bool) -> None:
        self.core.core.reset_prefix_cache(preempt_running)

    @rule()
    def settle(self) -> None:
        self.core.settle()

    @rule()
    def damage(self) -> None:
        self.is_damaged = True
        rot(self.core)

    @invariant()
    def nothing_is_out_of_place(self) -> None:
        if hasattr(self, "core"):
            check_scheduler(self.core.core.scheduler)

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        self.step(10_000)
        stats = self.core.core.scheduler.stats()
        check_idle(self.core.core.scheduler)
        self.core.core.shutdown()
        assert self.is_damaged or "checksum" not in stats.kv_recomputes
        for name, (prompt, max_tokens) in self.asked.items():
            wanted = expected(prompt, max_tokens)
            assert self.tokens[name] == (wanted[: len(self.tokens[name])] if name in self.aborted else wanted)


TestGroupedOffload = GroupedOffloadMachine.TestCase
TestGroupedOffload.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
