"""The options with which commands sample; what is not given is left to the model's own defaults."""

from typing import Annotated

import typer

MaxTokens = Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")]
Temperature = Annotated[float | None, typer.Option(min=0, help="0: always the likeliest token.")]
TopP = Annotated[float | None, typer.Option(min=0, max=1, help="Share of probability to sample from.")]
TopK = Annotated[int | None, typer.Option(min=-1, help="Likeliest tokens to sample from; 0 or -1: all.")]
SampleSeed = Annotated[int | None, typer.Option("--seed", help="The same seed gives the same answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")]
