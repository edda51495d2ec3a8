"""What a preempted request has computed goes to the offload file where that costs less than to compute it again."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine_core.executor.late import EXECUTORS
from tests.engine_core.helpers import make_request
from tests.engine_core.invariants import check_idle, check_scheduler
from tests.engine_core.kv_transfer.offloading_core import BLOCK_BYTES, OffloadingCore, expected, prompt_of, rot
from tokenloom.engine_core.fake_workers.hash_row import STATE_BYTES
from tokenloom.engine_core.kv_cache.block_pool import MOVED
from tokenloom.engine_core.kv_transfer.offload_connector import OffloadConnector
from tokenloom.engine_core.kv_transfer.offload_tier import MoveCosts

CHUNK = 6
LENGTH = 30
"""Of prompts and of answers: two requests need more than the 16 blocks of 4 tokens."""


@pytest.fixture(params=[1, CHUNK])
def chunk(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def make(directory: Path, chunk: int, **options: object) -> OffloadingCore:
    sizes = {"num_states": 6, "num_blocks": 16, "max_num_seqs": 2} | options
    return OffloadingCore(directory, state_chunk=chunk, state_bytes=STATE_BYTES, **sizes)  # type: ignore[arg-type]


def connector_of(core: OffloadingCore) -> OffloadConnector:
    connector = core.core._connector
    assert isinstance(connector, OffloadConnector)
    return connector


def names_in_file(core: OffloadingCore) -> list[bytes]:
    """The names under which the file has what preempted requests look for."""
    connector = connector_of(core)
    assert connector._states is not None
    return [name for index in (connector._index, connector._states.index) for name in index._slots if MOVED in name]


def ask(core: OffloadingCore, chunk: int, *, settles: bool = True) -> None:
    prompts = [prompt_of(seed, LENGTH) for seed in range(2)]
    tokens = core.run(*prompts, max_tokens=LENGTH, settles=settles)
    assert tokens == [expected(prompt, LENGTH, chunk) for prompt in prompts]


def outcomes(core: OffloadingCore) -> dict[str, int]:
    return core.core.scheduler.stats().preempted_states


def test_what_costs_more_to_compute_is_moved(tmp_path: Path, chunk: int) -> None:
    core = make(tmp_path, chunk)
    connector_of(core).costs.computed = 1.0
    ask(core, chunk)
    stats = core.core.scheduler.stats()
    assert stats.num_preemptions > 0
    assert outcomes(core)["loaded"] > 0
    assert "computed" not in outcomes(core)
    assert stats.kv_bytes_received["offload"] == stats.kv_blocks_received * BLOCK_BYTES + (
        outcomes(core)["loaded"] * STATE_BYTES
    )
    assert not stats.kv_recomputes
    assert not names_in_file(core)
    check_idle(core.core.scheduler)


def test_what_costs_more_to_move_is_computed_again(tmp_path: Path, chunk: int) -> None:
    core = make(tmp_path, chunk)
    costs = connector_of(core).costs
    costs.computed, costs.written = 1e-9, 1.0
    ask(core, chunk)
    assert outcomes(core)["computed"] > 0
    assert "loaded" not in outcomes(core)
    assert not names_in_file(core)
    check_idle(core.core.scheduler)


def test_what_others_do_not_need_is_kept_in_memory(tmp_path: Path, chunk: int) -> None:
    """Another tenant takes a seat, and no memory."""
    core = make(tmp_path, chunk, num_blocks=64, num_states=8)
    add = core.core.add_request
    for index in range(2):
        add(make_request(str(index), prompt_of(index, LENGTH), LENGTH, tenant="a"))
    for _ in range(4):
        core.step()
    add(make_request("other", prompt_of(5, 8), 4, tenant="b"))
    while core.core.has_requests():
        core.step()
    assert core.core.scheduler.stats().num_preemptions > 0
    assert outcomes(core) == {"kept": core.core.scheduler.stats().num_preemptions}
    check_idle(core.core.scheduler)


def test_a_damaged_file_costs_a_recompute(tmp_path: Path, chunk: int) -> None:
    core = make(tmp_path, chunk)
    prompts = [prompt_of(seed, LENGTH) for seed in range(2)]
    for index, prompt in enumerate(prompts):
        core.core.add_request(make_request(str(index), prompt, LENGTH))
    tokens: dict[str, list[int]] = {"0": [], "1": []}
    while core.core.has_requests():
        if names_in_file(core):
            rot(core)
        for output in core.step():
            tokens[output.request_id] += output.new_token_ids
    assert list(tokens.values()) == [expected(prompt, LENGTH, chunk) for prompt in prompts]
    assert core.core.scheduler.stats().kv_recomputes["checksum"] > 0
    check_idle(core.core.scheduler)


@pytest.mark.parametrize("way", ["abort", "reset"])
def test_nothing_stays_in_the_file_of_a_request_that_ends_or_is_forgotten(tmp_path: Path, chunk: int, way: str) -> None:
    core = make(tmp_path, chunk)
    for index in range(2):
        core.core.add_request(make_request(str(index), prompt_of(index, LENGTH), LENGTH))
    while not names_in_file(core):
        core.step()
    waiting = [request.request_id for request in core.core.scheduler.waiting]
    assert waiting == ["1"]
    if way == "abort":
        core.core.abort_requests(waiting)
    else:
        assert core.core.reset_prefix_cache(preempt_running=True)
    assert not names_in_file(core)
    while core.core.has_requests():
        core.step()
    assert "loaded" not in outcomes(core)
    check_idle(core.core.scheduler)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chunk=st.sampled_from([1, CHUNK]),
    executor=st.sampled_from(list(EXECUTORS)),
    num_states=st.integers(4, 9),
    num_blocks=st.integers(16, 28),
    slots=st.sampled_from([3, 12, 80]),
    costs=st.lists(st.booleans(), min_size=1, max_size=6),
    asked=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=2, max_size=7),
)
def test_whatever_was_chosen_tokens_are_right(
    tmp_path_factory: pytest.TempPathFactory,
    chunk: int,
    executor: str,
    num_states: int,
    num_blocks: int,
    slots: int,
    costs: list[bool],
    asked: list[tuple[int, int]],
) -> None:
    core = make(
        tmp_path_factory.getbasetemp(),
        chunk,
        executor=executor,
        num_states=num_states,
        num_blocks=num_blocks,
        slots=slots,
        max_num_seqs=3,
        budget=16,
    )
    connector, prompts = connector_of(core), [prompt_of(seed, length) for seed, length in asked]
    for index, prompt in enumerate(prompts):
        core.core.add_request(make_request(str(index), prompt, 20))
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    step = 0
    while core.core.has_requests():
        connector.costs.computed, connector.costs.written = (1.0, 0.0) if costs[step % len(costs)] else (1e-9, 1.0)
        step += 1
        for output in core.step():
            assert not output.error
            tokens[output.request_id] += output.new_token_ids
        check_scheduler(core.core.scheduler)
    assert list(tokens.values()) == [expected(prompt, 20, chunk) for prompt in prompts]
    core.settle()
    core.core.step()
    assert not names_in_file(core)
    core.core.shutdown()


def test_costs_are_learnt_from_what_has_ended() -> None:
    now = [0.0]
    costs = MoveCosts(lambda: now[0])
    assert costs.moves(1 << 30, 1), "no step was measured"
    costs.step_begins(1, 100)
    costs.step_begins(2, 1000)
    now[0] = 1.0
    costs.step_ended(1)
    assert costs.computed == 0.01
    now[0] = 2.0
    costs.step_ended(2)  # it began when the first one had ended
    assert costs.computed == pytest.approx(0.01 + (0.001 - 0.01) / 8)
    costs.step_begins(3, 4)
    now[0] = 9.0
    costs.step_ended(3)  # of few tokens
    costs.step_begins(4, 100)  # fails
    costs.step_begins(5, 4)
    costs.step_ended(5)
    costs.step_ended(4)
    assert costs.computed == pytest.approx(0.01 + (0.001 - 0.01) / 8)
    costs.wrote(1000, 1.0)
    costs.has_read(1000, 0.5)
    assert (costs.written, costs.read) == (0.001, 0.0005)
    assert costs.moves(100, 20)
    assert not costs.moves(100, 10)
