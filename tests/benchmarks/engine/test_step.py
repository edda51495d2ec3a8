"""The pieces of `bench step`, on the demo model and at small sizes."""

import shutil
from pathlib import Path

import pytest

from tokenloom.bench.engine.attention_decode import AttentionOptions, compare_kv_dtypes, run_attention
from tokenloom.bench.engine.bandwidth import read_bandwidth
from tokenloom.bench.engine.checkpoint_bytes import weight_bytes
from tokenloom.bench.engine.decode_step import DecodeOptions, run_decode
from tokenloom.bench.engine.engine_memory import ALLOWANCE, measure_memory, packed_weight_bytes
from tokenloom.bench.engine.prefill_step import PrefillOptions, Products, prefill_flops, run_prefill
from tokenloom.bench.engine.step_overhead import OverheadOptions, run_overhead
from tokenloom.bench.engine.step_tables import (
    attention_table,
    decode_table,
    memory_table,
    overhead_table,
    prefill_table,
)
from tokenloom.gpu_worker.checkpoint.load_config import load_model_config
from tokenloom.model_files.model_path import DEMO_MODEL


def test_bandwidth_is_of_all_threads_together() -> None:
    assert read_bandwidth(2, seconds=0.01, size=1 << 20) > 0


def test_weights_of_a_step_are_all_but_an_embedding_that_is_only_looked_up() -> None:
    config = load_model_config(DEMO_MODEL)
    size = sum(path.stat().st_size for path in DEMO_MODEL.glob("*.safetensors"))
    embedding = config.vocab_size * config.hidden_size * config.dtype.itemsize
    expected = size if config.tie_word_embeddings else size - embedding
    assert weight_bytes(DEMO_MODEL, config) == pytest.approx(expected, rel=0.01)


def test_decode_rows() -> None:
    run = run_decode(DecodeOptions(DEMO_MODEL, batches=(1, 3), context=20, steps=3, threads=1))
    rows = run.rows
    assert [row["batch"] for row in rows] == [1, 3]
    for row in rows:
        assert row["share_of_bandwidth"] == pytest.approx(row["bound_ms"] / row["step_ms"], rel=0.01)
        assert row["kv_bytes"] == rows[0]["kv_bytes"] * row["batch"]
    assert decode_table(rows).row_count == 2
    assert run.memory["kv_pool_bytes"] >= 3 * 27 * load_model_config(DEMO_MODEL).kv_bytes_per_token
    assert memory_table(run.memory).row_count == 1


def test_memory_is_compared_with_weights_pool_and_an_allowance() -> None:
    config = load_model_config(DEMO_MODEL)
    memory = measure_memory(DEMO_MODEL, config, num_kv_tokens=100)
    bound = packed_weight_bytes(DEMO_MODEL, config) + 100 * config.kv_bytes_per_token + ALLOWANCE
    assert memory["share_of_bound"] == pytest.approx(memory["rss_bytes"] / bound, rel=0.01)
    # A tied embedding is looked up in one copy and multiplied with another.
    assert packed_weight_bytes(DEMO_MODEL, config) >= weight_bytes(DEMO_MODEL, config)


def test_prefill_rows_are_of_lengths_that_the_model_has_room_for() -> None:
    rows = run_prefill(PrefillOptions(DEMO_MODEL, lengths=(32, 100_000), repeats=1, threads=1))
    assert [row["tokens"] for row in rows] == [32]
    gemm = (rows[0]["gemm_least_gflops"] + rows[0]["gemm_most_gflops"]) / 2
    assert rows[0]["share_of_gemm"] == pytest.approx(rows[0]["gflops"] / gemm, rel=0.05)
    assert prefill_table(rows).row_count == 1


def test_a_prompt_twice_as_long_costs_more_than_twice() -> None:
    config = load_model_config(DEMO_MODEL)
    short, long = (prefill_flops(DEMO_MODEL, config, length) for length in (64, 128))
    output = 2 * config.vocab_size * config.hidden_size
    assert long - output > 2 * (short - output)
    assert Products(config, 8).rate(seconds=0.01) > 0


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_attention_is_compared_with_what_the_other_environment_answers(tmp_path: Path) -> None:
    rows = run_attention(AttentionOptions(DEMO_MODEL, environment(tmp_path, "echo 1e6"), (2,), 40, 1, seconds=0.002))
    assert [row["requests"] for row in rows] == [2]
    assert rows[0]["ratio"] == pytest.approx(1e6 / rows[0]["ours_us"], rel=0.01)
    assert attention_table(rows).row_count == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_attention_is_compared_by_the_dtype_of_the_kv_cache() -> None:
    row = compare_kv_dtypes(load_model_config(DEMO_MODEL), requests=2, context=40, pairs=2)
    assert row["bytes_per_token_and_layer"] == {"auto": 2 * 2 * 64 * 2, "int8": 2 * 2 * (64 + 4)}
    assert row["speedup"] == pytest.approx(row["median_ms"]["auto"] / row["median_ms"]["int8"], rel=0.2)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_an_environment_without_vllm_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no bin/python"):
        run_attention(AttentionOptions(DEMO_MODEL, tmp_path))
    with pytest.raises(ValueError, match="its process ended"):
        run_attention(AttentionOptions(DEMO_MODEL, environment(tmp_path, "exit 1"), (2,), 40, 1, seconds=0.002))


def environment(root: Path, answer: str) -> Path:
    """One whose interpreter does this for each line that it reads."""
    python = root / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\nwhile read line; do {answer}; done\n")
    python.chmod(0o755)
    return root


def test_overhead_of_every_part() -> None:
    report = run_overhead(OverheadOptions(requests=8, context=40, steps=5))
    parts = [report[f"median_{part}_us"] for part in ("schedule", "prepare", "update")]
    assert min(parts) > 0
    assert report["median_schedule_update_us"] < sum(parts) * 2
    assert overhead_table([report]).row_count == 1
