"""Two ranks of a mixture-of-experts model that compute in waves say what one engine says."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.engine_core.data_parallel.cores import Group
from tests.gpu_worker.pooling.small_models import pool
from tests.parity.reference import save_random
from tests.parity.state_checkpoints import write_model
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    PoolerConfig,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from tokenloom.engine_core.data.core_params import (
    DRAWS_NOTHING,
    CorePoolingParams,
    CoreSamplingParams,
    PoolingTask,
)
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.executor.make_executor import make_executor
from tokenloom.services.engine.core.workers import make_worker

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True}
NUM_TOKENS = 40


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(
    ("spread", "stages"), [(False, 1), (True, 1), (True, 2)], ids=["whole", "spread", "spread in two stages"]
)
def test_neither_dummy_batches_nor_experts_elsewhere_change_a_token(
    tmp_path: Path, socket_dir: Path, spread: bool, stages: int, overlaps: bool
) -> None:
    path = save_random("qwen3_moe", tmp_path, head_dim=24, **EXPERTS)
    config = EngineConfig(
        worker=WorkerConfig(model=str(path), device="cpu", dtype="float32", num_threads=1),
        cache=CacheConfig(num_blocks=40),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
    )
    generator = np.random.default_rng(5)
    requests = [
        EngineCoreRequest(
            f"r{index}",
            generator.integers(3, 503, 20 + 9 * index).tolist(),
            CoreSamplingParams(max_tokens=NUM_TOKENS, seed=index, temperature=float(index % 2)),
        )
        for index in range(6)
    ]
    expected = alone(config, requests)
    parallel = ParallelConfig(enable_expert_parallel=spread, pipeline_parallel_size=stages)
    scheduler = msgspec.structs.replace(config.scheduler, async_scheduling=overlaps)
    group = Group(socket_dir, config=msgspec.structs.replace(config, parallel=parallel, scheduler=scheduler))
    try:
        assert ("ep" in group.ranks[0].ready.numerics.split("/")) == spread
        for index, request in enumerate(requests):
            group.add(int(index == 5), request)  # rank 1 computes dummy batches for most of the time
        group.finish()
        group.pump(group.is_resting)
        group.add(1, EngineCoreRequest("again", requests[0].prompt_token_ids, requests[0].sampling_params))
        group.finish()
    finally:
        group.close()
    assert group.tokens == expected | {"again": expected["r0"]}


@pytest.mark.parametrize("overlaps", [False, True])
def test_drafts_of_ranks_whose_experts_are_spread(tmp_path: Path, socket_dir: Path, overlaps: bool) -> None:
    """What drafts is whole on each rank, and exchanges nothing; here it is the model itself, which is always right."""
    path = save_random("qwen3_moe", tmp_path, head_dim=24, **EXPERTS)
    config = EngineConfig(
        worker=WorkerConfig(model=str(path), device="cpu", dtype="float32", num_threads=1),
        cache=CacheConfig(num_blocks=40),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
    )
    requests = [
        EngineCoreRequest(
            f"r{index}",
            np.random.default_rng(index).integers(3, 503, 20 + 9 * index).tolist(),
            CoreSamplingParams(max_tokens=NUM_TOKENS, seed=index, temperature=float(index % 2)),
        )
        for index in range(4)
    ]
    expected = alone(config, requests)
    group = Group(
        socket_dir,
        config=msgspec.structs.replace(
            config,
            parallel=ParallelConfig(enable_expert_parallel=True),
            scheduler=msgspec.structs.replace(config.scheduler, async_scheduling=overlaps),
            speculative=SpeculativeConfig(method="draft_model", model=str(path), num_speculative_tokens=3),
        ),
    )
    try:
        for index, request in enumerate(requests):
            group.add(int(index == 3), request)
        group.finish()
    finally:
        group.close()
    assert group.tokens == expected
    for rank in range(2):
        drafts = group.stats[rank].spec_decoding
        assert drafts is not None
        assert drafts.num_accepted_tokens > 0


@pytest.mark.parametrize("kind", ["qwen3_next", "granitemoehybrid", "kimi_linear"])
def test_models_that_keep_states(tmp_path: Path, socket_dir: Path, kind: str) -> None:
    """Dummy batches change no state of a request. A rank that is lost costs the other one a step, which has changed
    states, and is computed again from the prompts."""
    path = write_model(kind, tmp_path / "model")
    config = EngineConfig(
        worker=WorkerConfig(model=str(path), device="cpu", dtype="float32", num_threads=1),
        cache=CacheConfig(num_blocks=40),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=70),
    )
    requests = [
        EngineCoreRequest(
            f"r{index}",
            np.random.default_rng(index).integers(3, 503, 20 + 30 * index).tolist(),
            CoreSamplingParams(max_tokens=NUM_TOKENS, seed=index, temperature=float(index % 2)),
        )
        for index in range(4)
    ]
    expected = alone(config, requests)
    spread = msgspec.structs.replace(config, parallel=ParallelConfig(enable_expert_parallel=True))
    group = Group(socket_dir, config=spread)
    try:
        for index, request in enumerate(requests):
            group.add(int(index == 3), request)  # rank 1 computes dummy batches for most of the time
        group.finish()
        assert group.tokens == expected
        for request in requests:
            group.add(0, msgspec.structs.replace(request, request_id=f"again-{request.request_id}"))
        group.pump(lambda: all(len(tokens) > 3 for tokens in group.tokens.values()))
        group.lose(1)
        group.finish()
    finally:
        group.close()
    assert {name: group.tokens[f"again-{name}"] for name in expected} == expected


@pytest.mark.parametrize("runner", ["pooling", "auto"])
def test_vectors_of_ranks_whose_experts_are_spread(tmp_path: Path, socket_dir: Path, runner: Any) -> None:
    path = save_random("qwen3_moe", tmp_path, head_dim=24, **EXPERTS)
    pooler = PoolerConfig(pooling_type="MEAN")
    worker = WorkerConfig(
        model=str(path), device="cpu", dtype="float32", num_threads=1, runner=runner, pooler_config=pooler
    )
    config = EngineConfig(
        worker=worker,
        cache=CacheConfig(num_blocks=40),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
    )
    prompts = [np.random.default_rng(seed).integers(3, 503, 9 + 20 * seed).tolist() for seed in range(4)]
    expected = pool(EngineCore(config, make_executor(config, make_worker)), prompts, PoolingTask.EMBED)
    spread = msgspec.structs.replace(config, parallel=ParallelConfig(enable_expert_parallel=True))
    group = Group(socket_dir, config=spread)
    try:
        assert "ep" in group.ranks[0].ready.numerics.split("/")
        for index, prompt in enumerate(prompts):
            params = CorePoolingParams(PoolingTask.EMBED)
            group.add(int(index == 3), EngineCoreRequest(str(index), prompt, DRAWS_NOTHING, pooling_params=params))
        group.finish()
    finally:
        group.close()
    for index, vector in enumerate(expected):
        np.testing.assert_allclose(group.pooled[str(index)], vector, rtol=0, atol=1e-5)


def alone(config: EngineConfig, requests: list[EngineCoreRequest]) -> dict[str, list[int]]:
    """Return what one engine without a group answers."""
    core = EngineCore(config, make_executor(config, make_worker))
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        core.add_request(request)
    while core.has_work():
        for output in core.step().outputs:
            tokens[output.request_id] += output.new_token_ids
    core.shutdown()
    return tokens
