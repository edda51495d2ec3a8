"""``tokenloom bench speculation`` measures what drafts gain."""

from typing import Annotated

import typer

from tokenloom.bench.report import machine
from tokenloom.model_files.model_path import DEMO_MODEL_NAME

from ..mesh.model_directory import model_directory
from .bench_load import AsJson, OutputJson
from .bench_output import failures, show


def speculation(
    model: Annotated[str, typer.Option(help="Checkpoint directory, GGUF file or hub id.")] = DEMO_MODEL_NAME,
    drafts: Annotated[int, typer.Option(min=1, max=32, help="Most drafts of a request in a step.")] = 6,
    tokens: Annotated[int, typer.Option(min=8, max=300, help="Tokens of each answer.")] = 96,
    rounds: Annotated[int, typer.Option(min=1, help="Answers of each case, with drafts and without in turns.")] = 3,
    threads: Annotated[int, typer.Option(min=0, help="Compute threads; 0: the library decides.")] = 0,
    output_json: OutputJson = None,
    as_json: AsJson = False,
) -> None:
    """Measure scripted answers with drafts and without, in turns: drafts of which 70 % are right, n-grams on text that
    repeats its prompt and on random text, and 32 streams at once."""
    # Imported here because it imports torch.
    from tokenloom.bench.engine.speculation import SpeculationOptions, run_speculation, table

    path, name = model_directory(model, None)
    with failures():
        rows = run_speculation(SpeculationOptions(path, drafts, tokens, rounds, threads))
    report = {"machine": machine.describe(), "model": name, "speculation": rows}
    show(report, [table(rows)], as_json=as_json, path=output_json)
