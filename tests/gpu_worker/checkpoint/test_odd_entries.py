"""An entry of ``config.json`` with a value of another kind, or out of all bounds, is read or refused by name.

A damaged file, or one that a script wrote, must not end a check before the start in a traceback.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_worker.checkpoint.published_configs import CONFIGS
from tokenloom.engine_core.data.config import EngineConfig, WorkerConfig
from tokenloom.gpu_worker.checkpoint.files.config_reader import NoWeights
from tokenloom.gpu_worker.checkpoint.served_how import served_how

_NUMBERS = (0, -1, 1, 0.5, 1e308, float("inf"), float("nan"), 2**70, 10**400)
VALUES: tuple[Any, ...] = (None, True, False, "x", "", *_NUMBERS, [], {}, [1], {"a": 1}, [None], ["x"], [[]], [{}])
ROPES: tuple[dict[str, Any], ...] = (
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 1024,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "attention_factor": 1.0,
        "truncate": False,
        "rope_theta": 1e4,
    },
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "dynamic", "factor": 2.0},
    {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "original_max_position_embeddings": 64},
    {"full_attention": {"rope_type": "linear", "factor": 2.0}, "sliding_attention": {"rope_type": "default"}},
)
_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": None}
QUANTIZED: tuple[dict[str, Any], ...] = (
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "checkpoint_format": "gptq"},
    {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
    {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS, "input_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    },
)
FAMILIES = ("microsoft/Phi-3-mini-4k-instruct", "google/gemma-3-1b-it", "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-20b")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "float32",
    "id2label": {"0": "a"},
    "layer_types": ["full_attention"] * 2,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "text_config": None,
    "vision_config": {"deepstack_visual_indexes": [1]},
    "quantization_config": None,
}
OTHERS = {
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "phi": "PhiForCausalLM",
    "bert": "BertForSequenceClassification",
    "mpnet": "MPNetModel",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


def places(entries: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each entry, also of those in objects."""
    for name, value in entries.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from places(value, (*path, name))


def flipped(entries: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the entries with each value at each place."""
    text = json.dumps(entries)
    for *path, name in places(entries):
        for value in VALUES:
            changed = inner = json.loads(text)
            for each in path:
                inner = inner[each]
            inner[name] = value
            yield changed


def reason(path: Path, entries: Mapping[str, Any], *, text_alone: bool) -> str:
    """Return why a configuration is refused; empty: it is not. Raises what is no refusal."""
    (path / "config.json").write_text(json.dumps(entries))
    config = EngineConfig(worker=WorkerConfig(model=str(path), language_model_only=text_alone))
    try:
        served_how(config, has_gpu=False)
    except NoWeights:
        return ""  # they say the dtype if no entry does
    except ValueError as error:
        return str(error)
    return ""


def refused(path: Path, configs: Iterable[Mapping[str, Any]], *, text_alone: bool = False) -> int:
    """Return how many of the configurations are refused, each in one line."""
    reasons = [found for each in configs if (found := reason(path, each, text_alone=text_alone))]
    assert not any("\n" in found for found in reasons)
    return len(reasons)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("entry", ["rope_scaling", "rope_parameters"])
def test_parameters_of_ropes(name: str, entry: str, tmp_path: Path) -> None:
    for rope in ROPES:
        changed = (CONFIGS[name] | {"rope_scaling": None, entry: each} for each in flipped(rope))
        assert refused(tmp_path, changed) > 0


@pytest.mark.parametrize("method", range(len(QUANTIZED)), ids=[each["quant_method"] for each in QUANTIZED])
def test_entries_of_quantized_files(method: int, tmp_path: Path) -> None:
    entries = SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_scaling": None}
    assert refused(tmp_path, flipped(entries | {"quantization_config": QUANTIZED[method]})) > 50


@pytest.mark.parametrize("kind", OTHERS)
def test_entries_of_other_kinds_of_models(kind: str, tmp_path: Path) -> None:
    entries = SIZES | {"architectures": [OTHERS[kind]], "model_type": kind}
    assert refused(tmp_path, flipped(entries)) > 50
    if kind.startswith("qwen"):
        nested = entries | {"text_config": SIZES | {"model_type": f"{kind}_text"}}
        for text_alone in (False, True):
            assert refused(tmp_path, flipped(nested), text_alone=text_alone) > 50
