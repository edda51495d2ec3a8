"""The tables of a campaign."""

from io import StringIO

from rich.console import Console

from benchmarks.chaos.campaign.summary import rows_of
from benchmarks.chaos.campaign.tables import tables
from tests.benchmarks.chaos.campaign.test_summary import CUT, RECORD, injection


def test_everything_is_shown() -> None:
    rows = [row.report() for row in rows_of([RECORD, CUT], [injection()])]
    layout = {"layout": "whole", "seconds": 3.0, "rows": rows, "examples": ["request 1: cut"], "added_ttft_p99_s": None}
    report = {
        "campaign": "kill",
        "seed": 5,
        "date": "today",
        "machine": {"cpu": "a processor", "cores": 2},
        "layouts": [layout],
        "violations": ["layout whole: failed requests: 1; the limit is 0"],
    }
    console = Console(file=StringIO(), width=300)
    console.print(*tables(report))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for shown in ("kill engine", "1 (1 cut)", "request 1: cut", "the limit is 0", "seed 5", "a processor"):
        assert shown in text
