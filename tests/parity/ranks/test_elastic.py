"""Groups with spread experts that change their size, or lose ranks, say what one engine says."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.engine_core.data_parallel.cores import Group
from tests.parity.ranks.test_data_parallel import EXPERTS, alone
from tests.parity.reference import save_random
from tokenloom.engine_core.data.config import (
    CacheConfig,
    EngineConfig,
    EplbConfig,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest

EPLB = EplbConfig(window_size=6, step_interval=6, num_redundant_experts=2, move_bytes=16 << 10)


def make_requests(count: int, num_tokens: int) -> list[EngineCoreRequest]:
    generator = np.random.default_rng(5)
    return [
        EngineCoreRequest(
            f"r{index}",
            generator.choice([7, 8, 9, 10], 10 + 9 * index).tolist(),
            CoreSamplingParams(max_tokens=num_tokens, seed=index, temperature=float(index % 2)),
        )
        for index in range(count)
    ]


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    path = save_random("qwen3_moe", tmp_path, head_dim=24, **EXPERTS)
    return EngineConfig(
        worker=WorkerConfig(model=str(path), device="cpu", dtype="float32", num_threads=1),
        cache=CacheConfig(num_blocks=60),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
    )


@pytest.fixture(params=["fixed", "balanced", "overlapping"])
def spread(request: pytest.FixtureRequest, config: EngineConfig, socket_dir: Path) -> Iterator[Group]:
    balanced = request.param == "balanced"
    parallel = ParallelConfig(enable_expert_parallel=True, enable_eplb=balanced, eplb_config=EPLB if balanced else None)
    scheduler = msgspec.structs.replace(config.scheduler, async_scheduling=request.param == "overlapping")
    group = Group(socket_dir, config=msgspec.structs.replace(config, parallel=parallel, scheduler=scheduler))
    yield group
    group.close()


def resize(group: Group, size: int) -> None:
    """Change the size of a group that serves; the new ranks have been started."""
    for rank in range(len(group.ranks)):
        group.call(rank, "resize_group", size)
    group.pump(lambda: all(state is not None and state.size == size for state in group.states))


def test_a_group_grows_to_four_ranks_and_shrinks_to_three(spread: Group, config: EngineConfig) -> None:
    group, requests = spread, make_requests(6, 60)
    expected = alone(config, requests)
    for index, request in enumerate(requests[:4]):
        group.add(index % 2, request)
    group.start_rank(2, 4)
    group.start_rank(3, 4)
    resize(group, 4)
    group.add(3, requests[4])
    group.finish()
    group.add(0, requests[5])
    resize(group, 3)
    assert [state is not None and state.is_member for state in group.states] == [True] * 3 + [False]
    group.close_last()
    group.finish()
    assert group.tokens == expected
    group.add(2, msgspec.structs.replace(requests[0], request_id="again"))
    group.finish()
    assert group.tokens["again"] == expected["r0"]
    if group.expert_loads[0].balance is not None:
        moved = [loads.balance.num_moved for loads in group.expert_loads.values() if loads.balance is not None]
        assert sum(moved) > 0, "experts have moved by their load"


@pytest.mark.parametrize("lost", [0, 1])
def test_ranks_whose_core_is_killed_cost_no_request(spread: Group, config: EngineConfig, lost: int) -> None:
    group, requests = spread, make_requests(4, 60)
    expected = alone(config, requests)
    for index, request in enumerate(requests):
        group.add(index % 2, request)
    group.pump(lambda: all(len(tokens) > 5 for tokens in group.tokens.values()))
    other = group.ranks[1 - lost].pid
    group.lose(lost)
    group.finish()
    assert group.tokens == expected
    assert group.ranks[1 - lost].pid == other


@pytest.mark.parametrize(
    ("balanced", "stages"), [(False, 1), (True, 1), (False, 2)], ids=["fixed", "balanced", "fixed in stages"]
)
def test_experts_are_spread_over_the_workers_of_all_engines(
    config: EngineConfig, socket_dir: Path, balanced: bool, stages: int
) -> None:
    """Two engines of two workers: each has a quarter of the experts, or half of those of its stage. One is killed."""
    requests = make_requests(3, 40)
    expected = alone(config, requests)
    parallel = ParallelConfig(
        tensor_parallel_size=2 // stages,
        pipeline_parallel_size=stages,
        enable_expert_parallel=True,
        enable_eplb=balanced,
        eplb_config=EPLB if balanced else None,
    )
    group = Group(socket_dir, config=msgspec.structs.replace(config, parallel=parallel))
    try:
        assert ("ep-tp-2" if stages == 1 else "ep") in group.ranks[0].ready.numerics.split("/")
        for index, request in enumerate(requests):
            group.add(index % 2, request)
        group.finish()
        assert group.tokens == expected
        if balanced:
            assert group.expert_loads[0].balance is not None
            assert group.expert_loads[0].balance.num_plans > 0
            return
        core = group.ranks[1].pid
        assert core is not None
        again = [msgspec.structs.replace(each, request_id=f"again-{each.request_id}") for each in requests]
        for index, request in enumerate(again):
            group.add(index % 2, request)
        group.pump(lambda: all(len(group.tokens[each.request_id]) > 3 for each in again))
        worker = next(pid for pid in children_of(core) if "worker" in command_of(pid))
        os.kill(worker, signal.SIGKILL)
        group.finish()
        assert {name: group.tokens[f"again-{name}"] for name in expected} == expected
        assert group.ranks[1].pid == core
    finally:
        group.close()


def children_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in children for child in path.read_text().split()]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
