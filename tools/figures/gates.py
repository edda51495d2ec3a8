"""The figures that a change must not make worse: ``make house-check``.

Each limit is where the tree stands. A change that improves a figure lowers its limit; the aim stands beside it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from .hop_count import HopCount
from .report import House


@dataclass(frozen=True)
class Gate:
    """Compares a figure with its limit."""

    name: str
    figure: float
    limit: float
    aim: float
    at_least: bool = False
    """Whether the figure must not be below its limit, instead of not above."""

    @property
    def is_kept(self) -> bool:
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit

    def __str__(self) -> str:
        sign, bound = ("ok  ", "") if self.is_kept else ("FAIL", f"; the limit is {self.limit:g}")
        return f"{sign} {self.name}: {self.figure:g}{bound} (aim: {self.aim:g})"


def gates(house: House) -> Iterator[Gate]:
    """Yield the gates of what was measured; those of the hops only where a mesh was started."""
    rooms = house.rooms
    yield Gate("folders in circles", sum(map(len, rooms.circles)), limit=0, aim=0)
    yield Gate("import cycles of modules", len(house.imports.cycles), limit=0, aim=0)
    yield Gate("names borne by several public classes", len(rooms.shared_classes), limit=0, aim=10)
    yield Gate("constructors of more than eight parameters", len(rooms.wide_constructors), limit=0, aim=0)
    yield Gate("files of the product", rooms.files, limit=850, aim=850)
    percent = round(100 * rooms.comment_lines / max(rooms.code_lines, 1), 2)
    yield Gate("lines of comment for 100 of code", percent, limit=2, aim=2, at_least=True)
    if isinstance(house.hops, HopCount):
        yield Gate("calls of a streamed chat", house.hops.hops.total.calls, limit=400, aim=400)
        yield Gate("files of a streamed chat", house.hops.hops.total.files, limit=80, aim=80)
