"""A Prometheus server of the machine, scraping a mesh: Debian's package ``prometheus`` has it."""

import json
import math
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.observability.queries import FOLDER

HINT = "Prometheus is not installed; on Debian: apt-get install --no-install-recommends prometheus"
SECONDS = 60.0
"""Limit of every wait."""


def is_installed() -> bool:
    return shutil.which("prometheus") is not None


class Prometheus:
    """Asks a running server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def wait_ready(self) -> None:
        """Return when it answers; raises ``TimeoutError``."""
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            try:
                with urllib.request.urlopen(f"{self._url}/-/ready", timeout=SECONDS):
                    return
            except OSError:
                time.sleep(0.1)
        raise TimeoutError("Prometheus did not become ready")

    def values(self, query: str) -> list[float]:
        """Return the values that a query has now, without those that are no number."""
        results = self._get("query", query=query)["result"]
        found = [float(each["value"][1]) for each in results]
        return [value for value in found if not math.isnan(value)]

    def bad_rules(self) -> list[str]:
        """Return the alerts whose evaluation has failed, or has not happened yet."""
        groups = self._get("rules")["groups"]
        return [rule["name"] for group in groups for rule in group["rules"] if rule["health"] != "ok"]

    def bad_targets(self) -> list[str]:
        """Return what the last scrapes of targets have failed with; a target without a scrape counts as failed."""
        targets = self._get("targets")["activeTargets"]
        return [f"{each['scrapeUrl']}: {each['lastError']}" for each in targets if each["health"] != "up"]

    def exemplars(self, query: str) -> list[dict[str, str]]:
        """Return the labels of the exemplars of a series."""
        found = self._get("query_exemplars", query=query, start="0", end=str(time.time() + 60))
        return [exemplar["labels"] for series in found for exemplar in series["exemplars"]]

    def _get(self, path: str, **parameters: str) -> Any:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=SECONDS) as response:
            return json.load(response)["data"]


@contextmanager
def running(directory: Path, port: int, targets: Mapping[str, Sequence[str]]) -> Iterator[Prometheus]:
    """Run a server with the repository's alerts. ``targets``: the addresses of each job."""
    configuration = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(FOLDER / "prometheus" / "alerts.yml")],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": list(addresses)}]} for job, addresses in targets.items()
        ],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    command = (
        "prometheus",
        f"--config.file={directory}/prometheus.yml",
        f"--storage.tsdb.path={directory}/data",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
    )
    with open(directory / "prometheus.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        server = Prometheus(f"http://127.0.0.1:{port}")
        server.wait_ready()
        yield server
    finally:
        process.terminate()
        process.wait(SECONDS)
