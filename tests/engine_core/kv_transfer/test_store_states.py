"""Engines share the states that layers keep, with the blocks before them: a wrong one anywhere would change tokens."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine_core.executor.late import EXECUTORS
from tests.engine_core.invariants import check_idle, check_scheduler
from tests.engine_core.kv_transfer.offloading_core import expected, prompt_of
from tests.engine_core.kv_transfer.storing_core import BLOCK_BYTES, BLOCK_SIZE, MemoryStore, StoringCore
from tokenloom.engine_core.fake_workers.hash_row import STATE_BYTES
from tokenloom.engine_core.kv_transfer.block_store import HEAD_BYTES

LARGE = 10_000
CHUNK = 6
PROMPT = prompt_of(1, 50)


@pytest.fixture(params=[1, CHUNK])
def chunk(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore({})


def make(store: MemoryStore | str, chunk: int, **options: object) -> StoringCore:
    settings = {"num_states": 4, "num_blocks": 64, "max_num_seqs": 2, **options}
    return StoringCore(store, state_chunk=chunk, state_bytes=LARGE, **settings)  # type: ignore[arg-type]


def ask(core: StoringCore, chunk: int, prompt: list[int] = PROMPT) -> None:
    assert core.run(prompt) == [expected(prompt, state_chunk=chunk)]
    check_idle(core.core.scheduler)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_engine_begins_with_a_state_of_another_one(store: MemoryStore, chunk: int, executor: str) -> None:
    one, other = make(store, chunk, executor=executor), make(store, chunk, executor=executor)
    ask(one, chunk)
    ask(one, chunk, prompt_of(2, 9))  # a state can be saved a step after the one that wrote it
    ask(other, chunk)
    stats = other.core.scheduler.stats()
    num_tokens = stats.kv_blocks_received * BLOCK_SIZE
    assert num_tokens >= len(PROMPT) - 2 * max(chunk, BLOCK_SIZE) - BLOCK_SIZE
    assert stats.kv_bytes_received == {"memory": stats.kv_blocks_received * BLOCK_BYTES + LARGE}
    assert not stats.kv_recomputes
    assert other.num_saved <= 1, "what is there is not written again"


def test_a_state_comes_alone_where_the_pool_has_its_blocks(store: MemoryStore, chunk: int) -> None:
    core = make(store, chunk, num_blocks=120, num_states=2)
    for seed in range(1, 6):
        ask(core, chunk, prompt_of(seed, 50))
    ask(core, chunk)
    stats = core.core.scheduler.stats()
    assert (stats.kv_blocks_received, stats.kv_bytes_received) == (0, {"memory": LARGE})


def test_blocks_without_a_state_behind_them_are_not_loaded(store: MemoryStore, chunk: int) -> None:
    core = make(store, chunk)
    ask(core, chunk)
    ask(core, chunk, prompt_of(2, 9))
    for key in [key for key, value in store.values.items() if len(value) > LARGE]:
        del store.values[key]
    other = make(store, chunk)
    ask(other, chunk)
    assert other.num_loaded == 0


@pytest.mark.parametrize("is_state", [False, True])
def test_a_wrong_value_costs_a_recompute(store: MemoryStore, chunk: int, is_state: bool) -> None:
    core = make(store, chunk)
    ask(core, chunk)
    ask(core, chunk, prompt_of(2, 9))
    for key, value in store.values.items():
        if (len(value) > LARGE) == is_state:
            store.values[key] = value[:-1] + bytes((value[-1] ^ 1,))
    other = make(store, chunk)
    ask(other, chunk)
    assert other.core.scheduler.stats().kv_recomputes == {"checksum": 1}


def test_a_store_without_room_for_a_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"a state takes {LARGE + HEAD_BYTES} bytes there, and it holds 5000 bytes"):
        make(tmp_path.as_uri(), 1, store_bytes=5000)


def test_what_one_preempted_request_looks_for_is_not_saved(store: MemoryStore) -> None:
    core = make(store, 1, num_blocks=22, max_num_seqs=3, num_states=6, budget=16)
    prompts = [prompt_of(seed, 20) for seed in range(3)]
    assert core.run(*prompts, max_tokens=20) == [expected(prompt, 20, 1) for prompt in prompts]
    assert core.core.scheduler.stats().num_preemptions > 0
    alone = MemoryStore({})
    for prompt in prompts:
        make(alone, 1).run(prompt, max_tokens=20)
    # Preempted or not, equal names have equal content, and there is nothing beside what prompts may find.
    blocks = {key for key, value in store.values.items() if len(value) < LARGE}
    assert blocks <= alone.values.keys()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chunk=st.sampled_from([1, CHUNK]),
    nbytes=st.sampled_from([LARGE, STATE_BYTES]),
    executor=st.sampled_from(list(EXECUTORS)),
    num_states=st.integers(2, 8),
    num_blocks=st.sampled_from([16, 24, 60]),
    rounds=st.lists(
        st.tuples(st.booleans(), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 56)), min_size=1, max_size=4)),
        max_size=8,
    ),
)
def test_whoever_computed_them_tokens_are_right(
    chunk: int,
    nbytes: int,
    executor: str,
    num_states: int,
    num_blocks: int,
    rounds: list[tuple[bool, list[tuple[int, int]]]],
) -> None:
    store = MemoryStore({})
    cores = [
        StoringCore(
            store,
            state_chunk=chunk,
            state_bytes=nbytes,
            num_states=num_states,
            num_blocks=num_blocks,
            executor=executor,
            max_num_seqs=3,
            budget=16,
        )
        for _ in range(2)
    ]
    for which, asked in rounds:
        prompts = [prompt_of(seed, length) for seed, length in asked]
        assert cores[which].run(*prompts) == [expected(prompt, state_chunk=chunk) for prompt in prompts]
        check_scheduler(cores[which].core.scheduler)
    for core in cores:
        core.core.shutdown()
