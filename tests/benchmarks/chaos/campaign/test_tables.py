"""The tables of a campaign."""

from typing import Any

from benchmarks.chaos.campaign.summary import rows_of
from benchmarks.chaos.campaign.tables import as_markdown
from tests.benchmarks.chaos.campaign.test_summary import CUT, RECORD, injection


def report(**changes: Any) -> dict[str, Any]:
    rows = [row.report() for row in rows_of([RECORD, CUT], [injection(), injection(effect="")])]
    layout = {"layout": "whole", "seconds": 3.0, "rows": rows, "examples": [], "added_ttft_p99_s": None}
    return {
        "campaign": "kill",
        "seed": 5,
        "date": "today",
        "machine": {"cpu": "a processor", "cores": 2},
        "layouts": [{**layout, **changes}],
        "violations": [],
    }


def test_the_table_of_a_layout() -> None:
    title, empty, names, line, *rows = as_markdown(report()).split("\n")[:7]
    assert title == "**kill, layout whole**: 3 s of faults, seed 5, today, a processor, 2 cores"
    assert empty == ""
    columns = [name.strip() for name in names.split("|")[1:-1]]
    assert len({len(each) for each in (names, line, *rows)}) == 1, "the columns stand below each other"
    cells = dict(zip(columns, (cell.strip() for cell in rows[0].split("|")[1:-1]), strict=True))
    assert cells["fault"] == "kill engine"
    assert cells["faults"] == "2 (1 took effect)"
    assert cells["failed"] == "1 (1 cut)"
    assert cells["added s: p50 / p99 / max"] == "1.00 / 1.00 / 1.00"
    assert cells["restart s: max"] == "3.00"


def test_limits_and_examples() -> None:
    assert as_markdown(report()).endswith("No limit was violated.")
    text = as_markdown(report(examples=["request 1: cut"], added_ttft_p99_s=0.012) | {"violations": ["failed: 1"]})
    for shown in ("- request 1: cut", "- failed: 1", "first 2 s: +12 ms"):
        assert shown in text
    assert "No limit" not in text
