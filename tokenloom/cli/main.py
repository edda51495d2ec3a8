"""The command ``tokenloom`` with its subcommands."""

import sys
from typing import Annotated

import typer

from tokenloom import __version__

from .batch.generate import generate
from .batch.run_batch import run_batch
from .bench.bench import bench
from .certs import certs
from .chat.chat import chat
from .chat.complete import complete
from .completion import completion
from .fetch import fetch
from .mesh.chaos import chaos
from .mesh.demo import demo
from .mesh.ps import ps
from .mesh.serve import serve
from .mesh.top import top
from .models import models

_GROUPS = {
    "Serve": (serve, demo, fetch),
    "Ask a server": (chat, complete, run_batch, models),
    "Run without a server": (generate,),
    "Manage a mesh": (ps, top, certs),
    "Measure": (chaos,),
    "Shell": (completion,),
}

app = typer.Typer(
    help="Serve large language models as a mesh of small gRPC services.",
    epilog="Exit status: 0 success, 1 failure, 2 wrong arguments, 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for group, commands in _GROUPS.items():
    for command in commands:
        app.command(rich_help_panel=group)(command)
app.add_typer(bench, name="bench", rich_help_panel="Measure")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tokenloom {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Handle options that stand before a command."""


def main() -> None:
    """Run the console script."""
    sys.exit(app())


if __name__ == "__main__":
    main()
