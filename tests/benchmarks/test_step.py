"""The pieces of `bench step`, on the demo model and at small sizes."""

import pytest

from tokenloom.bench.bandwidth import read_bandwidth
from tokenloom.bench.decode_step import DecodeOptions, run_decode, weight_bytes
from tokenloom.bench.step_overhead import OverheadOptions, run_overhead
from tokenloom.bench.step_tables import decode_table, overhead_table
from tokenloom.gpu_worker.model_config import load_model_config
from tokenloom.services.runtime.checkpoint import DEMO_MODEL


def test_bandwidth_is_of_all_threads_together() -> None:
    assert read_bandwidth(2, seconds=0.01, size=1 << 20) > 0


def test_weights_of_a_step_are_all_but_an_embedding_that_is_only_looked_up() -> None:
    config = load_model_config(DEMO_MODEL)
    size = sum(path.stat().st_size for path in DEMO_MODEL.glob("*.safetensors"))
    embedding = config.vocab_size * config.hidden_size * config.dtype.itemsize
    expected = size if config.tie_word_embeddings else size - embedding
    assert weight_bytes(DEMO_MODEL, config) == pytest.approx(expected, rel=0.01)


def test_decode_rows() -> None:
    rows = run_decode(DecodeOptions(DEMO_MODEL, batches=(1, 3), context=20, steps=3, threads=1))
    assert [row["batch"] for row in rows] == [1, 3]
    for row in rows:
        assert row["share_of_bandwidth"] == pytest.approx(row["bound_ms"] / row["step_ms"], rel=0.01)
        assert row["kv_bytes"] == rows[0]["kv_bytes"] * row["batch"]
    assert decode_table(rows).row_count == 2


def test_a_context_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="exceed"):
        run_decode(DecodeOptions(DEMO_MODEL, context=100_000))


def test_overhead_of_every_part() -> None:
    report = run_overhead(OverheadOptions(requests=8, context=40, steps=5))
    parts = [report[f"median_{part}_us"] for part in ("schedule", "prepare", "update")]
    assert min(parts) > 0
    assert report["median_schedule_update_us"] < sum(parts) * 2
    assert overhead_table([report]).row_count == 1
