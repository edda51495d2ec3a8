"""Small cores over the hash worker whose evicted blocks go to a file: wrong bytes anywhere would change tokens."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine_core.executor.late import EXECUTORS
from tests.engine_core.helpers import make_request
from tests.engine_core.invariants import check_idle
from tests.engine_core.kv_transfer.offloading_core import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    OffloadingCore,
    expected,
    prompt_of,
    rot,
)
from tokenloom.engine_core.data.messages import SessionTurn
from tokenloom.engine_core.kv_transfer import offload_tier
from tokenloom.request.prefix_schedule import block_hashes


@pytest.fixture
def make_core(tmp_path: Path) -> Iterator[Callable[..., OffloadingCore]]:
    made = []

    def make(**settings: object) -> OffloadingCore:
        made.append(OffloadingCore(tmp_path, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for core in made:
        check_idle(core.core.scheduler)
        core.core.shutdown()
        core.core.shutdown()


def test_an_evicted_prefix_comes_back(make_core: Callable[..., OffloadingCore]) -> None:
    core = make_core(num_blocks=10)
    first, second = prompt_of(1, 30), prompt_of(2, 30)
    for prompt in (first, second):
        assert core.run(prompt) == [expected(prompt)]
    assert core.blocks_loaded == 0
    assert core.run(first) == [expected(first)]
    stats = core.core.scheduler.stats()
    assert stats.kv_blocks_received >= 5
    assert stats.kv_bytes_received == {"offload": stats.kv_blocks_received * BLOCK_BYTES}
    assert stats.kv_recomputes == {}


def test_wrong_content_does_not_come_back(make_core: Callable[..., OffloadingCore]) -> None:
    core = make_core(num_blocks=10)
    first, second = prompt_of(1, 30), prompt_of(2, 30)
    for prompt in (first, second):
        core.run(prompt)
    core.core.add_request(make_request("a", first, 4))
    hashes = core.core.scheduler.requests["a"].kv.block_hashes
    while not core.blocks_loaded:
        core.core.step()
    core.core.scheduler.kv.pool.forget(core.core.scheduler.requests["a"].kv.block_ids)
    assert len(hashes) >= 5
    core.core.abort_requests(["a"])
    loaded = core.blocks_loaded
    assert core.run(first) == [expected(first)]
    assert core.blocks_loaded == loaded


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 29, 32, 33])
def test_prompts_of_all_lengths_come_back(make_core: Callable[..., OffloadingCore], num_tokens: int) -> None:
    core = make_core(num_blocks=10)
    prompt, filler = prompt_of(1, num_tokens), prompt_of(2, 36)
    for asked in (prompt, filler, prompt):
        assert core.run(asked) == [expected(asked)]
    assert core.blocks_loaded == (num_tokens - 1) // BLOCK_SIZE


def test_only_what_the_pool_lost_is_loaded(make_core: Callable[..., OffloadingCore]) -> None:
    core = make_core(num_blocks=12)
    shared = prompt_of(1, 16)
    core.run([*shared, 5])
    core.run(prompt_of(2, 36))
    core.run([*shared, 6])
    loaded = core.blocks_loaded
    assert 0 < loaded <= 4
    core.run([*shared, 7])
    assert core.blocks_loaded == loaded, "they are back in the pool"


def test_requests_at_once(make_core: Callable[..., OffloadingCore]) -> None:
    core = make_core(num_blocks=24)
    prompts = [prompt_of(seed, 20 + seed) for seed in range(8)]
    for _ in range(3):
        assert core.run(*prompts) == [expected(prompt) for prompt in prompts]
    assert core.blocks_loaded > 0


LONG_SESSION = prompt_of(1, 80)
TURN = SessionTurn(1, return_ns=100)


class Clock:
    """Nanoseconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1

    def __call__(self) -> int:
        return self.now


def run_others(core: OffloadingCore, clock: Clock) -> None:
    """Fill what the session leaves of the pool, shortly before its next turn is due."""
    for seed in range(2, 6):
        clock.now = 40 + 10 * seed
        core.run(prompt_of(seed, 4), max_tokens=12, settles=True)
        core.settle()


def saved_of(core: OffloadingCore, prompt: list[int]) -> list[bool]:
    connector: Any = core.core._connector
    return [connector._index.find(each) is not None for each in block_hashes(prompt, BLOCK_SIZE)]


@pytest.mark.parametrize("executor", ["uniproc", "late"])
def test_a_session_is_saved_before_it_is_evicted(make_core: Callable[..., OffloadingCore], executor: str) -> None:
    clock = Clock()
    core = make_core(num_blocks=26, executor=executor, clock=clock)
    core.run(LONG_SESSION, session=TURN)
    assert not any(saved_of(core, LONG_SESSION))
    run_others(core, clock)
    find = core.core.scheduler.kv.pool.find
    assert all(find(each) is not None for each in block_hashes(LONG_SESSION, BLOCK_SIZE))
    assert all(saved_of(core, LONG_SESSION)), "its blocks are in the pool and in the file"


