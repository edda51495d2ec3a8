"""``tokenloom bench regress`` compares two checkouts of Tokenloom."""

from pathlib import Path
from typing import Annotated

import typer

from tokenloom.bench.regress import CASES, RegressOptions, named, run_regress, table
from tokenloom.bench.report.paired import FEWEST, Verdict

from .bench_load import AsJson, OutputJson
from .bench_output import failures, progress, show

_HERE = Path(__file__).resolve().parents[3]


def regress(
    model: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Checkpoint directory.")],
    base: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Checkout to compare with.")],
    ours: Annotated[Path, typer.Option(exists=True, file_okay=False, help="Checkout under test.")] = _HERE,
    case: Annotated[list[str] | None, typer.Option(help=f"[default: {', '.join(CASES)}]")] = None,
    rounds: Annotated[int, typer.Option(min=FEWEST, help="Rounds of a case, at least.")] = FEWEST,
    most_rounds: Annotated[int, typer.Option(min=FEWEST, help="Rounds of a case that is not decided earlier.")] = 20,
    threads: Annotated[int, typer.Option(min=0, help="Compute threads of the offline cases; 0: all cores.")] = 0,
    streams: Annotated[int, typer.Option(min=1, help="Concurrent requests to the servers.")] = 32,
    limit: Annotated[float, typer.Option(min=0, help="Fail if a figure is worse by more than this share.")] = 0.03,
    output_json: OutputJson = None,
    as_json: AsJson = False,
) -> None:
    """Compare two checkouts in turns: one stream, a prompt, a batch, a shared prefix, and a server with 32 streams."""
    with failures():
        trees = (base.resolve(), ours.resolve())
        options = RegressOptions(
            model.resolve(), *trees, tuple(case or CASES), rounds, max(rounds, most_rounds), limit, threads, streams
        )
        if unknown := set(options.cases) - set(CASES):
            raise ValueError(f"case {', '.join(sorted(unknown))} is unknown; expected {', '.join(CASES)}")
        with progress() as shown:
            task = shown.add_task("starting both trees")
            report = run_regress(
                options, lambda name, tree: shown.update(task, advance=1, description=f"{name}: {tree}")
            )
    show(report, [table(report)], as_json=as_json, path=output_json)
    if undecided := named(report, Verdict.UNDECIDED):
        typer.secho(
            f"Undecided, because the noise is larger than the limit: {', '.join(undecided)}.", fg="yellow", err=True
        )
    if slower := named(report, Verdict.SLOWER):
        typer.secho(f"Slower than {base} by more than {limit:.0%}: {', '.join(slower)}.", fg="red", err=True)
        raise typer.Exit(1)
