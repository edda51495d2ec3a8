"""``tokenloom``: the command."""

import sys
from typing import Annotated

import typer

from tokenloom import __version__

from .bench import bench
from .certs import certs
from .demo import demo
from .ps import ps
from .serve import serve

app = typer.Typer(
    help="Serves large language models as a mesh of small gRPC services.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (serve, ps, demo, certs):
    app.command()(command)
app.add_typer(bench, name="bench")


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
    """Options before a command."""


def main() -> None:
    """The console script."""
    sys.exit(app())


if __name__ == "__main__":
    main()
