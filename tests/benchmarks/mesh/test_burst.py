"""What is made of a burst of requests."""

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry

from tokenloom.bench.load.open_loop import Shot, Volley
from tokenloom.bench.mesh.burst import BurstCase, burst_options, summarize, tables, verdicts
from tokenloom.bench.mesh.observer import longest_turns
from tokenloom.bench.mesh.overload_case import OverloadCase, Phase
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.services.runtime.telemetry import metrics_server
from tokenloom.services.runtime.telemetry.process_metrics import LoopTurns

CASE = BurstCase(3, OverloadCase())
ANSWERED = Shot(0.0, 0.0, 64, 200, 0.2, 1.0, complete=True)
REFUSED = Shot(0.0, 0.0, 64, 503, 0.1, 0.1, retry_after=2)
BROKEN = Shot(0.0, 0.0, 64, 499, 0.1, 0.1)


def report(*shots: Shot, turn: float = 0.004) -> dict[str, Any]:
    phase = Phase("burst", 0.0, Volley(0.0, list(shots), ended_at=2.0), {"gateway": 0.5}, 0.1)
    return summarize(CASE, phase, {"gateway-0": turn}) | {"restarted": [], "missing": []}


def test_every_request_must_be_answered_or_refused() -> None:
    good = report(ANSWERED, REFUSED, REFUSED)
    assert all(is_met for *_, is_met in verdicts(good))
    assert good["ttft_ms"] == [200.0] * 3
    assert len(tables(good)) == 3
    bad = report(ANSWERED, BROKEN, Shot(0.0, 0.0, 64, 503), turn=0.03)
    assert (bad["unanswered"], bad["statuses"]) == (1, {"200": 1, "499": 1, "503": 1})
    assert [is_met for *_, is_met in verdicts(bad)] == [False, True, False, False, True]
    lost = report(ANSWERED)
    assert lost["unanswered"] == 2, "requests that have not ended count too"


def test_the_mesh_measures_its_turns_and_may_admit_all() -> None:
    options = burst_options(DEMO_MODEL, CASE)
    assert "--measure-turns" in options.common_flags
    assert options.flags["engine"][:2] == ("--worker", "hash")
    assert "--always-queued" not in options.flags["gateway"]
    admitting = burst_options(DEMO_MODEL, BurstCase(3, OverloadCase(), admits_all=True))
    assert admitting.flags["gateway"][-2:] == ("--always-queued", "3")


async def test_the_longest_turns_are_read_from_the_parts() -> None:
    registry = CollectorRegistry()
    times = iter([0.0, 0.25])
    turns = LoopTurns(registry, lambda: next(times))
    turns.observe()
    turns.observe()
    server = metrics_server.serve(registry, "127.0.0.1:0", None, insecure=False)
    part = SimpleNamespace(spec=SimpleNamespace(name="engine-0"), state=SimpleNamespace(metrics=server.address))
    mesh: Any = SimpleNamespace(parts=[part])
    try:
        assert await longest_turns(mesh) == {"engine-0": 0.25}
    finally:
        server.close()
