"""``tokenloom chaos`` injects faults into a local mesh under load and compares its answers with undisturbed ones."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenloom.bench.chaos.campaign.options import CAMPAIGNS, ChaosOptions
from tokenloom.services.runtime.host.options import options_of
from tokenloom.supervisor.output import Tail, WriteLine

from ..failures import CommandFailed, reported
from ..options import built, offers
from .bench_output import AsJson, OutputJson, show

_NAMES = ", ".join(CAMPAIGNS)


@offers(options_of(ChaosOptions()).values())
def chaos(
    campaign: Annotated[str, typer.Argument(help=f"One of {_NAMES}.")] = "kill",
    log: Annotated[Path | None, typer.Option(help="Write the output of the parts to this file.")] = None,
    output_json: OutputJson = None,
    as_json: AsJson = False,
    **chosen: Any,
) -> None:
    """Start a mesh, inject faults under load, compare every answer with an undisturbed one, and print the results.

    Options that are not given have the defaults of the campaign, which are the limits that the project promises.
    """
    # Imported here, because they take gRPC, which the help does not need.
    import asyncio

    from tokenloom.bench.chaos.campaign.run import run_campaign
    from tokenloom.bench.chaos.campaign.tables import as_markdown
    from tokenloom.bench.chaos.clients.load import Unstable

    if campaign not in CAMPAIGNS:
        raise typer.BadParameter(f"{campaign!r} is not one of {_NAMES}", param_hint="CAMPAIGN")
    preset = CAMPAIGNS[campaign]
    with reported(), _part_output(log) as write_line:
        options = built(preset.options, chosen)
        try:
            report = asyncio.run(run_campaign(campaign, preset, options, write_line, _note))
        except Unstable as error:
            raise CommandFailed(str(error)) from None
    show(report, (), as_json=as_json, path=output_json)
    if not as_json:
        typer.echo(as_markdown(report))
    raise typer.Exit(1 if report["violations"] else 0)


def _note(line: str) -> None:
    typer.echo(line, err=True)


@contextlib.contextmanager
def _part_output(log: Path | None) -> Iterator[WriteLine]:
    """Yield what takes the lines of the parts: a file, or the last lines, which are shown after a failure."""
    if log is not None:
        with open(log, "w", buffering=1) as file:
            yield lambda name, line: print(f"{name:<18} | {line}", file=file)
        return
    tail = Tail()
    try:
        yield tail
    except BaseException:
        typer.echo(tail.text(), err=True)
        raise
