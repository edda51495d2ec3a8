"""Common options of the benchmarks' commands, named as in `vllm bench serve`, and how their results are shown."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..failures import print_error
from ..tables import print_tables

if TYPE_CHECKING:
    from tokenloom.bench.load.events import Outcome

_INTERRUPTED = 130

Done = Callable[["Outcome"], None]


def progress() -> Progress:
    """Return progress bars on standard error, shown if it is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)


@contextlib.contextmanager
def bars() -> Iterator[Callable[[str, int], Done]]:
    """Yield a function that adds a bar with a title and a number of requests."""
    with progress() as shown:

        def bar(title: str, total: int) -> Done:
            task = shown.add_task(title, total=total)
            return lambda outcome: shown.advance(task)

        yield bar


def show(report: Any, tables: Sequence[RenderableType], *, as_json: bool, path: Path | None = None) -> None:
    """Print the report as JSON or as tables; also write the JSON to `path`."""
    text = json.dumps(report, indent=2)
    if path is not None:
        path.write_text(text + "\n")
    if as_json:
        print(text)
        return
    for each in tables:
        print_tables("", each)


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """Print expected failures as one line and exit."""
    # Imported here, because they take gRPC, which the help of a command does not need.
    from tokenloom.bench.mesh.contenders import ServerBroke
    from tokenloom.bench.mesh.local_mesh import MeshBroke
    from tokenloom.bench.peers.compare import PeerFailed

    try:
        yield
    except ValueError as error:
        print_error(str(error))
        raise typer.Exit(1) from None
    except (MeshBroke, ServerBroke, PeerFailed) as error:  # with the last lines of its log
        typer.secho(f"Error: {error}", fg="red", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None


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
