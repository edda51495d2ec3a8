"""Tables on standard output."""

from rich.console import Console, RenderableType

_WIDTH = 1000


def print_tables(*tables: RenderableType) -> None:
    """Print tables as wide as they are: a narrow terminal wraps the lines, and a pipe gets whole cells."""
    console = Console(highlight=False, width=_WIDTH)
    for table in tables:
        console.print(table)
