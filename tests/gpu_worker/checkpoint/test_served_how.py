"""One function answers for preflight and engine how a checkpoint is served, or why not."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.checkpoints.whisper_checkpoint import WHISPER_CONFIG
from tests.gpu_worker.checkpoint.published_configs import CONFIGS as PUBLISHED
from tests.gpu_worker.checkpoint.published_configs import LLAMA_4_SCOUT
from tests.parity.vision_checkpoints import BY_MODULES, CONFIGS
from tokenloom.engine_core.data.config import (
    CacheConfig,
    EngineConfig,
    KVConfig,
    LoraConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from tokenloom.gpu_worker.checkpoint import module_types as module
from tokenloom.gpu_worker.checkpoint.local_config import LIBRARIES, AttentionLibrary
from tokenloom.gpu_worker.checkpoint.model_config import ModelConfig
from tokenloom.gpu_worker.checkpoint.module_types import transformers_types
from tokenloom.gpu_worker.checkpoint.served_how import ServedHow, served_how

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}

GEMMA_4 = LLAMA | {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text"}


def write(path: Path, entries: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(entries))
    return path


def answer(path: Path, entries: dict[str, Any], *, has_gpu: bool = False, **options: Any) -> ServedHow:
    worker = {name: options.pop(name) for name in WorkerConfig.__struct_fields__ if name in options}
    config = EngineConfig(worker=WorkerConfig(model=str(write(path / "model", entries)), **worker), **options)
    return served_how(config, has_gpu=has_gpu)


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


def of(name: str, kind: str, **entries: Any) -> dict[str, Any]:
    return LLAMA | {"architectures": [name], "model_type": kind} | entries


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


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "device": ({"device": "cuda"}, "device cuda: PyTorch finds no GPU on this machine; choose cpu"),
    "dtype": ({"dtype": "float16"}, "dtype float16 is computed on a GPU only: choose bfloat16 or float32"),
    "quantization": ({"quantization": "fp8"}, "quantization fp8 is computed on a GPU only: choose int8-dynamic"),
    "KV cache": ({"cache": CacheConfig(dtype="fp8")}, "kv_cache_dtype fp8 is read on a GPU only: choose int8"),
    "weights on the host": ({"cpu_offload_gb": 1}, "cpu_offload_gb: the weights of a CPU are in memory of the host"),
    "library of attention": (
        {"attention_backend": "flashinfer"},
        "attention_backend flashinfer computes on a GPU only: choose auto",
    ),
    "context": ({"max_model_len": 65}, "max_model_len 65: the model's context has 64 tokens: give at most that"),
    "workers": (
        {"parallel": ParallelConfig(tensor_parallel_size=3)},
        "3 does not divide the model's 2 attention heads",
    ),
    "modules on workers": (
        {"model_impl": "transformers", "parallel": ParallelConfig(tensor_parallel_size=3)},
        "tensor_parallel_size 3 does not divide num_attention_heads 2",
    ),
    "stages of modules": (
        {"model_impl": "transformers", "parallel": ParallelConfig(pipeline_parallel_size=8)},
        "pipeline_parallel_size: 8 stages for",
    ),
    "experts of modules over workers": (
        {
            "model_impl": "transformers",
            "parallel": ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=True),
        },
        "enable_expert_parallel: experts of transformers' modules are not spread; leave it out",
    ),
    "context of modules": ({"model_impl": "transformers", "max_model_len": 65}, "the model's context has 64 tokens"),
    "dummy modules": ({"model_impl": "transformers", "load_format": "dummy"}, "load_format dummy makes weights for"),
}


def test_layers_of_which_each_head_has_queries_keys_and_values_are_divided_by_heads(tmp_path: Path) -> None:
    entries = of("GPTNeoXForCausalLM", "gpt_neox", num_attention_heads=4, hidden_size=96)
    with pytest.raises(ValueError, match="tensor_parallel_size 3 does not divide num_attention_heads 4"):
        answer(tmp_path, entries, parallel=ParallelConfig(tensor_parallel_size=3))


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_do_not_fit_are_named(tmp_path: Path, name: str) -> None:
    options, reason = OPTIONS[name]
    with pytest.raises(ValueError, match=reason):
        answer(tmp_path, LLAMA, **options)


def test_weights_that_stay_on_the_host_are_those_of_built_in_classes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"has_gpu": True, "cpu_offload_gb": 0.5}
    assert answer(tmp_path, LLAMA, **options).by == "built in"
    with pytest.raises(ValueError, match="cpu_offload_gb: transformers' modules and encoders keep all weights on the"):
        answer(tmp_path, LLAMA, model_impl="transformers", **options)
    with pytest.raises(ValueError, match="cpu_offload_gb: is not supported with enable_lora"):
        answer(tmp_path, LLAMA, lora=LoraConfig(enable=True), **options)
    for moving in (
        ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=True, enable_eplb=True),
        ParallelConfig(data_parallel_size=2, enable_expert_parallel=True),
    ):
        with pytest.raises(ValueError, match="cpu_offload_gb: is not supported with experts that move"):
            answer(tmp_path, LLAMA, parallel=moving, **options)


WIDE = LLAMA | {"head_dim": 64, "dtype": "bfloat16"}
LIBRARY: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "dtype": ("flashinfer", WIDE, {"dtype": "float32"}, "it computes in float16 and bfloat16, not in float32"),
    "heads": ("flashinfer", WIDE | {"head_dim": 96}, {}, "it has heads of 64, 128, 256, not of 96"),
    "large heads": ("flash-attn", WIDE | {"head_dim": 256}, {}, "it has heads of 64, 96, 128, not of 256"),
    "cache": ("flash-attn", WIDE, {"cache": CacheConfig(dtype="fp8")}, "it does not read kv_cache_dtype fp8"),
    "blocks": ("flash-attn", WIDE, {"cache": CacheConfig(block_size=64)}, "its blocks have at most 32 tokens, not 64"),
    "chunks": ("flash-attn", LLAMA_4_SCOUT, {"language_model_only": True}, "it knows layers of one shape only"),
    "compressed vectors": ("flashinfer", PUBLISHED["deepseek-ai/DeepSeek-V3"], {}, "it reads no compressed vectors"),
    "modules": ("flash-attn", WIDE, {"model_impl": "transformers"}, "transformers' modules choose the scores"),
    "sinks": ("flashinfer", PUBLISHED["openai/gpt-oss-20b"], {}, "it knows no sinks"),
    "a context in parts": (
        "flashinfer",
        WIDE,
        {"parallel": ParallelConfig(tensor_parallel_size=2, decode_context_parallel_size=2)},
        "no part of a context is computed by it",
    ),
}


@pytest.mark.parametrize("name", LIBRARY)
def test_what_a_library_of_attention_lacks_is_named(tmp_path: Path, name: str, monkeypatch) -> None:
    library, entries, options, reason = LIBRARY[name]
    monkeypatch.setattr(AttentionLibrary, "is_installed", True)
    with pytest.raises(ValueError, match=f"attention_backend {library}: {reason}.*; choose auto"):
        answer(tmp_path, entries, has_gpu=True, attention_backend=library, **options)


def test_libraries_compute_no_layers_of_drafts(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(AttentionLibrary, "is_installed", True)
    draft = str(write(tmp_path / "draft", WIDE))
    speculative = SpeculativeConfig(method="draft_model", num_speculative_tokens=2, model=draft)
    with pytest.raises(ValueError, match="flash-attn: the layers of drafts are not computed by it yet: choose auto"):
        answer(tmp_path, WIDE, has_gpu=True, attention_backend="flash-attn", speculative=speculative)
    lookup = SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    assert answer(tmp_path, WIDE, has_gpu=True, attention_backend="flash-attn", speculative=lookup).by == "built in"


def test_libraries_compute_what_they_know(tmp_path: Path, monkeypatch) -> None:
    # One of that name that is damaged, or another project's: it is not imported to be found.
    for folder in ("flashinfer", "flash_attn"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("raise ImportError('libcudart.so: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    for library in LIBRARIES:
        with pytest.raises(ValueError, match=f"{library}: it needs the package {library}.*; install it, or choose"):
            answer(tmp_path, WIDE, has_gpu=True, attention_backend=library)
    monkeypatch.setattr(AttentionLibrary, "is_installed", True)
    for library in LIBRARIES:
        assert answer(tmp_path, WIDE, has_gpu=True, attention_backend=library).by == "built in"
    cache = CacheConfig(dtype="fp8", block_size=128)
    assert answer(tmp_path, WIDE, has_gpu=True, attention_backend="flashinfer", cache=cache).by == "built in"


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


UNORDERED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "an encoder": (of("BertModel", "bert"), {}, "encoders follow the batch"),
    "modules": (of("PhiForCausalLM", "phi"), {}, "transformers' modules, which compute this model, follow the batch"),
    "modules by choice": (LLAMA, {"model_impl": "transformers"}, "leave out model_impl"),
    "vectors": (LLAMA, {"runner": "pooling"}, "choose runner auto or generate"),
    "another attention": (LLAMA, {"attention_backend": "torch"}, "attention_backend torch follows the batch"),
    "drafts": (
        LLAMA,
        {"speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=2)},
        "leave out speculative_config",
    ),
    "several workers": (LLAMA, {"parallel": ParallelConfig(tensor_parallel_size=2)}, "use one worker"),
    "short blocks": (LLAMA, {"cache": CacheConfig(block_size=8)}, "block size 8 is not a multiple of 16"),
    "a model without text": (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, {}, "writes no text"),
}


BERT = of("BertModel", "bert") | {"num_attention_heads": 4, "intermediate_size": 6, "num_hidden_layers": 2}
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


@pytest.mark.parametrize("name", UNORDERED)
def test_what_follows_the_batch_is_refused_by_batch_invariant_engines(tmp_path: Path, name: str) -> None:
    entries, options, reason = UNORDERED[name]
    with pytest.raises(ValueError, match=f"^batch_invariant: .*{reason}"):
        answer(tmp_path, entries, batch_invariant=True, **{"runner": "auto", **options})


def test_batch_invariant_engines_compute_on_a_cpu(tmp_path: Path) -> None:
    assert answer(tmp_path, LLAMA, batch_invariant=True, has_gpu=True, device="cpu").by == "built in"
    with pytest.raises(ValueError, match=r"^batch_invariant: products on cuda follow the batch: choose --device cpu"):
        answer(tmp_path, LLAMA, batch_invariant=True, has_gpu=True)


def test_the_flag_changes_nothing_for_a_model_of_text(tmp_path: Path) -> None:
    assert answer(tmp_path, LLAMA, language_model_only=True) == answer(tmp_path, LLAMA)


def test_a_gpu_has_rules_of_its_own(tmp_path: Path) -> None:
    assert answer(tmp_path, LLAMA, has_gpu=True, dtype="float16").by == "built in"
    with pytest.raises(ValueError, match="int4 is not supported on cuda: choose fp8"):
        answer(tmp_path, LLAMA, has_gpu=True, quantization="int4")


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


def test_processors_bound_the_workers_of_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 2}
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    for parallel in ({"tensor_parallel_size": 8}, {"tensor_parallel_size": 16, "distributed_executor_backend": "ray"}):
        assert answer(tmp_path, LLAMA | heads, parallel=ParallelConfig(**parallel)).by == "built in"
    with pytest.raises(ValueError, match="16 workers: at most 4 share one of the 2 processors"):
        answer(tmp_path, LLAMA | heads, parallel=ParallelConfig(tensor_parallel_size=16))


def test_cores_on_ray_are_refused_what_they_do_not_do(tmp_path: Path) -> None:
    moe = of("MixtralForCausalLM", "mixtral", num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=1)
    group = {"data_parallel_backend": "ray", "data_parallel_size": 2}
    assert answer(tmp_path, LLAMA, parallel=ParallelConfig(**group)).by == "built in"
    assert answer(tmp_path, moe, parallel=ParallelConfig(**group)).by == "built in"
    with pytest.raises(ValueError, match="data_parallel_backend: KV does not move"):
        answer(tmp_path, LLAMA, parallel=ParallelConfig(**group), kv=KVConfig(transports=("shm",)))


def test_an_empty_quantization_asks_for_nothing(tmp_path: Path) -> None:
    assert answer(tmp_path, of("MPNetModel", "mpnet", quantization_config={})).by == "encoder"


def test_a_switch_may_be_refused_in_a_type_that_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    types = transformers_types() | {"unless": {"phi": [["odd", True, "looks ahead"]]}}
    monkeypatch.setattr(module, "transformers_types", lambda: types)
    assert answer(tmp_path, of("PhiForCausalLM", "phi", odd=False)).is_tried
    with pytest.raises(ValueError, match="it has odd = true, with which it looks ahead"):
        answer(tmp_path, of("PhiForCausalLM", "phi", odd=True))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"parallel": ParallelConfig(decode_context_parallel_size=2, tensor_parallel_size=2)}, "keeps a state between"),
        ({"parallel": ParallelConfig(tensor_parallel_size=2)}, "keeps a state between tokens, .* use one worker"),
        ({"parallel": ParallelConfig(pipeline_parallel_size=2)}, "keeps a state between tokens, .* use one worker"),
        ({"scheduler": SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=100)}, r"max_num_seqs 64 \+ 64"),
        ({"scheduler": SchedulerConfig(long_prefill_token_threshold=64)}, "must be above 64, or 0"),
        ({"lora": LoraConfig(enable=True)}, "enable_lora: no layer of this model can have an adapter"),
    ],
)
def test_what_layers_of_modules_with_a_state_exclude_is_refused_before_a_start(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    bamba = of("BambaForCausalLM", "bamba")
    assert answer(tmp_path, bamba).state_chunk == 64
    with pytest.raises(ValueError, match=reason):
        answer(tmp_path, bamba, **options)


DELTA = LLAMA | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"],
    "num_key_value_heads": 1,
}
SHORT = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=100)


def test_a_gpu_computes_prompts_in_chunks_if_steps_have_room(tmp_path: Path) -> None:
    found = {
        where: answer(tmp_path, DELTA, **options)
        for where, options in {
            "cpu": {},
            "gpu": {"has_gpu": True},
            "gpu, not used": {"has_gpu": True, "device": "cpu"},
            "gpu, without kernels": {"has_gpu": True, "attention_backend": "torch"},
            "gpu, small steps": {"has_gpu": True, "scheduler": SHORT},
            "gpu, scan": {"has_gpu": True, "state_prompts": "scan", "scheduler": SHORT},
        }.items()
    }
    found["gpu, wide states"] = answer(tmp_path, DELTA | {"linear_key_head_dim": 512}, has_gpu=True)
    assert {where: how.state_chunk for where, how in found.items()} == dict.fromkeys(found, 1) | {"gpu": 64}
    forms = [how.config.states.form for how in found.values() if isinstance(how.config, ModelConfig)]
    assert forms == ["gdn-scan-fp32", "gdn-products", *["gdn-scan-fp32"] * 5]


@pytest.mark.parametrize(
    ("entries", "options", "reason"),
    [
        (DELTA, {"has_gpu": False}, r"chunks is computed on a GPU \(cuda\) only: choose scan"),
        (DELTA, {"device": "cpu"}, r"chunks is computed on a GPU \(cuda\) only: choose scan"),
        (DELTA, {"attention_backend": "torch"}, "goes with Triton's kernels: leave out attention_backend torch"),
        (DELTA, {"scheduler": SHORT}, r"max_num_seqs 64 \+ 64"),
        (DELTA, {"state_prompts": "fla"}, "fla needs the package fla-core; install it, or choose chunks"),
        (DELTA | {"linear_key_head_dim": 512}, {}, "states of at most 256 elements a row, not of 512; choose scan"),
        (LLAMA, {}, "state_prompts: no layer of this model keeps a state; leave it out"),
        (of("BambaForCausalLM", "bamba"), {}, "chunks says how built-in layers .* this model has none"),
        (of("BertModel", "bert"), {}, "an encoder keeps no KV and no states; do not set state_prompts"),
    ],
)
def test_chosen_ways_to_compute_prompts_are_refused_where_they_are_none(
    tmp_path: Path, entries: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        answer(tmp_path, entries, **{"has_gpu": True, "state_prompts": "chunks", **options})


def test_fla_computes_gated_delta_nets_in_16_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for reader in ("local_config", "mixer_config"):
        monkeypatch.setattr(f"tokenloom.gpu_worker.checkpoint.{reader}.version", lambda _: "0.6.0")
    options: dict[str, Any] = {"has_gpu": True, "state_prompts": "fla"}
    found = answer(tmp_path, DELTA | {"dtype": "bfloat16"}, **options).config
    assert isinstance(found, ModelConfig)
    assert found.states is not None
    assert (found.states.form, found.states.chunk) == ("gdn-fla-core-0.6.0", 64)
    with pytest.raises(ValueError, match="fla-core does not compute float32; choose chunks, or the dtype bfloat16"):
        answer(tmp_path, DELTA, **options)
    sizes = {name: LLAMA[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    heads = {"head_dim": 8, "num_heads": 4, "n_groups": 1, "dtype": "bfloat16"}
    mamba = {"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", **sizes, **heads}
    with pytest.raises(ValueError, match="fla-core does not compute Mamba-2 here; choose chunks"):
        answer(tmp_path, mamba, **options)


def test_modules_with_a_scan_have_no_chunks(tmp_path: Path) -> None:
    scheduler = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=100, long_prefill_token_threshold=64)
    assert answer(tmp_path, of("JambaForCausalLM", "jamba"), scheduler=scheduler).state_chunk == 1
    assert answer(tmp_path, LLAMA, scheduler=scheduler).state_chunk == 0


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


EAGLE_3 = LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
DRAFTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "a smaller vocabulary": ("draft_model", LLAMA | {"vocab_size": 31}, "vocabulary has 31 tokens and the model's 32"),
    "a shorter context": ("draft_model", LLAMA | {"max_position_embeddings": 63}, "has 63 tokens and the model's 64"),
    "another dtype": ("draft_model", LLAMA | {"dtype": "bfloat16"}, "is bfloat16 and the model's float32; set dtype"),
    "modules": ("draft_model", of("PhiForCausalLM", "phi"), "draft needs transformers' modules or is an encoder"),
    "an encoder": ("draft_model", of("BertModel", "bert"), "draft needs transformers' modules or is an encoder"),
    "states": ("draft_model", of("BambaForCausalLM", "bamba"), "layers of draft keep a state between tokens"),
    "a class of no library": ("draft_model", of("OddForCausalLM", "odd"), "draft needs transformers' modules"),
    "a head of another size": ("eagle", LLAMA | {"num_hidden_layers": 1, "hidden_size": 8}, "1 layers of size 8"),
    "a head of two layers": ("eagle", LLAMA, "the head has 2 layers of size 16; it needs one of the model's size, 16"),
    "an EAGLE-3 head of another dtype": ("eagle3", EAGLE_3 | {"dtype": "bfloat16"}, "is bfloat16 and the model's"),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_a_model_that_cannot_draft_is_refused_before_a_start(tmp_path: Path, name: str) -> None:
    method, entries, reason = DRAFTS[name]
    speculative = SpeculativeConfig(method=method, model=str(write(tmp_path / "draft", entries)))
    with pytest.raises(ValueError, match=reason):
        answer(tmp_path, LLAMA | {"num_hidden_layers": 8}, speculative=speculative)
    answer(tmp_path, LLAMA | {"num_hidden_layers": 8})


@pytest.mark.parametrize(
    ("method", "entries", "reason"),
    [
        ("draft_model", {"vocab_size": 31}, "vocabulary has 31 tokens and the model's 32"),
        ("draft_model", {"max_position_embeddings": 63}, "has 63 tokens and the model's 64"),
        ("draft_model", {"dtype": "bfloat16"}, "is bfloat16 and the model's float32"),
        ("eagle", {"num_hidden_layers": 1, "hidden_size": 8}, "1 layers of size 8"),
    ],
)
def test_drafts_for_transformers_modules_are_compared_before_a_start(
    tmp_path: Path, method: str, entries: dict[str, Any], reason: str
) -> None:
    def answered(changed: dict[str, Any]) -> None:
        speculative = SpeculativeConfig(method=method, model=str(write(tmp_path / "draft", LLAMA | changed)))
        answer(tmp_path, of("PhiForCausalLM", "phi", dtype="float32"), speculative=speculative)

    with pytest.raises(ValueError, match=reason):
        answered(entries)
    answered({"num_hidden_layers": 1})


def test_models_that_can_draft_pass(tmp_path: Path) -> None:
    for method, entries in (("draft_model", LLAMA), ("eagle", LLAMA | {"num_hidden_layers": 1}), ("eagle3", EAGLE_3)):
        speculative = SpeculativeConfig(method=method, model=str(write(tmp_path / "draft", entries)))
        answer(tmp_path, LLAMA | {"num_hidden_layers": 8}, speculative=speculative)


def test_an_eagle_head_needs_embeddings_of_tokens_alone(tmp_path: Path) -> None:
    entries = {name: value for name, value in LLAMA.items() if name != "intermediate_size"}
    opt = entries | {"architectures": ["OPTForCausalLM"], "model_type": "opt", "ffn_dim": 32}
    head = write(tmp_path / "draft", LLAMA | {"num_hidden_layers": 1})
    with pytest.raises(ValueError, match="EAGLE heads do not draft for models of the family opt"):
        answer(tmp_path, opt, speculative=SpeculativeConfig(method="eagle", model=str(head)))
