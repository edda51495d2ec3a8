"""Common options of the commands that generate load, named as in `vllm bench serve`."""

from pathlib import Path
from typing import Annotated

import typer

Goodput = Annotated[
    list[str] | None,
    typer.Option(help="Objectives in ms that a request must meet to count as good: ttft:500 tpot:50 e2el:5000."),
]
MoreObjectives = Annotated[
    list[str] | None,
    typer.Argument(metavar="[OBJECTIVE]...", help="Further values of --goodput.", show_default=False),
]
Plot = Annotated[Path | None, typer.Option(help="Write the distributions of the latencies to this SVG file.")]
OutputJson = Annotated[Path | None, typer.Option(help="Write the JSON to this file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
