"""The text of models that read images is that of transformers' whole classes, from files as they are published."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.gpu_worker.checkpoint.quantization import formats
from tests.gpu_worker.checkpoint.quantization.formats import Quantize
from tests.gpu_worker.checkpoint.quantization.test_schemes import float_config, packed_config
from tests.gpu_worker.lora.random_adapter import merge, save_adapter
from tests.parity.engine import Engine
from tests.parity.identical import assert_identical
from tests.parity.reference import SMALL_CONFIGS, compute_case, save_random, small_prompts
from tests.parity.vision_checkpoints import CONFIGS, load_vision, quantize_experts, write_vision
from tokenloom.engine_core.data.config import LoraConfig
from tokenloom.gpu_worker.checkpoint.served_how import choose


@pytest.mark.parametrize("kind", CONFIGS)
def test_text_alone_gives_the_tokens_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    path = write_vision(kind, tmp_path)
    model = load_vision(path)
    cases = [compute_case(model, prompt) for prompt in small_prompts(503)]
    assert len({tuple(case.tokens) for case in cases}) >= len(cases) - 2
    engine = Engine(path, language_model_only=True, budget=64, num_blocks=400, prefix_caching=True)
    assert_identical(cases, engine.generate)
    hits = engine.stats.prefix_cache_hits
    assert_identical(cases, engine.generate)
    assert engine.stats.prefix_cache_hits > hits


@pytest.mark.parametrize(("kind", "text"), [("internvl", "qwen3_moe"), ("internvl", "gpt_oss"), ("llava", "gemma2")])
def test_the_type_of_the_text_decides_what_computes_it(kind: str, text: str, tmp_path: Path) -> None:
    entries = save_random(text, tmp_path, **SMALL_CONFIGS[text]) / "config.json"
    text_config = json.loads(entries.read_text())
    del text_config["tie_word_embeddings"]  # the class of Gemma 2 ties by default, as that of LLaVA then does
    path = write_vision(kind, tmp_path, text_config=text_config, tie_word_embeddings=False)
    model = load_vision(path)
    cases = [compute_case(model, prompt) for prompt in small_prompts(503, 64)]
    assert_identical(cases, Engine(path, language_model_only=True).generate)


def test_experts_are_read_as_transformers_5_saves_them(tmp_path: Path) -> None:
    model = load_vision(write_vision("qwen3_vl_moe", tmp_path / "published"))
    model.save_pretrained(tmp_path / "saved")
    cases = [compute_case(model, prompt) for prompt in small_prompts(503)]
    assert choose(tmp_path / "saved", "float32").by == "built in"  # though it says num_local_experts
    assert_identical(cases, Engine(tmp_path / "saved", language_model_only=True).generate)


def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    path = write_vision("llava", tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"language_model.model.odd.weight": torch.ones(2)}, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"unsupported feature: model\.odd\.weight"):
        Engine(path, language_model_only=True)


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl_moe"])
def test_modules_compute_the_text_too(kind: str, tmp_path: Path) -> None:
    path = write_vision(kind, tmp_path)
    model = load_vision(path)
    cases = [compute_case(model, prompt) for prompt in small_prompts(503, 64)]
    engine = Engine(path, language_model_only=True, model_impl="transformers", max_num_seqs=4, num_blocks=100)
    assert_identical(cases, engine.generate)


_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [32, 32]}
_AWQ = {
    "bits": 4,
    "group_size": 32,
    "modules_to_not_convert": ["visual"],
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
_W4A16 = packed_config(symmetric=True)
_FP8_DYNAMIC = float_config("channel")
_FP8_STATIC = {
    "activation_scheme": "static",
    "dequantize": False,
    "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    "quant_method": "fp8",
    "weight_block_size": None,
}
_IGNORED = ["re:.*lm_head", "re:visual.*", "re:vision_tower.*", "re:multi_modal_projector.*"]
# Entries and names of parts: Qwen2.5-VL-32B-Instruct-AWQ, Qwen3-VL-4B-Instruct-FP8,
# RedHatAI/Mistral-Small-3.1-24B-Instruct-2503-FP8-dynamic, RedHatAI/gemma-3-4b-it-quantized.w4a16 and
# Ministral-3-3B-Instruct-2512.
QUANTIZED: dict[str, tuple[str, Quantize, dict[str, Any]]] = {
    "AWQ": ("qwen2_5_vl", formats.awq(32), _AWQ),
    "FP8 blocks": ("qwen3_vl", formats.fp8("block", "scale_inv", 32), _FP8),
    "FP8 channels": ("mistral3", formats.fp8("channel"), _FP8_DYNAMIC | {"ignore": _IGNORED}),
    "W4A16": ("gemma3", formats.w4a16(32, symmetric=True), _W4A16 | {"ignore": _IGNORED}),
    "FP8 static": ("ministral3", formats.fp8("tensor", "scale_inv", activation_scale=torch.tensor(1.0)), _FP8_STATIC),
}
TOWERS = ("visual.", "model.visual.", "vision_tower.", "multi_modal_projector.")


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_text_gives_the_tokens_of_its_weights(name: str, tmp_path: Path) -> None:
    kind, quantize, config = QUANTIZED[name]
    source = write_vision(kind, tmp_path)
    quantized, plain = formats.write(tmp_path / "files", quantize, config, source, TOWERS)
    model = load_vision(plain)
    cases = [compute_case(model, prompt) for prompt in small_prompts(503, 128)]
    assert_identical(cases, Engine(quantized, language_model_only=True).generate)


def test_experts_of_one_tensor_may_be_quantized(tmp_path: Path) -> None:
    quantized, plain = quantize_experts(write_vision("qwen3_vl_moe", tmp_path))
    model = load_vision(plain)
    cases = [compute_case(model, prompt) for prompt in small_prompts(503, 128)]
    assert_identical(cases, Engine(quantized, language_model_only=True).generate)


@pytest.mark.parametrize("kind", ["qwen3_vl", "llava"])
def test_an_adapter_of_the_whole_model_changes_its_text(kind: str, tmp_path: Path) -> None:
    path = write_vision(kind, tmp_path)
    adapter = save_adapter(tmp_path / "adapter", path)
    model = load_vision(merge(path, adapter, tmp_path / "merged"))
    cases = [compute_case(model, prompt) for prompt in small_prompts(503, 64)]
    lora = LoraConfig(enable=True, max_loras=1, modules=(f"one={adapter}",))
    engine = Engine(path, language_model_only=True, lora=lora)
    (state,) = engine.core.adapters.answer().adapters  # type: ignore[union-attr]

    def generate(prompts: Sequence[list[int]], max_tokens: Sequence[int]) -> list[list[int]]:
        return engine.generate(prompts, max_tokens, adapters=[state.digest] * len(prompts))

    assert_identical(cases, generate)
