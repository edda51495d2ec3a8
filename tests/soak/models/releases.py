"""Serves released checkpoints, which people run, as small random ones with the entries of their published
``config.json``: sizes are small, and everything else is as published.

Names and values were compared with copies of the ``config.json`` in public repositories for Llama 3.1 and 3.2,
granite-3.1-2b (3.2 has the same class), glm-4-9b-chat-hf and phi-4 (its reasoning release has another theta and
context); Qwen3's follow its class. The others are in ``tests/gpu_worker/checkpoint/test_published_configs.py``.
"""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file

from tests.checkpoints.whisper_checkpoint import WHISPER_CONFIG
from tests.checkpoints.whole_sound import WRITERS, load_sound, write_whole_sound
from tests.gpu_worker.checkpoint.published_configs import CONFIGS
from tests.gpu_worker.checkpoint.quantization import formats
from tests.parity.engine import Engine
from tests.parity.identical import assert_identical
from tests.parity.reference import compute_case, make_gpt_oss_reference
from tests.parity.transcripts import TranscriptEngine, transcript_reference
from tests.parity.vision_checkpoints import load_vision, write_vision
from tests.soak.models.transformers_models import KINDS, NUM_TOKENS, PROMPTS
from tokenloom.engine_core.data.config import EngineConfig, WorkerConfig
from tokenloom.gpu_worker.checkpoint.files.text_part import wrapper_of
from tokenloom.preflight.model import answer
from tokenloom.preflight.small_files import CannotServe

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_LLAMA_3_1: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}
_LLAMA_3_2 = _LLAMA_3_1 | {
    "head_dim": 128,
    "rope_scaling": _LLAMA_3_1["rope_scaling"] | {"factor": 32.0},
    "tie_word_embeddings": True,
}
_GRANITE = {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "attention_bias": False,
    "attention_dropout": 0.1,
    "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "logits_scaling": 8.0,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 49155,
}
_GLM_4 = {
    "architectures": ["GlmForCausalLM"],
    "model_type": "glm",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 13696,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-07,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 151552,
}
_PHI_4_REASONING = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "embd_pdrop": 0.0,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 17920,
    "max_position_embeddings": 32768,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 10,
    "original_max_position_embeddings": 32768,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 500000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 100352,
}
RELEASES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-1.7B": _QWEN3,
    "Qwen/Qwen3-4B": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32},
    "Qwen/Qwen3-8B": _QWEN3 | {"hidden_size": 4096, "num_attention_heads": 32, "tie_word_embeddings": False},
    "meta-llama/Llama-3.1-8B": _LLAMA_3_1,
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_3_1,
    "meta-llama/Llama-3.2-1B": _LLAMA_3_2 | {"head_dim": 64, "hidden_size": 2048, "num_hidden_layers": 16},
    "meta-llama/Llama-3.2-1B-Instruct": _LLAMA_3_2 | {"head_dim": 64, "hidden_size": 2048, "num_hidden_layers": 16},
    "meta-llama/Llama-3.2-3B-Instruct": _LLAMA_3_2 | {"hidden_size": 3072, "num_attention_heads": 24},
    "meta-llama/Llama-3.3-70B-Instruct": _LLAMA_3_1 | {"hidden_size": 8192, "num_attention_heads": 64},
    "ibm-granite/granite-3.2-2b-instruct": _GRANITE,
    "zai-org/glm-4-9b-hf": _GLM_4,
    "microsoft/Phi-4-reasoning": _PHI_4_REASONING,
    **CONFIGS,
}
"""Entries by the release that has them."""
BY_CLASS: dict[str, tuple[str, str]] = {
    "openai/whisper-large-v3": ("WhisperForConditionalGeneration", "whisper"),
    "google/diffusiongemma-26B-A4B-it": ("DiffusionGemmaForBlockDiffusion", "diffusion_gemma"),
    "mistralai/Voxtral-Mini-3B-2507": ("VoxtralForConditionalGeneration", "voxtral"),
    "fixie-ai/ultravox-v0_5-llama-3_2-1b": ("UltravoxModel", "ultravox"),
    "Qwen/Qwen2.5-Omni-7B": ("Qwen2_5OmniModel", "qwen2_5_omni"),
    "Qwen/Qwen3-Omni-30B-A3B-Instruct": ("Qwen3OmniMoeForConditionalGeneration", "qwen3_omni_moe"),
    "ibm-granite/granite-speech-3.3-2b": ("GraniteSpeechForConditionalGeneration", "granite_speech"),
}
"""Releases of which only class and type are known here: the answer is that of their class."""
TRANSCRIBES = ("openai/whisper-large-v3",)
"""Releases that write down speech, which a small checkpoint of their class does here."""
OF_VISION: dict[str, str] = {
    "Qwen/Qwen2-VL-2B-Instruct": "qwen2_vl",
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2_5_vl",
    "Qwen/Qwen3-VL-4B-Instruct": "qwen3_vl",
    "Qwen/Qwen3-VL-30B-A3B-Instruct": "qwen3_vl_moe",
    "Qwen/Qwen3.5-4B": "qwen3_5",
    "Qwen/Qwen3.5-35B-A3B": "qwen3_5_moe",
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": "mistral3",
    "mistralai/Ministral-3-3B-Instruct-2512": "ministral3",
    "llava-hf/llava-1.5-7b-hf": "llava",
    "llava-hf/llava-v1.6-mistral-7b-hf": "llava_next",
    "llava-hf/llava-onevision-qwen2-0.5b-ov-hf": "llava_onevision",
    "google/gemma-3-4b-it": "gemma3",
    "OpenGVLab/InternVL3-1B-hf": "internvl",
    "HuggingFaceTB/SmolVLM-256M-Instruct": "idefics3",
    "HuggingFaceTB/SmolVLM2-256M-Video-Instruct": "smolvlm",
    "CohereLabs/aya-vision-8b": "aya_vision",
    "google/gemma-4-E2B-it": "gemma4_e2b",
    "google/gemma-4-E4B-it": "gemma4_e4b",
    "google/gemma-4-26B-A4B-it": "gemma4_26b_a4b",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "llama4",
    "meta-models/Muse-Glimmer-30B": "muse_glimmer",
    "microsoft/Phi-4-multimodal-instruct": "phi4_multimodal",
    "Qwen/Qwen2-Audio-7B-Instruct": "qwen2_audio",
}
"""Releases that read images or sound, by their kind in ``tests/parity/vision_checkpoints.py`` or
``tests/checkpoints/whole_sound.py``: their text is served."""

