"""States that the pool gives up go to the file with the blocks before them, and both come back together."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine_core.executor.late import EXECUTORS
from tests.engine_core.helpers import make_request
from tests.engine_core.invariants import check_idle, check_scheduler
from tests.engine_core.kv_transfer.offloading_core import BLOCK_SIZE, OffloadingCore, expected, prompt_of, rot
from tokenloom.engine_core.fake_workers.hash_row import STATE_BYTES

LARGE = 10_000
CHUNK = 6


@pytest.fixture(params=[1, CHUNK])
def chunk(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def make(
    directory: Path, chunk: int, *, num_blocks: int = 64, num_states: int = 4, **options: object
) -> OffloadingCore:
    return OffloadingCore(
        directory,
        state_chunk=chunk,
        state_bytes=LARGE,
        num_states=num_states,
        num_blocks=num_blocks,
        max_num_seqs=2,
        **options,  # type: ignore[arg-type]
    )


def ask(core: OffloadingCore, chunk: int, seed: int, length: int = 50) -> None:
    prompt = prompt_of(seed, length)
    assert core.run(prompt) == [expected(prompt, state_chunk=chunk)]
    core.settle()


def hits(core: OffloadingCore) -> int:
    return core.core.scheduler.stats().prefix_cache_hits


def test_a_state_comes_back_with_the_blocks_before_it(tmp_path: Path, chunk: int) -> None:
    core = make(tmp_path, chunk, num_blocks=16)
    for seed in range(4):
        ask(core, chunk, seed)
    ask(core, chunk, 0)
    stats = core.core.scheduler.stats()
    assert stats.kv_blocks_received > 0
    assert stats.kv_bytes_received["offload"] == stats.kv_blocks_received * 8 * BLOCK_SIZE + LARGE
    assert not stats.kv_recomputes
    check_idle(core.core.scheduler)


def test_a_state_comes_back_alone_where_the_pool_has_its_blocks(tmp_path: Path, chunk: int) -> None:
    core = make(tmp_path, chunk, num_blocks=120, num_states=2)
    for seed in range(5):
        ask(core, chunk, seed)
    ask(core, chunk, 0)
    stats = core.core.scheduler.stats()
    assert (stats.kv_blocks_received, stats.kv_bytes_received) == (0, {"offload": LARGE})
    check_idle(core.core.scheduler)


def test_a_state_that_is_given_up_in_the_step_after_its_own_is_saved(tmp_path: Path, chunk: int) -> None:
    """As on an engine that computes prompts only, whose next prompt takes the blocks of the one before."""
    core = make(tmp_path, chunk, num_blocks=16)
    for seed in (0, 1, 2, 0):
        prompt = prompt_of(seed, 50)
        assert core.run(prompt, max_tokens=1) == [expected(prompt, 1, chunk)]
        core.settle()
    assert core.core.scheduler.stats().kv_bytes_received["offload"] > LARGE


def test_a_loaded_state_is_hit_without_a_load(tmp_path: Path, chunk: int) -> None:
    core = make(tmp_path, chunk, num_blocks=120, num_states=3)
    for seed in range(5):
        ask(core, chunk, seed)
    for _ in range(2):
        ask(core, chunk, 0)
    assert core.core.scheduler.stats().kv_bytes_received == {"offload": LARGE}
    assert hits(core) > 0


def test_blocks_without_a_state_behind_them_are_not_loaded(tmp_path: Path, chunk: int) -> None:
    core = make(tmp_path, chunk, num_blocks=16)
    for seed in range(4):
        ask(core, chunk, seed)
    core.core._connector._states.index.clear()  # type: ignore[union-attr]
    ask(core, chunk, 0)
    assert core.blocks_loaded == 0


def test_a_damaged_file_costs_a_recompute(tmp_path: Path, chunk: int) -> None:
    core = make(tmp_path, chunk, num_blocks=16)
    for seed in range(4):
        ask(core, chunk, seed)
    rot(core)
    ask(core, chunk, 0)
    assert core.core.scheduler.stats().kv_recomputes == {"checksum": 1}
    check_idle(core.core.scheduler)


def test_a_damaged_state_costs_a_recompute(tmp_path: Path, chunk: int) -> None:
    core = make(tmp_path, chunk, num_blocks=120, num_states=2)
    for seed in range(5):
        ask(core, chunk, seed)
    rot(core)
    for _ in range(2):  # it is not looked for again
        ask(core, chunk, 0)
    assert core.core.scheduler.stats().kv_recomputes == {"checksum": 1}


def test_states_of_a_reset_cache_are_not_loaded(tmp_path: Path, chunk: int) -> None:
    core = make(tmp_path, chunk, num_blocks=120, num_states=2)
    for seed in range(5):
        ask(core, chunk, seed)
    core.core.reset_prefix_cache()
    ask(core, chunk, 0)
    assert not core.core.scheduler.stats().kv_bytes_received


def test_a_file_without_room_for_a_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="smaller than one block of 32 bytes and one state of 1000000"):
        OffloadingCore(tmp_path, slots=0, state_chunk=1, state_bytes=1_000_000, num_states=2)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chunk=st.sampled_from([1, CHUNK]),
    nbytes=st.sampled_from([LARGE, STATE_BYTES]),
    executor=st.sampled_from(list(EXECUTORS)),
    num_states=st.integers(2, 8),
    num_blocks=st.sampled_from([16, 24, 60]),
    slots=st.sampled_from([3, 20, 80]),
    rounds=st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 56)), min_size=1, max_size=4), max_size=10),
)
def test_whatever_was_evicted_tokens_are_right(
    tmp_path_factory: pytest.TempPathFactory,
    chunk: int,
    nbytes: int,
    executor: str,
    num_states: int,
    num_blocks: int,
    slots: int,
    rounds: list[list[tuple[int, int]]],
) -> None:
    core = OffloadingCore(
        tmp_path_factory.getbasetemp(),
        state_chunk=chunk,
        state_bytes=nbytes,
        num_states=num_states,
        num_blocks=num_blocks,
        slots=slots,
        executor=executor,
        max_num_seqs=3,
        budget=16,
    )
    for asked in rounds:
        prompts = [prompt_of(seed, length) for seed, length in asked]
        assert core.run(*prompts) == [expected(prompt, state_chunk=chunk) for prompt in prompts]
        check_scheduler(core.core.scheduler)
    core.core.shutdown()


def test_no_request_waits_for_a_state_of_one_behind_it(tmp_path: Path) -> None:
    core = OffloadingCore(tmp_path, state_chunk=1, state_bytes=LARGE, num_states=6, num_blocks=60, max_num_seqs=3)
    for seed in range(9):
        ask(core, 1, seed)
    add, step = core.core.add_request, core.core.step
    add(make_request("long", prompt_of(50, 20), 100, tenant="b"))
    core.step()
    prompt = prompt_of(0, 50) + prompt_of(77, 60)
    add(make_request("loads", prompt, 3, tenant="b"))
    core.step()
    add(make_request("first", [*prompt, 1], 3, tenant="a"))  # in the turn of its tenant
    core.settle()
    ended = []
    while core.core.has_work():
        ended += [output.request_id for output in step().outputs if output.finish_reason is not None]
    assert ended[2] == "long", "the others did not begin beside it"
