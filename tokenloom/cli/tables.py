"""Text and tables on standard output, in which nothing is markup: names, addresses and messages come from others."""

import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.text import Text

UNLIMITED = 1000
"""Columns of an output that is no terminal, and wider than any table."""


def plain_console(**options: Any) -> Console:
    """Return a console that writes ``[/INST]``, ``[fd00::1]`` and ``:smile:`` as they are."""
    return Console(highlight=False, markup=False, emoji=False, **options)


def print_tables(*tables: RenderableType) -> None:
    """Print tables as wide as they are: a narrow terminal wraps the lines, and a pipe gets whole cells."""
    console = plain_console(width=UNLIMITED)
    for table in tables:
        console.print(table)


def output_width() -> int:
    """Return the columns of the terminal that shows standard output, or those of the variable COLUMNS; a pipe or a
    file without it has no limit."""
    if sys.stdout.isatty() or "COLUMNS" in os.environ:
        return shutil.get_terminal_size().columns
    return UNLIMITED


@dataclass(frozen=True)
class Column:
    """One column of a table that fits a terminal."""

    title: str
    cells: Sequence[str | Text]
    short: "Column | None" = None
    """What stands in its place where the table is too wide."""
    is_right: bool = False
    """Whether the cells are numbers, which end below each other."""
    rank: int = 0
    """Where the table is still too wide, columns go in the order of their ranks, from 1 on; 0: the column stays."""

    @property
    def width(self) -> int:
        return max(cell_len(str(each)) for each in (self.title, *self.cells))

    @property
    def shortest(self) -> "Column":
        return self if self.short is None else replace(self.short, is_right=self.is_right, rank=self.rank)


def fitted(columns: Iterable[Column], width: int) -> Text:
    """Return a table in no more than so many columns of a terminal, if that is possible: first the cells are shortened,
    then columns are left out, those with the lowest rank first."""
    kept = list(columns)
    if _width(kept) > width:
        kept = [each.shortest for each in kept]
    for rank in sorted({each.rank for each in kept} - {0}):
        if _width(kept) <= width:
            break
        kept = [each for each in kept if each.rank != rank]
    return _drawn(kept)


_GAP = "  "


def _width(columns: Sequence[Column]) -> int:
    return sum(each.width for each in columns) + len(_GAP) * (len(columns) - 1)


def _drawn(columns: Sequence[Column]) -> Text:
    heads = [Text(each.title, "bold") for each in columns]
    lines = [
        _line(columns, heads),
        *(_line(columns, row) for row in zip(*(each.cells for each in columns), strict=True)),
    ]
    # Without a width of its own rich would wrap or shorten the lines: what is wider than the terminal shall be cut.
    return Text("\n", no_wrap=True, overflow="crop").join(lines)


def _line(columns: Sequence[Column], cells: Iterable[str | Text]) -> Text:
    line = Text(_GAP).join(_padded(column, cell) for column, cell in zip(columns, cells, strict=True))
    line.rstrip()
    return line


def _padded(column: Column, cell: str | Text) -> Text:
    room = " " * (column.width - cell_len(str(cell)))
    return Text.assemble(room, cell) if column.is_right else Text.assemble(cell, room)
