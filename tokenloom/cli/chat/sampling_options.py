"""Sampling options of commands. An option that is not given is left to the model's defaults."""

from typing import Annotated

import typer

MaxTokens = Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")]
Temperature = Annotated[float | None, typer.Option(min=0, help="Randomness; 0 always selects the most likely token.")]
TopP = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Sample from the most likely tokens that have this share of the probability."),
]
TopK = Annotated[
    int | None, typer.Option(min=-1, help="Sample from this many of the most likely tokens; 0 or -1: all.")
]
SampleSeed = Annotated[int | None, typer.Option("--seed", help="Seed; the same seed gives the same answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.")]
