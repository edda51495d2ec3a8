"""What `bench step` shows."""

from collections.abc import Sequence
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
    """How near decode steps come to (weights + KV) / bandwidth."""
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


def overhead_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Python's share of a step."""
    table = Table(title="Beside the model, µs a step (median / p99)", title_justify="left", title_style="bold")
    for column in ("requests", "context", "schedule", "batch preparation", "update", "schedule + update"):
        table.add_column(column, justify="right")
    for row in rows:
        names = ("schedule_us", "prepare_us", "update_us", "schedule_update_us")
        cells = (f"{row[f'median_{name}']:,.0f} / {row[f'p99_{name}']:,.0f}" for name in names)
        table.add_row(str(row["requests"]), str(row["context"]), *cells)
    return table
