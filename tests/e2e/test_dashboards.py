"""Every query that the repository offers returns values from a real Prometheus that scrapes a running mesh."""

from pathlib import Path

import pytest

from tests.observability import live, prometheus
from tests.observability.queries import on_call_queries, queries, without_condition


@pytest.mark.skipif(not prometheus.is_installed(), reason=prometheus.HINT)
def test_no_query_is_empty(tmp_path: Path) -> None:
    outcomes, problems = live.run(tmp_path)
    assert problems == []
    assert [outcome.query for outcome in outcomes if outcome.is_failure] == []
    excused = [outcome for outcome in outcomes if outcome.excuse and not outcome.num_values]
    assert len(excused) == len(live.NEEDS), "an excuse that no query needs"


def test_the_queries_are_found() -> None:
    found = list(queries())
    assert {query.where.partition(" ")[0] for query in found} == {
        "panel",
        "variable",
        "alert",
        "docs/operate/on-call.md",
    }
    assert len(on_call_queries()) >= 20
    assert without_condition("sum(rate(a[5m])) / b > 0.01") == "sum(rate(a[5m])) / b"
    assert without_condition("a - time() < 7 * 86400") == "a - time()"
