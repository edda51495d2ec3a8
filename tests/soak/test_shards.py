"""What is kept of the shards of a campaign adds up, and those that have run do not run again."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos.campaign.layouts import layouts_of
from tests.soak import shards


def shard(number: int, **row: int) -> dict[str, Any]:
    counts = dict.fromkeys(shards._COUNTS, 1) | row
    rows = [{"kind": "kill gateway", **counts}, {"kind": "all", **counts}]
    layout = {"layout": "split", "seconds": 100.0, "rows": rows, "examples": [], "violations": []}
    report = {"layouts": [layout], "violations": [], "date": "today"}
    return {"shard": number, "commit": "abc", "load": "2", "dropped": 7, "report": report}


def test_shards_add_up() -> None:
    found = shards.total([shard(0, requests=2000), shard(1, requests=2001, failed=0)])
    assert list(found) == ["kill gateway", "all"]
    assert (found["all"]["requests"], found["all"]["failed"], found["all"]["wrong"]) == (4001, 1, 2)
    assert "| all | 2 | 4001 | 1 | 2 |" in shards.as_table([shard(0, requests=2000), shard(1, requests=2001, failed=0)])


def test_only_missing_shards_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[int] = []

    def run_shard(_: Any, number: int) -> dict[str, Any]:
        ran.append(number)
        return shard(number)

    monkeypatch.setattr(shards, "_run_shard", run_shard)
    monkeypatch.setattr(shards, "_lose", lambda _: None)
    monkeypatch.setattr(shards, "watch_memory", lambda *_: None)
    results = tmp_path / "results"
    results.write_text(json.dumps(shard(1)) + "\n")
    arguments = shards.parser().parse_args(["--results", str(results), "--shards", "3"])
    assert shards.run(arguments) == 0
    assert ran == [0, 2]
    assert shards.run(arguments) == 0
    assert ran == [0, 2]
    bad = shard(3)
    bad["report"]["violations"] = ["failed requests: 1"]
    with results.open("a") as file:
        file.write(json.dumps(bad) + "\n")
    assert shards.run(arguments) == 1


@pytest.mark.parametrize("worker", shards._WORKERS)
def test_the_options_of_a_shard(worker: str) -> None:
    arguments = shards.parser().parse_args(["--results", "r", "--worker", worker, "--requests", "50"])
    options = shards.options_of(arguments, 7)
    assert (options.seed, options.requests, options.hold_connections, options.link_delay) == (7, 50, True, 0.02)
    assert (options.max_failed, options.max_refused, options.bfloat16) == (0, 0, worker == "model")
    (split,) = layouts_of(options)
    assert ({"--batch-invariant", "--speculative-config"} <= set(split.mesh.flags["engine"])) == (worker == "model")


def test_a_process_that_takes_too_much_memory_says_with_what_and_ends(tmp_path: Path) -> None:
    ended: list[int] = []
    with (tmp_path / "log").open("w") as log:
        shards.watch_memory(0, log, ended.append).join(30)
    assert ended == [3]
    assert "MiB, the most are [(" in (tmp_path / "log").read_text()
    assert "most recent call first" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(("share", "rule"), [(0.01, "< 10000 "), (0.0002, "< 200 "), (1e-9, "< 1 "), (0.0, "")])
def test_a_small_share_of_the_packets_is_lost_too(share: float, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(subprocess, "run", lambda *_, **options: given.append(options.get("input", "")))
    shards._lose(share)
    assert rule in given[-1]
    assert bool(given[-1]) == bool(share)
