"""One function answers for preflight and engine how a checkpoint is served, or why not."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.checkpoints.whisper_checkpoint import WHISPER_CONFIG
from tests.gpu_worker.checkpoint.served_configs import BERT, LLAMA, answer, of
from tests.parity.vision_checkpoints import BY_MODULES, CONFIGS
from tokenloom.engine_core.data.config import (
    CacheConfig,
    EngineConfig,
    LoraConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from tokenloom.gpu_worker.checkpoint import module_types as module
from tokenloom.gpu_worker.checkpoint.model_config import ModelConfig
from tokenloom.gpu_worker.checkpoint.module_types import transformers_types
from tokenloom.gpu_worker.checkpoint.served_how import served_how

GEMMA_4 = LLAMA | {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text"}


def test_nothing_that_takes_seconds_to_import_is_needed() -> None:
    code = (
        "import sys, tokenloom.gpu_worker.checkpoint.served_how\n"
        "sys.exit(bool({'torch', 'transformers', 'numpy', 'safetensors'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("entries", "by"),
    [
        (LLAMA, "built in"),
        (LLAMA | {"architectures": ["BertModel"], "model_type": "bert"}, "encoder"),
        (LLAMA | {"architectures": ["PhiForCausalLM"], "model_type": "phi"}, "transformers"),
        (GEMMA_4 | {"use_bidirectional_attention": "vision"}, "transformers"),
        (GEMMA_4 | {"use_bidirectional_attention": "all"}, "encoder"),
    ],
)
def test_what_computes_a_checkpoint(tmp_path: Path, entries: dict[str, Any], by: str) -> None:
    assert answer(tmp_path, entries).by == by


NO_SLOT = "keeps a state that transformers' cache does not hold"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "RWKV": (of("RwkvForCausalLM", "rwkv"), NO_SLOT),
    "xLSTM": (of("xLSTMForCausalLM", "xlstm"), NO_SLOT),
    "linear attention": (of("MiniMaxForCausalLM", "minimax"), NO_SLOT),
    "a recurrence of its own": (of("RecurrentGemmaForCausalLM", "recurrent_gemma"), "keeps a state that its layers"),
    "Zamba": (of("ZambaForCausalLM", "zamba"), "restarts its state from zero"),
    "own attention": (of("BloomForCausalLM", "bloom"), "computes attention or state by itself"),
    "encoder and decoder": (
        of("T5ForConditionalGeneration", "t5", is_encoder_decoder=True),
        "has an encoder and a decoder, which is not supported: serve a model whose class ends in ForCausalLM",
    ),
    "speech": (of("MoonshineForConditionalGeneration", "moonshine", is_encoder_decoder=True), "has an encoder"),
    "diffusion": (of("DiffusionGemmaForBlockDiffusion", "diffusion_gemma"), "is a diffusion model"),
    "remote code": (of("OddForCausalLM", "odd", auto_map={"AutoModel": "odd.py"}), "is never run"),
    "images": (
        of("LlavaNextForConditionalGeneration", "llava_next"),
        "reads images or sound, which is not supported: serve its text alone with --language-model-only",
    ),
    "other images": (of("MllamaForConditionalGeneration", "mllama"), "reads images or sound"),
    "sound and speech": (of("Qwen2_5OmniModel", "qwen2_5_omni"), "it reads images, sound and video, and speaks"),
    "other sound": (of("UltravoxModel", "ultravox"), "it reads sound"),
    "Voxtral": (of("VoxtralForConditionalGeneration", "voxtral"), "written by the package mistral-common alone"),
    "a method": (LLAMA | {"quantization_config": {"quant_method": "exl3"}}, "'exl3' is not supported"),
    "a rope": (
        LLAMA | {"rope_scaling": {"rope_type": "odd", "factor": 2.0}},
        "rope_type 'odd' is not supported: must be one of",
    ),
    "a rope of an encoder": (of("EuroBertModel", "eurobert", rope_scaling={"type": "odd"}), "rope_type 'odd' is not"),
    "an activation of an encoder": (of("MPNetModel", "mpnet", hidden_act="odd"), "hidden_act 'odd' is not supported"),
    "an activation": (LLAMA | {"hidden_act": "odd"}, "hidden_act 'odd' is not supported: must be one of"),
    "a kind of layer": (
        of("Qwen3ForCausalLM", "qwen3", layer_types=["conv", "conv"]),
        "layer_types may only hold full_attention and sliding_attention",
    ),
    "a null of a class that wants a number": (
        of("NomicBertModel", "nomic_bert", pad_token_id=None),
        "pad_token_id must be int for the model type nomic_bert, found null",
    ),
    "a switch that is a number": (
        of("T5EncoderModel", "t5", is_decoder=1),
        "is_decoder must be bool for the model type t5, found 1",
    ),
    "an entry under its other name": (
        of("GPTJForCausalLM", "gptj", num_hidden_layers="2"),
        'num_hidden_layers must be int for the model type gptj, found "2"',
    ),
    "heads of a class of transformers": (
        of("ArceeForCausalLM", "arcee", num_attention_heads=5, num_key_value_heads=5),
        "hidden_size 16 must be a multiple of num_attention_heads 5",
    ),
    "heads of the modules of a class": (
        of("MoshiForCausalLM", "moshi", num_attention_heads=5, num_key_value_heads=5),
        "hidden_size 16 must be a multiple of num_attention_heads 5",
    ),
    "KV heads that are a list": (
        of("PhiForCausalLM", "phi", num_key_value_heads=[2]),
        r"num_key_value_heads must be int or null for the model type phi, found \[2\]",
    ),
    "layers that are not counted": (
        of("Cohere2ForCausalLM", "cohere2", layer_types=["full_attention"]),
        "layer_types must name a kind for each of 2 layers",
    ),
    "layers that GPT-Neo counts in another entry": (
        of("GPTNeoModel", "gpt_neo", layer_types=[], attention_types=[[["global", "local"], 1]]),
        r"layer_types must name a kind for each of 2 layers, found \[\]",
    ),
    "a size that a class computes": (
        of("MobileBertModel", "mobilebert", true_hidden_size=0.5),
        "true_hidden_size must be int for the model type mobilebert, found 0.5",
    ),
    "no size that a class computes": (
        of("MobileBertModel", "mobilebert", true_hidden_size=0),
        "true_hidden_size must be a positive integer, found 0",
    ),
    "a quantization that is no object": (
        of("PhiForCausalLM", "phi", quantization_config=False),
        "quantization_config must be an object, found false",
    ),
    "a dtype that PyTorch lacks": (of("MPNetModel", "mpnet", dtype=[]), "dtype must name a dtype of PyTorch"),
    "no heads": (of("PhiForCausalLM", "phi", num_attention_heads=0), "num_attention_heads must be a positive integer"),
    "an activation that only some classes read": (
        of("OPTModel", "opt", activation_function="odd"),
        "activation_function 'odd' is not supported",
    ),
    "text inside": (
        of("Emu3ForCausalLM", "emu3", text_config={"model_type": "emu3_text_model", "rms_norm_eps": 1}),
        "text_config: rms_norm_eps must be float",
    ),
    "heads": (LLAMA | {"num_attention_heads": 3, "num_key_value_heads": 2}, "num_key_value_heads must divide"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_named_with_its_file(tmp_path: Path, name: str) -> None:
    entries, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason) as refused:
        answer(tmp_path, entries)
    assert str(tmp_path / "model" / "config.json") in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("name", "kind"), [("MPNetModel", "mpnet"), ("GPTNeoXForCausalLM", "gpt_neox")])
def test_a_dtype_that_is_not_computed_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    with pytest.raises(ValueError, match="dtype float8_e4m3fn is not supported"):
        answer(tmp_path, of(name, kind, dtype="float8_e4m3fn"))


@pytest.mark.parametrize("name", ["BertModel", "LlamaForSequenceClassification", "Qwen3Model"])
def test_a_model_without_text_generates_none(tmp_path: Path, name: str) -> None:
    assert answer(tmp_path, LLAMA | {"architectures": [name]}).by in ("built in", "encoder")
    with pytest.raises(ValueError, match="runner is generate, but this model generates no text"):
        answer(tmp_path, LLAMA | {"architectures": [name]}, runner="generate")


WITHOUT_IMAGES = ("llava_next", "aya_vision", "llama4", "muse_glimmer", "phi4_multimodal")


def test_modules_take_no_images_that_turn_or_add_levels(tmp_path: Path) -> None:
    for kind in ("qwen2_5_vl", "qwen3_vl_moe"):
        with pytest.raises(ValueError, match=r"those of its text take no images: .* --language-model-only"):
            answer(tmp_path, CONFIGS[kind], model_impl="transformers")
        answer(tmp_path, CONFIGS[kind], model_impl="transformers", language_model_only=True)
    answer(tmp_path, CONFIGS["gemma3"], model_impl="transformers")


def test_images_that_are_seen_whole_are_not_spread_over_ranks(tmp_path: Path) -> None:
    parallel = ParallelConfig(tensor_parallel_size=2, decode_context_parallel_size=2)
    with pytest.raises(ValueError, match="lets tokens of an image see later ones, which is not supported with decode_"):
        answer(tmp_path, CONFIGS["gemma3"], parallel=parallel)
    answer(tmp_path, CONFIGS["gemma3"], parallel=parallel, language_model_only=True)
    answer(tmp_path, CONFIGS["llava"], parallel=parallel)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_text_of_a_model_that_reads_images_is_served(tmp_path: Path, kind: str) -> None:
    found = answer(tmp_path, CONFIGS[kind], language_model_only=True)
    assert (found.by, found.is_tried) == ("transformers" if kind in BY_MODULES else "built in", True)
    assert (found.lack is not None) == (kind == "phi4_multimodal")  # the built-in class lacks partly rotated heads
    if kind in WITHOUT_IMAGES:
        with pytest.raises(ValueError, match=f"{CONFIGS[kind]['architectures'][0]} reads images"):
            answer(tmp_path, CONFIGS[kind])
    else:
        assert answer(tmp_path, CONFIGS[kind]).by == found.by
    if kind in BY_MODULES:
        return
    with pytest.raises(ValueError, match="not supported: odd_feature = 1"):
        answer(tmp_path, CONFIGS[kind] | {"odd_feature": 1}, language_model_only=True)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ([], "config.json: text_config must be an object"),
        ({"model_type": "odd"}, "config.json: text_config: architectures must name the model's class"),
        ({"model_type": "rwkv"}, "RwkvForCausalLM is not supported: it keeps a state"),
        ({"model_type": "mistral", "odd_feature": 1}, "config.json: not supported: odd_feature = 1"),
    ],
)
def test_a_text_that_cannot_be_served_is_named(tmp_path: Path, text: object, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        answer(tmp_path, CONFIGS["mistral3"] | {"text_config": text}, language_model_only=True)


@pytest.mark.parametrize(
    ("name", "kind", "layers"),
    [
        ("LlamaForCausalLM", "llama", "num_hidden_layers"),
        ("Llama4ForCausalLM", "llama4_text", "num_hidden_layers"),
        ("GPT2LMHeadModel", "gpt2", "n_layer"),
        ("BertModel", "bert", "num_hidden_layers"),
        ("PhiForCausalLM", "phi", "num_hidden_layers"),
    ],
)
def test_more_layers_than_any_model_has_are_refused(tmp_path: Path, name: str, kind: str, layers: str) -> None:
    """A list with an entry for each, as was made, takes all memory."""
    entries = LLAMA | {"architectures": [name], "model_type": kind, "n_embd": 16, "n_head": 2, "n_positions": 64}
    with pytest.raises(ValueError, match=rf"config\.json: {layers} must be at most 10000, found 20000000"):
        answer(tmp_path, entries | {layers: 20_000_000})


def test_int8_kv_is_refused_where_layers_have_different_heads(tmp_path: Path) -> None:
    text = CONFIGS["gemma4_26b_a4b"]["text_config"]
    with pytest.raises(ValueError, match="kv_cache_dtype: int8 is not supported for layers with different numbers"):
        answer(tmp_path, text, cache=CacheConfig(dtype="int8"))
    answer(tmp_path, text | {"attention_k_eq_v": False}, cache=CacheConfig(dtype="int8"))


def test_blocks_end_where_chunks_of_attention_end(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="block_size: 48 tokens do not divide the model's attention chunks of 64"):
        answer(tmp_path, CONFIGS["llama4"], cache=CacheConfig(block_size=48), language_model_only=True)


TWO = ParallelConfig(tensor_parallel_size=2)
ENCODERS: dict[str, tuple[dict[str, Any], ParallelConfig, str]] = {
    "heads": (BERT, ParallelConfig(tensor_parallel_size=3), "3 does not divide the model's 4 attention heads"),
    "rows": (BERT, ParallelConfig(tensor_parallel_size=4), "4 does not divide the model's 6 rows of an MLP"),
    "stages": (BERT, ParallelConfig(pipeline_parallel_size=3), "3 stages for 2 layers"),
    "context": (
        BERT,
        ParallelConfig(tensor_parallel_size=2, decode_context_parallel_size=2),
        "decode_context_parallel_size: an encoder keeps no KV to spread",
    ),
    "experts": (
        BERT,
        ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=True),
        "enable_expert_parallel: an encoder has no experts",
    ),
    "modules": (of("MPNetModel", "mpnet"), TWO, "transformers' modules, which compute MPNetModel, are not divided"),
    "a table": (of("StaticModel", "model2vec"), TWO, "StaticModel is a table of vectors, without layers to divide"),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_what_of_an_encoder_is_not_divided_is_named(tmp_path: Path, name: str) -> None:
    entries, parallel, reason = ENCODERS[name]
    with pytest.raises(ValueError, match=reason):
        answer(tmp_path, entries, parallel=parallel)


LATE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "drafts of an encoder": (
        BERT,
        {"speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=2)},
        "do not set speculative_config",
    ),
    "states of an encoder": (
        BERT,
        {"cache": CacheConfig(state_memory_bytes=1 << 24)},
        "do not set state_memory_bytes",
    ),
    "states of modules": (
        of("PhiForCausalLM", "phi"),
        {"cache": CacheConfig(state_memory_bytes=1 << 24)},
        "state_memory_bytes: no layer of this model keeps a state",
    ),
    "whole prompts": (
        LLAMA | {"max_position_embeddings": 4096},
        {"scheduler": SchedulerConfig(enable_chunked_prefill=False)},
        r"max_num_batched_tokens \(2048\) must reach max_model_len \(4096\)",
    ),
    "whole prompts of modules": (
        of("PhiForCausalLM", "phi") | {"max_position_embeddings": 4096},
        {"scheduler": SchedulerConfig(enable_chunked_prefill=False)},
        r"must reach max_model_len \(4096\)",
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_what_the_engine_refused_only_after_its_weights_were_loaded(tmp_path: Path, name: str) -> None:
    entries, options, reason = LATE[name]
    with pytest.raises(ValueError, match=reason):
        answer(tmp_path, entries, **options)


GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4}
GPT2 |= {"n_positions": 64, "vocab_size": 100, "torch_dtype": "float32"}


@pytest.mark.parametrize("entries", [BERT, of("MPNetModel", "mpnet"), GPT2])
def test_adapters_of_models_that_can_have_none_are_refused_before_a_start(
    tmp_path: Path, entries: dict[str, Any]
) -> None:
    answer(tmp_path, entries)
    with pytest.raises(ValueError, match="enable_lora: no layer of this model can have an adapter"):
        answer(tmp_path, entries, lora=LoraConfig(enable=True))


def test_another_version_of_transformers_is_untried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.metadata, "version", lambda name: "99.0")
    module.transformers_types.cache_clear()
    try:
        found = answer(tmp_path, of("BloomForCausalLM", "bloom"))
        # The class may read the entry, or may not: the engine asks it.
        lacking = answer(tmp_path, LLAMA | {"partial_rotary_factor": 0.5})
    finally:
        module.transformers_types.cache_clear()
    assert (found.by, found.is_tried) == ("transformers", False)
    assert (lacking.by, lacking.is_tried, lacking.lack is not None) == ("transformers", False, True)


@pytest.mark.parametrize(
    ("name", "kind", "length"), [("NomicBertModel", "nomic_bert", 64), ("MPNetModel", "mpnet", 62)]
)
def test_the_context_of_an_encoder_is_a_limit(tmp_path: Path, name: str, kind: str, length: int) -> None:
    entries = of(name, kind, pad_token_id=1)
    assert answer(tmp_path, entries, max_model_len=length).by == "encoder"
    with pytest.raises(ValueError, match=f"the model's context has {length} tokens"):
        answer(tmp_path, entries, max_model_len=length + 1)


def test_a_context_is_a_limit_where_the_class_stretches_by_default(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    with pytest.raises(ValueError, match="the model's context has 64 tokens"):
        answer(tmp_path, of("Apertus1p5TextForCausalLM", "apertus1p5_text", rope_parameters=rope), max_model_len=65)


def test_an_empty_quantization_asks_for_nothing(tmp_path: Path) -> None:
    assert answer(tmp_path, of("MPNetModel", "mpnet", quantization_config={})).by == "encoder"


def test_a_switch_may_be_refused_in_a_type_that_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    types = transformers_types() | {"unless": {"phi": [["odd", True, "looks ahead"]]}}
    monkeypatch.setattr(module, "transformers_types", lambda: types)
    assert answer(tmp_path, of("PhiForCausalLM", "phi", odd=False)).is_tried
    with pytest.raises(ValueError, match="it has odd = true, with which it looks ahead"):
        answer(tmp_path, of("PhiForCausalLM", "phi", odd=True))


def test_what_excludes_sounds_beside_prompts_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(WHISPER_CONFIG))
    worker = WorkerConfig(model=str(path))
    found = served_how(EngineConfig(worker=worker), has_gpu=False)
    assert isinstance(found.config, ModelConfig)
    assert found.config.cross_rows == 1500
    with pytest.raises(ValueError, match="choose --device cpu"):
        served_how(EngineConfig(worker=worker), has_gpu=True)
    served_how(EngineConfig(worker=replace(worker, device="cpu")), has_gpu=True)
    with pytest.raises(ValueError, match="writes down the sound beside each prompt; do not set enable_lora"):
        served_how(EngineConfig(worker=worker, lora=LoraConfig(enable=True)), has_gpu=False)
    (path / "config.json").write_text(json.dumps(WHISPER_CONFIG | {"max_source_positions": 100}))
    with pytest.raises(ValueError, match="max_source_positions must be at least max_target_positions = 448"):
        served_how(EngineConfig(worker=worker), has_gpu=False)