_SMALL: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim"), 96),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_hidden_layers", "max_window_layers"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("max_position_embeddings", "vocab_size"), 128),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim", "head_dim"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    "num_attention_heads": 4,
    "sliding_window": 24,
    "query_pre_attn_scalar": 16,
}


def small(entries: dict[str, Any]) -> dict[str, Any]:
    """Return the entries with small sizes and without the dtype, which decides the precision of the comparison."""
    result = {name: _SMALL.get(name, value) if type(value) is int else value for name, value in entries.items()}
    if "num_key_value_heads" in entries:
        result["num_key_value_heads"] = 4 if entries["num_key_value_heads"] == entries["num_attention_heads"] else 2
    for name in ("layer_types", "no_rope_layers"):
        if isinstance(result.get(name), list):
            result[name] = result[name][:2]
    for name in ("rope_scaling", "rope_parameters"):
        rope = result.get(name)
        if isinstance(rope, dict) and "original_max_position_embeddings" in rope:
            result[name] = rope | {"original_max_position_embeddings": 64}
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    drop = ("torch_dtype", "quantization_config", *special)
    return {name: value for name, value in result.items() if name not in drop} | special | {"dtype": "float32"}


class Row(NamedTuple):
    """What became of a release."""

    by: str
    """What computes it; empty: nothing."""
    reason: str
    """Why it is refused, or how it was tried."""


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [32, 32]}
IN_FP8 = ("deepseek-ai/DeepSeek-V3", "moonshotai/Kimi-K2-Instruct")
"""Releases whose matrices are published in FP8, in blocks of 128, which small matrices have not; here they have 32."""
IN_MXFP4 = ("openai/gpt-oss-20b",)
"""Releases whose experts are published in MXFP4."""


def try_all_releases(directory: Path) -> dict[str, Row]:
    """Return what becomes of each release. Raises ``AssertionError`` if tokens are not those of transformers."""
    return {
        **{name: try_release(name, directory) for name in RELEASES},
        **{name: try_vision(name, directory) for name in OF_VISION},
        **{name: ask(name, directory) for name in BY_CLASS},
        **{name: try_transcripts() for name in TRANSCRIBES},
    }


