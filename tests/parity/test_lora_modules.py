"""Adapters of models that transformers' modules compute get the tokens of the merged model."""

from pathlib import Path
from typing import Any

import pytest

from tests.gpu_worker.lora.random_adapter import save_adapter
from tests.gpu_worker.parallel.rank_threads import RankThreads, parallel
from tests.parity.engine import Engine
from tests.parity.reference import save_random
from tests.parity.state_checkpoints import write_model
from tests.parity.test_lora_layouts import Layouts
from tokenloom.engine_core.data.config import EngineConfig, LoraConfig, WorkerConfig
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.gpu_worker.checkpoint.served_how import served_how

LLAMA: dict[str, dict[str, Any]] = {
    "plain": {},
    "dora": {"use_dora": True, "rank_pattern": {"k_proj": 9}},
    "biases": {"bias": "all", "kinds": ("k_proj", "gate_proj")},
    "trained": {"kinds": ("up_proj",), "modules_to_save": ["q_proj", "down_proj", "lm_head"]},
    "ends": {"kinds": ("embed_tokens", "lm_head", "o_proj")},
    "trained_embeddings": {"kinds": ("o_proj",), "modules_to_save": ["embed_tokens"]},
}
NEOX: dict[str, dict[str, Any]] = {
    "one": {"kinds": ("query_key_value", "dense_4h_to_h")},
    "two": {"kinds": ("dense", "dense_h_to_4h", "query_key_value"), "use_dora": True, "bias": "lora_only"},
}
MODELS = {"qwen2": LLAMA, "gpt_neox": NEOX}


@pytest.mark.parametrize("kind", MODELS)
def test_layers_of_modules(kind: str, tmp_path: Path) -> None:
    """Whatever its linear layers are called, and whether several of them are computed as one."""
    layouts = Layouts(tmp_path, save_random(kind, tmp_path), MODELS[kind])
    layouts.check(layouts.engine(model_impl="transformers"))


@pytest.mark.parametrize("shape", [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("kind", MODELS)
def test_over_ranks(kind: str, shape: tuple[int, int], tmp_path: Path) -> None:
    """Matrices are cut as the layers are, by the plans of their classes."""

    def executor(config: EngineConfig) -> Executor:
        return RankThreads(config, tmp_path)

    layouts = Layouts(tmp_path, save_random(kind, tmp_path), MODELS[kind])
    engine = layouts.engine(model_impl="transformers", executor=executor, parallel=parallel(*shape))
    layouts.check(engine)
    engine.core.shutdown()


def test_inputs_that_ranks_round_together_are_refused(tmp_path: Path) -> None:
    model = save_random("qwen3", tmp_path, head_dim=32, intermediate_size=128)
    config = EngineConfig(
        worker=WorkerConfig(model=str(model), device="cpu", quantization="int8-dynamic", model_impl="transformers"),
        lora=LoraConfig(enable=True),
        parallel=parallel(2),
    )
    with pytest.raises(ValueError, match="enable_lora: transformers' modules have no adapters over several workers"):
        served_how(config, has_gpu=False)


@pytest.mark.parametrize("layout", [{"kinds": ("w1", "w2"), "has_experts": True}, {"modules_to_save": ["norm"]}])
def test_what_computes_other_rows_is_refused_by_name(layout: dict[str, Any], tmp_path: Path) -> None:
    model = save_random("mixtral", tmp_path, num_local_experts=4, num_experts_per_tok=2)
    path = save_adapter(tmp_path / "adapter", model, **layout)
    lora = LoraConfig(enable=True, modules=(f"adapter={path}",))
    with pytest.raises(ValueError, match=r"model\..*experts.* cannot have an adapter|model\.norm has shape \[64\]"):
        Engine(model, lora=lora, model_impl="transformers")


def test_layers_with_states_are_refused(tmp_path: Path) -> None:
    model = write_model("mamba2", tmp_path / "model")
    with pytest.raises(ValueError, match="enable_lora: no layer of this model can have an adapter"):
        Engine(model, lora=LoraConfig(enable=True), model_impl="transformers")
