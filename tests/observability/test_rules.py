"""Dashboards, alerts and scrapes against the metrics that exist and the parts of docker-compose.yml."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.k8s.cluster import build, of_kind
from tests.observability.catalogue import ROOT, Pages, entries
from tests.observability.queries import on_call_queries
from tokenloom.supervisor.certificates import PARTS

FOLDER = ROOT / "observability"
ALERTS = yaml.safe_load((FOLDER / "prometheus" / "alerts.yml").read_text())
DASHBOARD = json.loads((FOLDER / "grafana" / "tokenloom.json").read_text())
SCRAPES = yaml.safe_load((FOLDER / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OF_ANY_PROCESS = {"up", "process_cpu_seconds_total", "process_resident_memory_bytes", "process_start_time_seconds"}
OF_A_CORE = {f"tokenloom_engine_core_{name}" for name in OF_ANY_PROCESS}
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_WORDS = {
    "by",
    "on",
    "sum",
    "max",
    "rate",
    "increase",
    "changes",
    "histogram_quantile",
    "group_left",
    "label_values",
    "min",
    "time",
    "topk",
}


def metrics_of(expression: str) -> set[str]:
    """Names of the series that an expression reads: what is neither a label, a string, a duration nor a function."""
    bare = re.sub(r'"[^"]*"|\$\w+', "", expression)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", bare)
    bare = re.sub(r"\b(by|on|group_left)\s*\([^)]*\)", "", bare)
    return set(_NAME.findall(bare)) - _WORDS


def labels_of(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Series with the labels that the expression asks of them."""
    for name, selector in re.findall(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{([^}]*)\}", expression):
        yield name, set(re.findall(r"(\w+)\s*[=!]", selector))


def expressions() -> list[str]:
    alerts = [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    variables = [each["query"]["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    variables = [re.sub(r",\s*\w+\)$", ")", query) for query in variables]  # label_values(series, label)
    return [*alerts, *panels, *variables, *on_call_queries()]


def known(pages: Pages) -> dict[str, set[str]]:
    """Every series with its labels, those of a scrape included."""
    series: dict[str, set[str]] = {name: {"job", "instance"} for name in OF_ANY_PROCESS | OF_A_CORE}
    for entry in entries(pages):
        for name in entry.series:
            series.setdefault(name, {"job", "instance"}).update(entry.labels)
    return series


def test_names_are_found_in_expressions() -> None:
    text = 'sum by (le) (rate(vllm:a_b_bucket{x="rate(y)"}[$__rate_interval])) / on (job) group_left (z) up > 0.5'
    assert metrics_of(text) == {"vllm:a_b_bucket", "up"}
    assert list(labels_of(text)) == [("vllm:a_b_bucket", {"x"})]


def test_every_expression_reads_metrics_and_labels_that_exist(pages: Pages) -> None:
    series = known(pages)
    for expression in expressions():
        assert metrics_of(expression), expression
        assert metrics_of(expression) <= series.keys(), expression
        for name, labels in labels_of(expression):
            assert labels <= series[name], expression


def test_panels_have_a_place_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    identifiers = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(identifiers)) == len(identifiers)


def test_every_alert_says_what_happened_and_is_tested() -> None:
    rules = [rule for group in ALERTS["groups"] for rule in group["rules"]]
    tests = yaml.safe_load((FOLDER / "prometheus" / "alerts_test.yml").read_text())["tests"]
    fired = {case["alertname"] for test in tests for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert fired == {rule["alert"] for rule in rules}
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in rules)


def test_kubernetes_has_the_same_alerts() -> None:
    (rule,) = of_kind(build("monitoring"), "PrometheusRule")
    assert rule["spec"] == ALERTS


def test_compose_scrapes_every_part_by_the_name_of_its_certificate() -> None:
    parts = {
        name: part["command"][0].removeprefix("tokenloom.services.")
        for name, part in COMPOSE["services"].items()
        if part.get("command", [""])[0].startswith("tokenloom.services.")
    }
    scraped: dict[str, Any] = {scrape["job_name"]: scrape for scrape in SCRAPES}
    assert scraped.keys() == parts.keys()
    assert set(parts.values()) <= set(PARTS)
    for name, service in parts.items():
        (discovery,) = scraped[name]["dns_sd_configs"]
        assert discovery["names"] == [name]
        assert COMPOSE["x-environment"]["TOKENLOOM_METRICS_LISTEN"].endswith(f":{discovery['port']}")
        assert scraped[name]["tls_config"]["server_name"] == f"{service.replace('_', '-')}.tokenloom.internal"


def test_what_watches_runs_on_demand_with_files_that_exist() -> None:
    watching = {name: part for name, part in COMPOSE["services"].items() if "observability" in part.get("profiles", ())}
    assert watching.keys() == {"prometheus", "grafana", "traces"}
    for part in watching.values():
        for volume in part.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source in COMPOSE["volumes"] or (ROOT / source).exists(), volume
        assert all(port.startswith("127.0.0.1:") for port in part.get("ports", ()))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    "command",
    ["check rules alerts.yml", "test rules alerts_test.yml", "check config --syntax-only prometheus.yml"],
)
def test_promtool_takes(command: str) -> None:
    checked = subprocess.run(
        ["promtool", *command.split()], cwd=FOLDER / "prometheus", capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
