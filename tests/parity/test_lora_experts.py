"""Adapters of experts, one by one and all in one tensor, get the tokens of the merged model."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.gpu_worker.lora.random_adapter import KINDS, save_adapter
from tests.gpu_worker.parallel.rank_threads import RankThreads, parallel
from tests.parity.engine import Engine
from tests.parity.reference import SMALL_CONFIGS, save_random
from tests.parity.test_lora_layouts import Layouts
from tokenloom.engine_core.data.config import EngineConfig, EplbConfig, LoraConfig
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.gpu_worker.model_worker import ModelWorker

_ALL = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "each": {"kinds": (*KINDS, "w1", "w2", "w3"), "has_experts": True},
    "some": {"kinds": ("down_proj", "w2"), "has_experts": True, "use_rslora": True},
    "all": {"kinds": ("q_proj",), "target_parameters": _ALL},
    "all_down": {"kinds": (), "target_parameters": _ALL[1:]},
    "all_up": {"kinds": (), "target_parameters": _ALL[:1], "alpha_pattern": {"gate_up_proj": 3}},
    "router": {"kinds": ("gate", "o_proj", "shared_expert_gate")},
    "attention": {"kinds": ("q_proj", "o_proj")},
    "dora": {"kinds": ("gate_proj", "down_proj", "w1", "w2"), "has_experts": True, "use_dora": True},
}


COMPRESSED: dict[str, dict[str, Any]] = {
    "attention": {"kinds": ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")},
    "all": {"kinds": ("kv_a_proj_with_mqa", *KINDS, "gate"), "has_experts": True, "use_dora": True},
    "behind": {"kinds": ("kv_b_proj",)},
    "behind_with_magnitudes": {"kinds": ("kv_b_proj", "q_b_proj"), "use_dora": True, "rank_pattern": {"kv_b_proj": 9}},
    "behind_trained": {"kinds": ("o_proj",), "modules_to_save": ["kv_b_proj"]},
}


@pytest.fixture(scope="module", params=["mixtral", "qwen2_moe", "qwen3_moe"])
def layouts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Layouts:
    directory = tmp_path_factory.mktemp("experts")
    model = save_random(request.param, directory, **_sizes(request.param))
    return Layouts(directory, model, LAYOUTS)


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_layers_of_compressed_vectors(kind: str, tmp_path: Path) -> None:
    layouts = Layouts(tmp_path, save_random(kind, tmp_path, **SMALL_CONFIGS[kind]), COMPRESSED)
    layouts.check(layouts.engine())
    layouts.check(layouts.engine(attention_backend="reference"))

    def executor(config: EngineConfig) -> Executor:
        return RankThreads(config, tmp_path)

    engine = layouts.engine(executor=executor, parallel=parallel(2))
    layouts.check(engine)
    engine.core.shutdown()


def _sizes(kind: str) -> dict[str, Any]:
    if kind == "mixtral":
        return {"num_local_experts": 4, "num_experts_per_tok": 2}
    shared = {"shared_expert_intermediate_size": 64} if kind == "qwen2_moe" else {"head_dim": 24}
    return {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48} | shared


def test_experts_in_one_batch_equal_merged_weights(layouts: Layouts) -> None:
    layouts.check(layouts.engine())


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("spreads", [False, True])
def test_over_ranks(spreads: bool, shape: tuple[int, int], layouts: Layouts, tmp_path: Path) -> None:
    def executor(config: EngineConfig) -> Executor:
        return RankThreads(config, tmp_path)

    engine = layouts.engine(executor=executor, parallel=parallel(*shape, experts=spreads))
    layouts.check(engine)
    engine.core.shutdown()


def test_experts_that_move_between_ranks(layouts: Layouts, tmp_path: Path) -> None:
    """What an adapter changes follows the expert to its new place, and its copies."""
    executors: list[RankThreads] = []

    def executor(config: EngineConfig) -> Executor:
        executors.append(RankThreads(config, tmp_path))
        return executors[-1]

    balanced = EplbConfig(window_size=6, step_interval=6, num_redundant_experts=2)
    ranks = replace(parallel(2, experts=True), enable_eplb=True, eplb_config=balanced)
    engine = layouts.engine(executor=executor, parallel=ranks)
    for _ in range(2):  # the second time with other places of the experts
        layouts.compare(engine)
    worker = executors[0].workers[0]
    assert isinstance(worker, ModelWorker)
    assert worker._ranks.balancer is not None
    assert worker._ranks.balancer.stats.num_moved > 0
    engine.core.shutdown()


@pytest.mark.parametrize("options", [{"quantization": "int8-dynamic"}, {"quantization": "int4"}, {"dtype": "bfloat16"}])
def test_any_base(options: dict[str, Any], tmp_path: Path) -> None:
    """Rows without an adapter stay the same, to the bit, next to rows whose experts are computed apart."""
    model = save_random("qwen3_moe", tmp_path, **_sizes("qwen3_moe"), hidden_size=64)
    adapter = save_adapter(tmp_path / "all", model, **LAYOUTS["all"])
    lora = LoraConfig(enable=True, modules=(f"all={adapter}",))
    engine = Engine(model, lora=lora, max_model_len=64, num_blocks=32, max_num_seqs=4, **options)
    (state,) = engine.core.adapters.answer().adapters  # type: ignore[union-attr]
    prompt = list(range(3, 23))
    plain, adapted = engine.generate([prompt] * 2, [8, 8], adapters=[b"", state.digest])
    assert plain != adapted
    assert engine.generate([prompt], [8], adapters=[state.digest]) == [adapted]
    alone = Engine(model, max_model_len=64, num_blocks=32, max_num_seqs=4, **options)
    assert alone.generate([prompt], [8]) == [plain]
