"""Text and tables on standard output, in which nothing is markup: names, addresses and messages come from others."""

from typing import Any

from rich.console import Console, RenderableType

_WIDTH = 1000


def plain_console(**options: Any) -> Console:
    """Return a console that writes ``[/INST]``, ``[fd00::1]`` and ``:smile:`` as they are."""
    return Console(highlight=False, markup=False, emoji=False, **options)


def print_tables(*tables: RenderableType) -> None:
    """Print tables as wide as they are: a narrow terminal wraps the lines, and a pipe gets whole cells."""
    console = plain_console(width=_WIDTH)
    for table in tables:
        console.print(table)
