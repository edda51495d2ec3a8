import pytest
import torch

from tokenloom.offline.engine_args import engine_config


def test_names_are_the_engines_or_vllms():
    made = engine_config({"kv_cache_memory_bytes": 5, "num_gpu_blocks_override": 7, "enable_prefix_caching": False})
    assert (made.cache.memory_bytes, made.cache.num_blocks, made.cache.enable_prefix_caching) == (5, 7, False)
    made = engine_config({"kv_cache_memory": 5, "num_kv_blocks": 7, "max_model_len": 9, "watermark": 0.5})
    assert (made.cache.memory_bytes, made.cache.num_blocks) == (5, 7)
    assert (made.max_model_len, made.scheduler.watermark) == (9, 0.5)


def test_none_stands_for_the_default():
    assert engine_config({"max_num_batched_tokens": None, "max_model_len": None}) == engine_config({})


@pytest.mark.parametrize(("seqs", "tokens", "expected"), [(None, 2048, 128), (None, 50, 50), (7, 50, 7)])
def test_the_default_batch_fits_the_token_budget(seqs, tokens, expected):
    made = engine_config({"max_num_seqs": seqs, "max_num_batched_tokens": tokens})
    assert made.scheduler.max_num_seqs == expected


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bfloat16"), ("float", "float32"), ("auto", "auto")])
def test_dtypes(dtype, name):
    assert engine_config({"dtype": dtype}).worker.dtype == name


@pytest.mark.parametrize("name", ["max_model_len", "max_num_seqs", "kv_cache_memory_bytes", "num_gpu_blocks_override"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
def test_what_is_no_count_is_named(name, value):
    with pytest.raises(ValueError, match=f"{name}: must be an integer ≥ 1, not {value!r}"):
        engine_config({name: value})


def test_similar_names_of_an_unknown_keyword_are_listed():
    with pytest.raises(TypeError, match="max_num_seq: no such option; did you mean max_num_seqs"):
        engine_config({"max_num_seq": 1})
