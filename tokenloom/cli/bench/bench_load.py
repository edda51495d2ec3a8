"""Options that commands which make load have in common, named as in `vllm bench serve`."""

from typing import Annotated

import typer

from tokenloom.bench.load.datasets import DatasetName

NumPrompts = Annotated[int, typer.Option(min=1, help="Requests in all.")]
Dataset = Annotated[
    DatasetName,
    typer.Option(help="random; shared-prefix: prompts that begin alike; mixed: long prompts among short chats."),
]
InputLen = Annotated[int, typer.Option("--input-len", "--random-input-len", min=1, help="Tokens of a prompt's own.")]
OutputLen = Annotated[int, typer.Option("--output-len", "--random-output-len", min=1, help="Tokens of an answer.")]
RangeRatio = Annotated[
    float,
    typer.Option("--range-ratio", "--random-range-ratio", min=0, max=1, help="How far lengths vary: ± this share."),
]
PrefixLen = Annotated[int, typer.Option(min=1, help="shared-prefix: tokens in common.")]
NumPrefixes = Annotated[int, typer.Option(min=1, help="shared-prefix: how many different beginnings.")]
LongShare = Annotated[float, typer.Option(min=0, max=1, help="mixed: share of long prompts.")]
LongInputLen = Annotated[int, typer.Option(min=1, help="mixed: tokens of a long prompt.")]
LongOutputLen = Annotated[int, typer.Option(min=1, help="mixed: tokens of a long prompt's answer.")]
Seed = Annotated[int, typer.Option(help="Decides prompts, lengths and arrivals.")]
RequestRate = Annotated[float, typer.Option(min=1e-6, help="Requests that arrive in a second; inf: all at once.")]
MaxConcurrency = Annotated[int | None, typer.Option(min=1, help="Requests in flight at once.")]
Goodput = Annotated[
    list[str] | None,
    typer.Option(help="Objectives in ms that a request must meet to count: ttft:500 tpot:50 e2el:5000."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
