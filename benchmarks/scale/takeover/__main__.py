"""``python -m tokenloom.bench.scale.takeover [ENGINES]…``: kills the active coordinator, and sees another take over.

Coordinators compete for a lock on a file, and for a Lease of a small server that keeps the rules of Kubernetes. Fake
engines report as often as they may, and askers place requests all the time. Exits with 1 if an aim is missed.
"""

import argparse
import sys
from dataclasses import asdict
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from ..scale import ENGINES, Limit
from .pair import KINDS
from .takeover import Takeover, medians, run_takeovers

AIMS = (
    Limit("answers", 3.0),
    Limit("refused", 0),
    Limit("old_answers", 0),
    Limit("old_picks", 0),
)
_ROWS = (
    ("the other one listens, s", "listens", "{:.2f}"),
    ("it has answered picks of all, s", "answers", "{:.2f}"),
    ("all engines are back, s", "engines_back", "{:.2f}"),
    ("requests placed meanwhile", "asked", "{:,.0f}"),
    ("of these, by the last snapshot", "by_snapshot", "{:,.0f}"),
    ("requests refused", "refused", "{:,.0f}"),
    ("later answers of the old epoch", "old_answers", "{:,.0f}"),
    ("picks of the old epoch that count", "old_picks", "{:,.0f}"),
)


def missed(result: Takeover) -> list[str]:
    """Return which aims are missed."""
    return [aim.figure for aim in AIMS if getattr(result, aim.figure) > aim.most]


def table(results: dict[tuple[str, int], Takeover], rounds: int) -> Table:
    """Return a column for each lease and number of engines, and the aims."""
    aims = {aim.figure: aim.most for aim in AIMS}
    shown = Table(title=f"A coordinator is killed: medians of {rounds}, and sums of requests", title_justify="left")
    shown.add_column("")
    for kind, engines in results:
        shown.add_column(f"{kind}, {engines:,} engines", justify="right")
    shown.add_column("at most", justify="right")
    for title, figure, form in _ROWS:
        most = form.format(aims[figure]) if figure in aims else ""
        shown.add_row(title, *(form.format(getattr(each, figure)) for each in results.values()), most)
    return shown


def main() -> int:
    """Measure, print the table and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", type=int, nargs="*", default=list(ENGINES), metavar="ENGINES")
    parser.add_argument("--lease", choices=KINDS, action="append", help="what they compete for [default: both]")
    parser.add_argument("--rounds", type=int, default=3, help="takeovers of each mesh, one after the other")
    arguments = parser.parse_args()
    results: dict[tuple[str, int], Takeover] = {}
    for kind in arguments.lease or KINDS:
        for engines in arguments.engines:
            takeovers = uvloop.run(run_takeovers(kind, engines, arguments.rounds))
            for each in takeovers:
                print(_line(kind, engines, asdict(each)), file=sys.stderr, flush=True)
            results[kind, engines] = medians(takeovers)
    Console(width=None if sys.stdout.isatty() else 160).print(table(results, arguments.rounds))
    return 1 if any(map(missed, results.values())) else 0


def _line(kind: str, engines: int, figures: dict[str, Any]) -> str:
    shown = (
        f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
    )
    return f"{kind}, {engines} engines: {', '.join(shown)}"


if __name__ == "__main__":
    sys.exit(main())
