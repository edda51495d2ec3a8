"""One moment of a mesh."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from rich.console import Console

from tokenloom.cli.mesh import mesh_sample
from tokenloom.cli.mesh.local_mesh import _columns
from tokenloom.cli.mesh.mesh_sample import (
    MeshPlacement,
    MeshSample,
    PartPlacement,
    PartSample,
    ScrapedMetrics,
    merged,
    parse,
    rows_of,
    take_sample,
)
from tokenloom.cli.mesh.top_screen import shown, view
from tokenloom.cli.tables import fitted
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.host.service import running
from tokenloom.services.runtime.host.service_settings import ServiceSettings
from tokenloom.supervisor.state_dir import MeshRecord, PartRecord

TEXT = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3
# TYPE vllm:request_success counter
vllm:request_success_total{finished_reason="stop"} 2
vllm:request_success_total{finished_reason="length"} 5
# TYPE t histogram
t_bucket{le="0.1",model_name="a"} 1
t_bucket{le="0.1",model_name="b"} 2
t_bucket{le="+Inf",model_name="a"} 4
t_count{model_name="a"} 4
t_sum{model_name="a"} 1.5
"""


def test_labels_are_summed_over() -> None:
    metrics = parse(TEXT)
    assert metrics.values["vllm:num_requests_running"] == 3
    assert metrics.values["vllm:request_success_total"] == 7
    assert metrics.values["t_count"] == 4
    assert metrics.buckets == {"t": {0.1: 3, float("inf"): 4}}


class FakeSettings(ServiceSettings, frozen=True, kw_only=True):
    service: ClassVar[str] = "fake"


class FakeService:
    async def start(self, host: Host) -> None: ...
    async def drain(self) -> None: ...
    async def stop(self) -> None: ...


async def test_a_live_part_has_metrics_and_a_dead_one_none(socket_dir: Path) -> None:
    state_file = socket_dir / "t.json"
    settings = FakeSettings.of(listen=f"unix:{socket_dir}/t.sock", state_file=state_file)
    parts = [
        PartRecord("tokenizer", 0, None, str(state_file)),
        PartRecord("engine", 0, "both", str(socket_dir / "e.json")),
    ]
    async with running(FakeService(), settings):
        live, dead = (await take_sample(MeshRecord(1, 8000, parts))).parts
    assert live.serving
    assert live.metrics.values["process_resident_memory_bytes"] > 0
    assert (dead.serving, dead.state, dead.metrics.values) == (False, None, {})


SCORE = """\
# TYPE tokenloom_placement_rule gauge
tokenloom_placement_rule{model_name="m",rule="score"} 1
# TYPE tokenloom_placement_waiting gauge
tokenloom_placement_waiting{engine="engine-0",model_name="m"} 1
# TYPE tokenloom_placement_running gauge
tokenloom_placement_running{engine="engine-0",model_name="m"} 2
# TYPE tokenloom_placement_score gauge
tokenloom_placement_score{engine="engine-0",model_name="m"} 6
"""
COST = {
    "waiting": 1.0,
    "running": 2.0,
    "score": 6.0,
    "seats": 64.0,
    "step_seconds": 0.02,
    "uncached_tokens": 1200.0,
    "uncached_tokens_per_second": 9600.0,
    "expected_seconds": 0.185,
}


def test_a_value_comes_with_what_it_is_computed_from() -> None:
    placements = parse(SCORE).placements
    assert str(placements.of("engine", 0, "m")) == "1 * 4 + 2 = 6"
    assert str(placements.of("coordinator", 0, "m")) == "score"
    assert str(PartPlacement("cost", COST)) == "0.18 s: 1,200 tokens at 9,600/s, 3 of 64 seats"
    assert placements.of("engine", 1, "m") is None
    assert placements.of("gateway", 0, "m") is None
    assert MeshPlacement().of("coordinator", 0, "m") is None
    assert str(PartPlacement(None)) == "-"


def test_the_first_gateway_that_knows_an_engine_decides() -> None:
    first = MeshPlacement({"m": "score"}, {"engine-0": ("m", {"score": 1.0})})
    second = MeshPlacement({"m": "cost", "n": "cost"}, {"engine-0": ("m", {"score": 2.0}), "engine-1": ("n", COST)})
    both = merged([first, second])
    assert both.of("engine", 0, "") == PartPlacement("score", {"score": 1.0})
    assert both.of("engine", 1, "") == PartPlacement("cost", COST)
    assert [both.of("coordinator", 0, model) for model in "mn"] == [PartPlacement("score"), PartPlacement("cost")]


@pytest.mark.parametrize(
    ("rule", "titles", "cells"),
    [("score", ["SCORE"], ["6"]), ("cost", ["SCORE", "AHEAD", "COST"], ["6", "1,200", "0.18 s"])],
)
def test_top_shows_the_rule_and_the_values(rule: str, titles: list[str], cells: list[str]) -> None:
    values = COST if rule == "cost" else {name: COST[name] for name in ("waiting", "running", "score")}
    known = ScrapedMetrics(placements=MeshPlacement({"": rule}, {"engine-0": ("", values)}))
    parts = [
        PartSample(PartRecord("gateway", 0, None, "f"), None, True, known),
        PartSample(PartRecord("engine", 0, None, "f"), None, True, ScrapedMetrics()),
    ]
    seen = view(MeshSample(0.0, parts), MeshSample(1.0, parts))
    console = Console(width=200, record=True)
    with console.capture() as captured:
        console.print(shown(seen, 200))
    text = captured.get()
    assert f"placement by {rule}" in text
    *_, head, _, engine = text.splitlines()
    assert head.split()[-len(titles) :] == titles
    assert " ".join(engine.split()).endswith(" ".join(cells))


@pytest.fixture
def metrics_address() -> Iterator[str]:
    """Where a gateway's metrics are."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(SCORE.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


async def test_ps_takes_them_from_a_gateway(
    socket_dir: Path, metrics_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_serving(address: str) -> bool:
        return True

    monkeypatch.setattr(mesh_sample, "is_serving", is_serving)
    parts = []
    for service in ("gateway", "coordinator", "engine"):
        file = socket_dir / f"{service}.json"
        state = {"pid": 7, "address": "unix:/nowhere", "health": "unix:/nowhere"}
        file.write_text(json.dumps(state | ({"metrics": metrics_address} if service == "gateway" else {})))
        parts.append(PartRecord(service, 0, None, str(file), "" if service == "gateway" else "m"))
    rows = await rows_of(MeshRecord(1, 8000, parts))
    assert [str(row.placement or "-") for row in rows] == ["-", "score", "1 * 4 + 2 = 6"]
    console = Console(width=200, record=True)
    with console.capture() as captured:
        console.print(fitted(_columns(rows), 200))
    head, *lines = captured.get().splitlines()
    assert head.split()[-1] == "PLACEMENT"
    assert [line.rstrip().rpartition("  ")[2] for line in lines] == ["-", "score", "1 * 4 + 2 = 6"]
