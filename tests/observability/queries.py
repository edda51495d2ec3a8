"""Every query that the repository offers: of the dashboard, of the alerts and of docs/operate/on-call.md."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from tests.observability.catalogue import ROOT

FOLDER = ROOT / "observability"
ON_CALL = ROOT / "docs" / "operate" / "on-call.md"
_CONDITION = re.compile(r"\s+(?:==|>|<)\s+[\d.]+(?:\s*\*\s*[\d.]+)*$")
"""The comparison at the end of an alert's expression: without it, the expression has a value while all is well."""


@dataclass(frozen=True)
class Query:
    """A query with where it stands; its variables are those of Grafana."""

    where: str
    text: str

    def filled(self, *, model: str, interval: str) -> str:
        """Return the query as Grafana sends it when all engines are chosen."""
        text = self.text.replace("$model_name", model).replace("$__rate_interval", interval)
        return text.replace("$engine", ".+")


def queries() -> Iterator[Query]:
    """Return all of them, alerts without their conditions."""
    dashboard = json.loads((FOLDER / "grafana" / "tokenloom.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield Query(f"panel {panel['title']!r}", target["expr"])
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield Query(f"variable {variable['name']}", _series_of(variable["query"]["query"]))
    for group in yaml.safe_load((FOLDER / "prometheus" / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield Query(f"alert {rule['alert']}", without_condition(rule["expr"]))
    for text in on_call_queries():
        yield Query("docs/operate/on-call.md", text)


def on_call_queries() -> list[str]:
    return [
        text.strip() for text in re.findall(r"^```promql\n(.*?)^```", ON_CALL.read_text(), re.DOTALL | re.MULTILINE)
    ]


def without_condition(expression: str) -> str:
    """Return an alert's expression without the comparison that makes it an alert."""
    bare, count = _CONDITION.subn("", expression.strip())
    assert count == 1, f"the alert has no condition at its end: {expression}"
    return bare


def _series_of(variable: str) -> str:
    """Return the series of ``label_values(series, label)``."""
    return variable.removeprefix("label_values(").rpartition(",")[0]
