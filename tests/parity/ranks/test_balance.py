"""Experts that move between ranks by their load change no token."""

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.engine_core.data_parallel.cores import Group, free_port
from tests.gpu_worker.parallel.rank_threads import RankThreads, parallel
from tests.parity.engine import Engine
from tests.parity.identical import Case, assert_identical
from tests.parity.ranks.test_data_parallel import EXPERTS, alone
from tests.parity.ranks.test_ranks import Logits
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
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.gpu_worker.model_worker import ModelWorker

EPLB = EplbConfig(window_size=6, step_interval=6, num_redundant_experts=2, move_bytes=16 << 10)
"""An expert of the model has 27 KiB in float32, so that each takes two steps."""


def skewed_prompts(count: int, seed: int) -> list[list[int]]:
    """Return prompts of three tokens only, so that few experts get most of the rows."""
    generator = np.random.default_rng(seed)
    return [generator.choice([7, 8, 9], 10 + 9 * index).tolist() for index in range(count)]


def save(directory: Path) -> Path:
    return save_random("qwen3_moe", directory, head_dim=24, **EXPERTS)


@pytest.mark.parametrize("stages", [1, 2])
def test_tensor_parallel(tmp_path: Path, stages: int) -> None:
    """Sums over ranks are added in another order after a move, so that the parity rule holds."""
    path = save(tmp_path)
    reference = Engine(path, budget=64, num_blocks=60)
    prompts, lengths = skewed_prompts(6, 5), [24] * 6
    outputs = reference.generate(prompts, lengths)
    cases = [
        Case(prompt, tokens, Logits(reference, prompt, tokens))  # type: ignore[arg-type]
        for prompt, tokens in zip(prompts, outputs, strict=True)
    ]
    executors: list[RankThreads] = []

    def executor(config: EngineConfig) -> Executor:
        executors.append(RankThreads(config, tmp_path))
        return executors[-1]

    balanced = msgspec.structs.replace(parallel(2, stages, experts=True), enable_eplb=True, eplb_config=EPLB)
    engine = Engine(path, budget=64, num_blocks=60, executor=executor, parallel=balanced)
    assert "tp-2-eplb" in engine.core.ready.numerics.split("/")
    for _ in range(2):  # the second time with other places of the experts
        assert_identical(cases, engine.generate)
    workers = [worker for worker in executors[0].workers if isinstance(worker, ModelWorker)]
    placements = []
    for worker in workers:
        balancer = worker._ranks.balancer
        assert balancer is not None
        assert balancer.stats.num_plans
        placements.append([layer.logical.tolist() for layer in balancer._layers])
    stage_size = len(workers) // stages
    for stage in range(stages):
        assert placements[stage * stage_size] == placements[stage * stage_size + 1]
        assert any(logical != [*range(8), 0, 1] for logical in placements[stage * stage_size]), "experts have moved"
    if stages == 1:
        loads = engine.core._expert_loads
        assert loads is not None
        assert loads.balance is not None
        assert 0 < loads.balance.balancedness <= 1
    engine.core.executor.collective_rpc("sleep", 1)
    engine.core.executor.collective_rpc("wake_up", ["weights", "kv_cache"])
    assert_identical(cases[:2], engine.generate)
    engine.core.shutdown()


def test_data_parallel(tmp_path: Path, socket_dir: Path) -> None:
    """A token's rows are added in one order wherever they are computed, so that tokens are equal. The ranks meet as
    those of several machines do: over TCP, with a secret, and without a coordinator."""
    path = save(tmp_path)
    config = EngineConfig(
        worker=WorkerConfig(model=str(path), device="cpu", dtype="float32", num_threads=1),
        cache=CacheConfig(num_blocks=40),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
    )
    requests = [
        EngineCoreRequest(
            f"r{index}", prompt, CoreSamplingParams(max_tokens=40, seed=index, temperature=float(index % 2))
        )
        for index, prompt in enumerate(skewed_prompts(6, 6))
    ]
    expected = alone(config, requests)
    secret = tmp_path / "secret"
    secret.write_text("a secret of both machines")
    spread = ParallelConfig(
        enable_expert_parallel=True,
        enable_eplb=True,
        eplb_config=EPLB,
        data_parallel_address=f"127.0.0.1:{free_port()}",
        data_parallel_secret_file=str(secret),
    )
    group = Group(socket_dir, config=msgspec.structs.replace(config, parallel=spread), has_coordinator=False)
    try:
        for index, request in enumerate(requests):
            group.add(int(index > 3), request)
        group.finish()
        group.pump(group.is_resting)
        group.add(1, EngineCoreRequest("again", requests[0].prompt_token_ids, requests[0].sampling_params))
        group.finish()
    finally:
        group.close()
    assert group.tokens == expected | {"again": expected["r0"]}
    balances = [loads.balance for loads in group.expert_loads.values()]
    assert all(balance is not None and balance.num_plans for balance in balances)
    assert sum(balance.num_moved for balance in balances if balance is not None) > 0
    print("balancedness and moves", [(each.balancedness, each.num_moved) for each in balances if each is not None])


def test_engines_whose_experts_stay_import_nothing(tmp_path: Path) -> None:
    path = save(tmp_path)
    code = f"""
import sys
from pathlib import Path
from tokenloom.gpu_worker.models.load_model import load_model
load_model(Path({str(path)!r}))
assert not [name for name in sys.modules if "parallel.balance" in name]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("eplb", "parts", "message"),
    [
        (
            EplbConfig(num_redundant_experts=1),
            parallel(2, experts=True),
            "8 experts and 1 copies are not a multiple of 2",
        ),
        (
            EplbConfig(num_redundant_experts=10),
            parallel(2, experts=True),
            "10 is too large: each of 8 experts has one copy at most",
        ),
        (None, parallel(2), "enable_eplb: needs enable_expert_parallel"),
        (None, ParallelConfig(enable_expert_parallel=True), "and several workers or engines"),
    ],
)
def test_settings_that_do_not_work(
    tmp_path: Path, eplb: EplbConfig | None, parts: ParallelConfig, message: str
) -> None:
    path = save(tmp_path)
    balanced = msgspec.structs.replace(parts, enable_eplb=True, eplb_config=eplb)
    with pytest.raises(ValueError, match=message):
        Engine(path, parallel=balanced, executor=lambda config: RankThreads(config, tmp_path))
