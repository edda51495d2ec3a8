"""Several ranks compute transformers' modules, divided by the plans of their classes, with the tokens of one rank."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import transformers
from torch import nn

from tests.gpu_worker.parallel.rank_threads import RankThreads, parallel
from tests.parity.engine import Engine
from tests.parity.ranks.test_ranks_mp import in_processes
from tests.parity.reference import SMALL_CONFIGS, save_random
from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.gpu_worker.model_slot import tensors_of
from tokenloom.gpu_worker.models.transformers import division
from tokenloom.gpu_worker.models.transformers.paged_attention import UnservableModel
from tokenloom.gpu_worker.models.transformers.transformers_model import TransformersModel
from tokenloom.gpu_worker.parallel.sharding import RankPlace

VOCAB = 503
LENGTHS = (1, 17, 70)
LIMITS = [12] * len(LENGTHS)
SHAPES = [(2, 1), (1, 2), (2, 2)]
WITH_CONTEXT = [*SHAPES, (2, 1, 2), (2, 2, 2)]
"""The last two spread the tokens of each block over the tensor parallel ranks."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": SMALL_CONFIGS["qwen2"],
    "qwen3": SMALL_CONFIGS["qwen3"],
    "gemma2": SMALL_CONFIGS["gemma2"],
    "gemma3_text": SMALL_CONFIGS["gemma3_text"],
    "olmo2": {},
    "phi3": {"pad_token_id": 0, "sliding_window": 60},
    "phi": {},
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "pad_token_id": 0},
    "glm4": {"head_dim": 16, "pad_token_id": 0},
    "starcoder2": {"sliding_window": None},
    "gpt_neox": {},
    "mixtral": SMALL_CONFIGS["mixtral"],
    "qwen3_moe": SMALL_CONFIGS["qwen3_moe"],
    "deepseek_v3": SMALL_CONFIGS["deepseek_v3"],
}


def prompts() -> list[list[int]]:
    generator = np.random.default_rng(5)
    return [generator.integers(3, VOCAB, length).tolist() for length in LENGTHS]


def make(path: Path, shape: tuple[int, ...] = (1, 1), **options: Any) -> Engine:
    options = {"budget": 64, "num_blocks": 80, "model_impl": "transformers", **options}
    if shape == (1, 1):
        return Engine(path, **options)
    directory = path / "-".join(map(str, shape))
    directory.mkdir(exist_ok=True)

    def executor(config: EngineConfig) -> Executor:
        return RankThreads(config, directory)

    return Engine(path, **{"executor": executor, "parallel": parallel(*shape), **options})


def check(path: Path, shapes: Sequence[tuple[int, ...]], **options: Any) -> None:
    alone = make(path, **options)
    expected = alone.generate(prompts(), LIMITS)
    drawn = {"temperature": 1.0, "top_p": 0.9}
    seeded = alone.generate(prompts(), LIMITS, **drawn)
    for shape in shapes:
        engine = make(path, shape, **options)
        assert engine.generate(prompts(), LIMITS) == expected
        assert engine.generate(prompts(), LIMITS, **drawn) == seeded
        engine.core.shutdown()


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_one_rank(name: str, tmp_path: Path) -> None:
    shapes = [shape for shape in WITH_CONTEXT if shape[1] == 1] if name == "granite" else WITH_CONTEXT
    check(save_random(name, tmp_path, **MODELS[name]), shapes)


def test_a_body_that_changes_hidden_states_is_refused_by_name(tmp_path: Path) -> None:
    path = save_random("granite", tmp_path, **MODELS["granite"])
    with pytest.raises(ValueError, match=r"config\.json: GraniteForCausalLM has no stages: its body changes hidden"):
        make(path, (1, 2))


@pytest.mark.parametrize("quantization", ["int8-dynamic", "int4"])
def test_weights_that_are_rounded_at_load(quantization: Any, tmp_path: Path) -> None:
    path = save_random("qwen3", tmp_path, head_dim=32, intermediate_size=128)
    check(path, SHAPES[:1], quantization=quantization)


def models_of(engine: Engine) -> list[TransformersModel]:
    executor: Any = engine.core.executor
    workers = executor.workers if isinstance(executor, RankThreads) else [executor._worker]
    models = [worker._slot.model for worker in workers]
    assert all(isinstance(model, TransformersModel) for model in models)
    return models


def test_spread_tokens_are_rounded_and_found_again(tmp_path: Path) -> None:
    path = save_random("qwen3", tmp_path, head_dim=32)
    options: dict[str, Any] = {"kv_cache_dtype": "int8", "num_blocks": 9, "max_model_len": 96, "prefix_caching": True}
    expected = make(path, **options).generate(prompts(), LIMITS)
    engine = make(path, (2, 1, 2), **options)
    for hits in (False, True):
        assert engine.generate(prompts(), LIMITS) == expected
        assert (engine.stats.prefix_cache_hits > 0) is hits
    (first, *_) = models_of(engine)
    assert first.config.shard.spreads_context
    engine.core.shutdown()


