from pathlib import Path

import pytest
import torch

from tokenloom.offline.engine_args import engine_config

ARGUMENTS = {
    "device": "auto",
    "dtype": "auto",
    "quantization": None,
    "max_model_len": None,
    "max_num_seqs": None,
    "max_num_batched_tokens": 2048,
    "block_size": 16,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "async_scheduling": False,
    "distributed_executor_backend": "uni",
    "kv_cache_memory_bytes": None,
    "num_gpu_blocks_override": None,
}


def config(**changes):
    return engine_config(Path("/model"), **(ARGUMENTS | changes))


def test_names_map_to_the_engines():
    made = config(kv_cache_memory_bytes=5, num_gpu_blocks_override=7, enable_prefix_caching=False, max_model_len=9)
    assert (made.worker.model, made.worker.dtype) == ("/model", "auto")
    assert (made.cache.memory_bytes, made.cache.num_blocks, made.cache.enable_prefix_caching) == (5, 7, False)
    assert made.max_model_len == 9


@pytest.mark.parametrize(("seqs", "tokens", "expected"), [(None, 2048, 128), (None, 50, 50), (7, 50, 7)])
def test_a_batch_is_no_larger_than_the_budget_unless_told_to(seqs, tokens, expected):
    assert config(max_num_seqs=seqs, max_num_batched_tokens=tokens).scheduler.max_num_seqs == expected


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bfloat16"), ("float", "float32"), ("auto", "auto")])
def test_dtypes(dtype, name):
    assert config(dtype=dtype).worker.dtype == name


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, value in ARGUMENTS.items()
        if name not in ("device", "distributed_executor_backend", "dtype", "quantization")
        and not isinstance(value, bool)
    ],
)
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
def test_what_is_no_count_is_named(name, value):
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1"):
        config(**{name: value})
