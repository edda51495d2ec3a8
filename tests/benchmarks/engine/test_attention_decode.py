"""Tests the measurements of attention over compressed vectors and of prompts."""

import pytest

from benchmarks.engine import attention_decode
from tokenloom.gpu_worker.checkpoint.load_config import load_model_config
from tokenloom.model_files.model_path import DEMO_MODEL


@pytest.mark.parametrize("threads", [1, 2])
def test_the_share_of_the_bound_is_printed(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_decode, "_PRODUCT_SIZE", 64)
    monkeypatch.setattr(attention_decode, "_READ_BYTES", 1 << 12)
    monkeypatch.setattr(attention_decode, "read_bandwidth", lambda threads: 1e3)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    row = attention_decode.measure_latent(num_heads=4, requests=2, context=40, pairs=2)
    assert (row["heads"], row["threads"], row["context"]) == (4, threads, 40)
    assert row["least_ms"] > 0
    assert row["share_of_bound_of_least"] >= row["share_of_bound"] > 0
    if threads > 1:  # at the rate above, reading takes longer than the products
        assert (row["bound"], row["bandwidth_gb_s"]) == ("bandwidth", 0.0)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_share_of_the_rate_of_products_is_printed(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    config = load_model_config(DEMO_MODEL)
    few, many = (attention_decode.measure_chunk(config, 2, 40, tokens, pairs=2) for tokens in (1, 24))
    assert (many["requests"], many["context"], many["tokens"], many["threads"]) == (2, 40, 24, threads)
    assert many["least_ms"] > 0
    assert many["share_of_least"] >= many["share"] > 0
    assert few["tokens"] == 1
