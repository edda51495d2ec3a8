"""How checkpoints are served whose layers keep a state between tokens."""

from pathlib import Path
from typing import Any

import pytest

from tests.gpu_worker.checkpoint.served_configs import LLAMA, answer, of
from tokenloom.engine_core.data.config import LoraConfig, ParallelConfig, SchedulerConfig
from tokenloom.gpu_worker.checkpoint.model_config import ModelConfig


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
