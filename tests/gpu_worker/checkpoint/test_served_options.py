"""Which options a checkpoint is served with: devices, libraries of attention, workers, batch-invariant engines."""

from pathlib import Path
from typing import Any

import pytest

from tests.gpu_worker.checkpoint.published_configs import CONFIGS as PUBLISHED
from tests.gpu_worker.checkpoint.published_configs import LLAMA_4_SCOUT
from tests.gpu_worker.checkpoint.served_configs import LLAMA, answer, of, write
from tokenloom.engine_core.data.config import CacheConfig, KVConfig, LoraConfig, ParallelConfig, SpeculativeConfig
from tokenloom.gpu_worker.checkpoint.local_config import LIBRARIES, AttentionLibrary

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


UNORDERED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "an encoder": (of("BertModel", "bert"), {}, "encoders follow the batch"),
    "modules": (of("PhiForCausalLM", "phi"), {}, "transformers' modules, which compute this model, follow the batch"),
    "modules by choice": (LLAMA, {"model_impl": "transformers"}, "leave out model_impl"),
    "vectors": (LLAMA, {"runner": "pooling"}, "choose runner auto or generate"),
    "another attention": (LLAMA, {"attention_backend": "torch"}, "attention_backend torch follows the batch"),
    "drafts": (
        LLAMA,
        {"speculative": SpeculativeConfig(method="ngram", rejection_sample_method="probabilistic")},
        "probabilistic acceptance changes tokens: choose rejection_sample_method strict",
    ),
    "several workers": (LLAMA, {"parallel": ParallelConfig(tensor_parallel_size=2)}, "use one worker"),
    "short blocks": (LLAMA, {"cache": CacheConfig(block_size=8)}, "block size 8 is not a multiple of 16"),
    "a model without text": (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, {}, "writes no text"),
}


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