@pytest.mark.parametrize("name", ["qwen3", "phi3", "mixtral"])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_rank_has_its_part_of_the_layers(name: str, shape: tuple[int, int], tmp_path: Path) -> None:
    path = save_random(name, tmp_path, **MODELS[name] | {"hidden_size": 256, "intermediate_size": 512})
    (whole,) = (layer_bytes(model) for model in models_of(make(path)))
    engine = make(path, shape)
    parts = [layer_bytes(model) for model in models_of(engine)]
    engine.core.shutdown()
    assert all(0.95 <= part * len(parts) / whole <= 1.1 for part in parts), (whole, parts)


def layer_bytes(model: TransformersModel) -> int:
    """Return the bytes of the layers, without embeddings and output layer."""
    return sum(each.nbytes for each in tensors_of(model._parts.body.layers) if VOCAB not in each.shape)


def test_other_weights_take_the_place_of_a_rank_s(tmp_path: Path) -> None:
    path, other = (
        save_random("qwen3", tmp_path / each, head_dim=24, rms_norm_eps=eps) for each, eps in (("a", 1e-6), ("b", 1e-6))
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(other)
    model.model.layers[0].mlp.down_proj.weight.data.neg_()
    model.save_pretrained(other)
    expected = make(other).generate(prompts(), LIMITS)
    engine = make(path, (2, 2))
    assert engine.generate(prompts(), LIMITS) != expected
    engine.core.executor.collective_rpc("reload_weights", str(other))
    assert engine.generate(prompts(), LIMITS) == expected
    engine.core.shutdown()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_processes_give_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    path = save_random(name, tmp_path, **MODELS[name])
    expected = make(path).generate(prompts(), LIMITS)
    engine = make(path, (2, 2), executor=in_processes)
    assert engine.generate(prompts(), LIMITS) == expected
    engine.core.shutdown()


class Body(nn.Module):
    """Has layers and a plan, and multiplies hidden states before them."""

    pp_plan: ClassVar = {"layers": (["hidden_states"], ["hidden_states"]), "norm": (["x"], ["x"])}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.norm = nn.LayerNorm(8)

    def forward(self, inputs_embeds: Any, **_: Any) -> Any:
        hidden = inputs_embeds * 2
        for layer in self.layers:
            hidden = layer(hidden)
        return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=self.norm(hidden))


def test_a_body_that_changes_hidden_states_itself_has_no_stages() -> None:
    with pytest.raises(UnservableModel, match="changes hidden states outside its layers"):
        division.divide_stages(Body(), RankPlace(0, 1, 1, 2), 8)


@pytest.mark.parametrize(
    ("plan", "lack"),
    [
        ({}, "has no tensor-parallel plan"),
        ({"embed_tokens": "embedding_rowwise"}, "has no tensor-parallel plan"),
        ({"layers.*.o": "rowwise", "layers.*.kv": "mla_kv_a_proj"}, "a tensor-parallel plan with mla_kv_a_proj"),
        ({"layers.*.o": "rowwise", "layers.*.q": "colwise"}, ""),
    ],
)
def test_plans_that_do_not_say_how(plan: dict[str, str], lack: str) -> None:
    found = division.plan_lack(plan)
    assert found.startswith(lack) if not lack else lack in found
    assert bool(found) == bool(lack)


REFUSED: dict[str, tuple[dict[str, Any], tuple[int, int], str]] = {
    "gpt2": (SMALL_CONFIGS["gpt2"], (2, 1), "GPT2LMHeadModel has no tensor-parallel plan in transformers"),
    "olmoe": ({"num_experts": 4, "num_experts_per_tok": 2}, (1, 2), "OlmoeForCausalLM has no pipeline plan"),
    "llama": ({}, (4, 1), "tensor_parallel_size 4 does not divide num_key_value_heads 2"),
    "mamba": ({"state_size": 8}, (2, 1), "MambaForCausalLM keeps a state between tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_plan_is_refused_before_weights_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries, shape, reason = REFUSED[name]
    path = save_random(name, tmp_path, **entries)

    def read(*_: object) -> None:
        pytest.fail("weights were read")

    monkeypatch.setattr(TransformersModel, "_load", read)
    with pytest.raises(ValueError, match=reason):
        make(path, shape)


def test_the_engine_itself_refuses_what_the_table_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_random("llama", tmp_path)
    monkeypatch.setattr("tokenloom.gpu_worker.checkpoint.module_types.transformers_types", lambda: None)
    with pytest.raises(
        ValueError, match=r"has 2 heads in model\.layers\.0\.self_attn\.k_proj, which .* does not divide"
    ):
        make(path, (4, 1))