@pytest.mark.parametrize(("session", "loaded"), [(TURN, 19), (None, 0)])
def test_a_session_comes_back_whole_after_a_prompt_that_evicts_it_at_once(
    make_core: Callable[..., OffloadingCore],
    monkeypatch: pytest.MonkeyPatch,
    session: SessionTurn | None,
    loaded: int,
) -> None:
    monkeypatch.setattr(offload_tier, "MAX_PENDING_BYTES", 4 * BLOCK_BYTES)
    clock = Clock()
    core = make_core(num_blocks=26, budget=128, clock=clock)
    core.run(LONG_SESSION, session=session)
    run_others(core, clock)
    core.run(prompt_of(9, 96))
    core.settle()
    assert core.run(LONG_SESSION) == [expected(LONG_SESSION)]
    assert core.blocks_loaded == loaded, "without a session, what does not fit into the file's queue is dropped"


def test_a_short_session_and_one_in_a_pool_with_room_are_not_saved(make_core: Callable[..., OffloadingCore]) -> None:
    clock = Clock()
    for num_blocks, prompt in ((26, prompt_of(1, 20)), (80, LONG_SESSION)):
        core = make_core(num_blocks=num_blocks, clock=clock)
        clock.now = 1
        core.run(prompt, session=TURN)
        run_others(core, clock)
        assert not any(saved_of(core, prompt))


def test_salts_do_not_share(make_core: Callable[..., OffloadingCore]) -> None:
    core = make_core(num_blocks=10)
    prompt = prompt_of(1, 30)
    core.run(prompt)
    core.run(prompt_of(2, 36))
    core.core.add_request(make_request("salted", prompt, salt=b"other"))
    while core.core.has_requests():
        core.core.step()
    assert core.blocks_loaded == 0


def test_a_file_that_rots_costs_time_and_no_token(make_core: Callable[..., OffloadingCore]) -> None:
    core = make_core(num_blocks=10)
    first, second = prompt_of(1, 30), prompt_of(2, 30)
    core.run(first)
    core.run(second)
    core.run(prompt_of(3, 4))
    rot(core)
    assert core.run(first, max_tokens=4) == [expected(first)]
    assert core.core.scheduler.stats().kv_recomputes == {"checksum": 1}


def test_a_tier_of_one_slot_works(make_core: Callable[..., OffloadingCore]) -> None:
    core = make_core(num_blocks=10, slots=1)
    for prompt in (prompt_of(seed % 3, 33) for seed in range(9)):
        assert core.run(prompt) == [expected(prompt)]


def test_resetting_the_prefix_cache_forgets_the_file(make_core: Callable[..., OffloadingCore]) -> None:
    core = make_core(num_blocks=10)
    first, second = prompt_of(1, 30), prompt_of(2, 30)
    core.run(first)
    core.run(second)
    assert core.core.reset_prefix_cache()
    assert core.run(first) == [expected(first)]
    assert core.blocks_loaded == 0


def test_aborting_a_request_that_loads_frees_its_blocks_when_the_load_ends(
    make_core: Callable[..., OffloadingCore],
) -> None:
    core = make_core(num_blocks=10)
    first, second = prompt_of(1, 30), prompt_of(2, 30)
    core.run(first)
    core.run(second)
    core.core.add_request(make_request("a", first))
    core.core.step()
    core.core.abort_requests(["a"])
    assert core.run(second) == [expected(second)]


def test_an_evicted_block_that_a_step_in_flight_computes_is_not_saved(
    make_core: Callable[..., OffloadingCore],
) -> None:
    core = make_core(num_blocks=10, executor="late")
    first, second = prompt_of(1, 30), prompt_of(2, 36)
    core.core.add_request(make_request("a", first))
    core.core.step()
    core.core.abort_requests(["a"])  # its blocks can be hit, and are not computed yet
    for prompt in (second, first, second, first):
        assert core.run(prompt) == [expected(prompt)]
    assert core.blocks_loaded > 0


def test_a_file_too_small_for_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is smaller than one block"):
        OffloadingCore(tmp_path, slots=0)


PROMPTS = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=4), min_size=1, max_size=8
)


@settings(max_examples=30, deadline=None)
@given(
    rounds=PROMPTS,
    slots=st.sampled_from([1, 3, 8, 64]),
    num_blocks=st.sampled_from([12, 20]),
    executor=st.sampled_from(list(EXECUTORS)),
)
def test_random_prompts_get_their_tokens(
    rounds: list[list[tuple[int, int]]], slots: int, num_blocks: int, executor: str
) -> None:
    directory = Path(tempfile.gettempdir())
    core = OffloadingCore(directory, slots=slots, num_blocks=num_blocks, budget=16, executor=executor)
    try:
        for asked in rounds:
            prompts = [prompt_of(seed, num_tokens) for seed, num_tokens in asked]
            assert core.run(*prompts) == [expected(prompt) for prompt in prompts]
        check_idle(core.core.scheduler)
    finally:
        core.core.shutdown()
