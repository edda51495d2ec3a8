"""``tokenloom generate`` answers a file of prompts without a server."""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tokenloom.model_files.model_path import DEMO_MODEL_NAME

from ..failures import FAILED, CommandFailed, reported
from ..options import Stop, Temperature, TopK, TopP, engine_options, given, offers, parsed
from .jsonl import STANDARD, LineWriter, check_apart, count_lines, read_lines


@offers(engine_options())
def generate(
    prompts: Annotated[Path, typer.Argument(help="JSONL file of prompts; -: standard input.")],
    output: Annotated[Path, typer.Argument(help="JSONL file of answers; -: standard output.")] = STANDARD,
    model: Annotated[str, typer.Option(help="Checkpoint directory, GGUF file or hub id.")] = DEMO_MODEL_NAME,
    overwrite: Annotated[
        bool, typer.Option(help="Start over instead of resuming after the last line of OUTPUT.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 128,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    n: Annotated[int, typer.Option(min=1, help="Answers for each prompt.")] = 1,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers.")] = 0,
    stop: Stop = None,
    ignore_eos: Annotated[bool, typer.Option(help="Continue past the model's end-of-sequence token.")] = False,
    **engine: Any,
) -> None:
    """Answer a file of prompts with a model in this process. The same command resumes after an interrupt."""
    sampling = given(n=n, max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, stop=stop)
    if ignore_eos:
        sampling["ignore_eos"] = True
    with reported():
        check_apart(prompts, output, "prompts")
    with reported(), LineWriter(output, overwrite=overwrite) as writer:
        total = count_lines(prompts)
        lines = read_lines(prompts)
        done = _skip_answered(lines, writer.written)
        if total is not None and total == done:
            typer.echo(f"all {total} prompts already have an answer in {output}", err=True)
            return
        num_failed = 0
        with _bar(total, done) as advance:
            for answer in _answers(model, parsed(engine), lines, sampling, seed, advance):
                writer.write(answer)
                num_failed += "error" in answer
        if num_failed:
            typer.secho(f"{num_failed} lines failed; their lines in the output hold the error", fg="red", err=True)
            raise typer.Exit(FAILED)


def _answers(
    model: str,
    engine: dict[str, Any],
    lines: Iterable[tuple[int, str]],
    sampling: dict[str, Any],
    seed: int,
    on_done: Callable[[dict[str, Any]], None],
) -> Iterator[dict[str, Any]]:
    # Imported here because both import torch.
    from tokenloom import LLM

    from .generate_run import generate_lines

    try:
        llm = LLM(model, **engine)
    except ValueError as error:
        raise CommandFailed(str(error)) from None
    with contextlib.closing(llm):
        yield from generate_lines(llm, lines, sampling, seed, on_done)


def _skip_answered(lines: Iterator[tuple[int, str]], answers: list[dict[str, Any]]) -> int:
    """Skip the prompts that have an answer. Raises `CommandFailed` if the answers belong to other prompts."""
    # Imported here, because it takes numpy and protobuf, which the help does not need.
    from .generate_run import BadLine, read_prompt_line

    for answer, (number, text) in itertools.zip_longest(
        answers, itertools.islice(lines, len(answers)), fillvalue=(0, "")
    ):
        try:
            id = read_prompt_line(number, text).id if number else None
        except BadLine as error:
            id = error.id
        if not isinstance(answer, dict) or answer.get("id") != id:
            raise CommandFailed(
                f"the output file holds answers to other prompts (first at line {number or 'past the end'}); "
                "name another file or use --overwrite"
            )
    return len(answers)


@contextlib.contextmanager
def _bar(total: int | None, done: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Show a progress bar on standard error if it is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    shown = Progress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[tokens]} tokens"), console=console)
    shown.disable = not sys.stderr.isatty()
    with shown:
        task = shown.add_task("prompts", total=total, completed=done, tokens=0)

        def advance(answer: dict[str, Any]) -> None:
            tokens = answer.get("usage", {}).get("completion_tokens", 0)
            shown.update(task, advance=1, tokens=shown.tasks[task].fields["tokens"] + tokens)

        yield advance