def write_release(name: str, directory: Path) -> tuple[Path, Any]:
    """Write a small checkpoint of one of ``RELEASES``; return its directory and the model."""
    entries = small(RELEASES[name])
    named = entries["model_type"]  # that of Kimi is one of code in the checkpoint
    kind = (
        named if named in KINDS else next(kind for kind, each in KINDS.items() if each == entries["architectures"][0])
    )
    config = transformers.AutoConfig.for_model(**entries | {"model_type": kind})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            parameter.normal_(float(parameter.dim() < 2 and "norm" in each), 0.08, generator=generator)
    path = directory / name.rpartition("/")[2]
    model.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(entries))  # spelled as it is published
    return path, model


def try_release(name: str, directory: Path) -> Row:
    """Serve a small checkpoint of a release. Raises ``AssertionError`` if its tokens are not those of transformers."""
    if name in IN_MXFP4:
        return _try_mxfp4(directory)
    path, model = write_release(name, directory)
    how = "a small checkpoint gives transformers' tokens"
    if name in IN_FP8:
        path, model = _in_fp8(path, model, directory / f"{path.name}-fp8")
        how = "a small checkpoint in FP8 blocks gives the tokens of its weights in transformers"
    cases = [compute_case(model, prompt, NUM_TOKENS, use_cache=False) for prompt in PROMPTS]
    found = answer(path)
    assert_identical(cases, Engine(path, num_blocks=24, budget=16, max_num_seqs=4, max_model_len=64).generate)
    shutil.rmtree(path)
    return Row(found.by, how)


def _in_fp8(path: Path, model: Any, directory: Path) -> tuple[Path, Any]:
    """Write a checkpoint in FP8; return its directory, and the model with the weights that it then has."""
    quantized, plain = formats.write(directory, formats.fp8("block", "scale_inv", 32), FP8, path)
    stored = load_file(quantized / "model.safetensors")
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in stored.values()) > 10, "attention, experts"
    again, report = type(model).from_pretrained(
        plain, config=model.config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return quantized, again.eval()


def _try_mxfp4(directory: Path) -> Row:
    reference = make_gpt_oss_reference(directory)
    found = answer(reference.path)
    engine = Engine(reference.path, stop_token_ids=reference.eos_token_ids, budget=64)
    assert_identical(reference.cases, engine.generate)
    shutil.rmtree(reference.path)
    return Row(found.by, "a small checkpoint with experts in MXFP4 gives the tokens of what transformers unpacks")


def try_transcripts() -> Row:
    """Transcribe with a small Whisper. Raises ``AssertionError`` if its tokens are not those of transformers."""
    reference = transcript_reference()
    found = TranscriptEngine(reference).transcribe(reference.cases)
    assert found == [case.tokens for case in reference.cases]
    by = answer(reference.path).by
    return Row(by, "`/v1/audio/transcriptions`: a small checkpoint gives the tokens of transformers' decoder")


def try_vision(name: str, directory: Path) -> Row:
    """Serve the text of a small checkpoint that reads images or sound. Raises ``AssertionError`` as
    :func:`try_release`."""
    kind = OF_VISION[name]
    write, load = (write_whole_sound, load_sound) if kind in WRITERS else (write_vision, load_vision)
    path = write(kind, directory)
    model = load(path)
    cases = [compute_case(model, prompt, NUM_TOKENS) for prompt in PROMPTS]
    found = answer(path, EngineConfig(worker=WorkerConfig(language_model_only=True)))
    engine = Engine(path, num_blocks=24, budget=16, max_num_seqs=4, max_model_len=64, language_model_only=True)
    assert_identical(cases, engine.generate)
    shutil.rmtree(path)
    return Row(found.by, "`--language-model-only`: a small checkpoint gives transformers' tokens for text")


def ask(name: str, directory: Path) -> Row:
    """Return the answer for the class of a release."""
    architecture, kind = BY_CLASS[name]
    entries = {"architectures": [architecture], "model_type": kind, "dtype": "bfloat16"}
    entries = WHISPER_CONFIG if kind == "whisper" else entries
    (directory / "config.json").write_text(json.dumps(entries))
    try:
        found = answer(directory, EngineConfig(worker=WorkerConfig(language_model_only=kind != "whisper")))
    except CannotServe as refusal:
        return Row("", str(refusal).removeprefix(f"{directory / 'config.json'}: "))
    flag = "`--language-model-only`: " if wrapper_of(entries) else ""
    return Row(found.by, f"{flag}the answer for its class; it was not run")
