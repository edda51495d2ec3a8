"""Makes the tables of `bench step`."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

_DECODE = (
    "batch",
    "step ms",
    "p99 ms",
    "bound ms",
    "share of bandwidth",
    "GB/s before / after",
    "tokens/s",
    "prefill tokens/s",
)


def decode_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Show how close decode steps come to (weights + KV) / bandwidth."""
    table = Table(title="Decode step", title_justify="left", title_style="bold")
    for column in _DECODE:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["batch"]),
            f"{row['step_ms']:.2f}",
            f"{row['p99_step_ms']:.2f}",
            f"{row['bound_ms']:.2f}",
            f"{row['share_of_bandwidth']:.0%}",
            f"{row['bandwidth_before_gb_s']:.1f} / {row['bandwidth_after_gb_s']:.1f}",
            f"{row['decode_tokens_per_second']:,.1f}",
            f"{row['prefill_tokens_per_second']:,.0f}",
        )
    return table


def prefill_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Show how close prompts come to the rate of matrix products."""
    table = Table(title="Prefill step", title_justify="left", title_style="bold")
    for column in ("tokens", "step ms", "tokens/s", "GFLOP/s", "products least / most", "share of products"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["tokens"]),
            f"{row['step_ms']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['gflops']:,.0f}",
            f"{row['gemm_least_gflops']:,.0f} / {row['gemm_most_gflops']:,.0f}",
            f"{row['share_of_gemm']:.0%}",
        )
    return table


def memory_table(memory: Mapping[str, Any]) -> Table:
    """Show the memory of the engine's process next to weights, KV pool and an allowance."""
    table = Table(title="Memory of the engine, MB", title_justify="left", title_style="bold")
    names = {"rss_bytes": "resident", "packed_weight_bytes": "packed weights", "kv_pool_bytes": "KV pool"}
    for column in (*names.values(), "allowance", "share of the sum"):
        table.add_column(column, justify="right")
    cells = (f"{memory[name] / 1e6:,.0f}" for name in (*names, "allowance_bytes"))
    table.add_row(*cells, f"{memory['share_of_bound']:.0%}")
    return table


def attention_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Show the decode attention of one layer next to vLLM's operation."""
    table = Table(title="Decode attention of a layer", title_justify="left", title_style="bold")
    for column in ("requests", "ours µs", "vLLM µs", "ratio"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = (f"{row['ours_us']:,.0f}", f"{row['vllm_us']:,.0f}", f"{row['ratio']:.2f}")
        table.add_row(str(row["requests"]), *cells)
    return table


def overhead_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Show Python's share of a step."""
    table = Table(title="Without the model, µs a step (median / p99)", title_justify="left", title_style="bold")
    for column in ("requests", "context", "schedule", "batch preparation", "update", "schedule + update"):
        table.add_column(column, justify="right")
    for row in rows:
        names = ("schedule_us", "prepare_us", "update_us", "schedule_update_us")
        cells = (f"{row[f'median_{name}']:,.0f} / {row[f'p99_{name}']:,.0f}" for name in names)
        table.add_row(str(row["requests"]), str(row["context"]), *cells)
    return table
