"""What is made of first tokens under load; a mesh with all loads, once."""

from typing import Any

from tokenloom.bench.mesh import tails
from tokenloom.bench.mesh.mesh import MeshCase
from tokenloom.bench.mesh.tails import LOADS, TailCase, failures, run_case
from tokenloom.model_files.model_path import DEMO_MODEL


def report(quiet: float, busy: float, beside_hogs: float, failed: int = 0) -> dict[str, Any]:
    p99 = dict(zip(LOADS, (quiet, busy, beside_hogs), strict=True))
    return {name: {"p99_added_ttft_ms": value, "failed": failed} for name, value in p99.items()}


def test_a_load_may_be_two_and_a_half_times_as_late_as_the_quiet_one() -> None:
    assert not failures(report(8.0, 20.0, 19.0))
    assert failures(report(8.0, 20.1, 30.0)) == [
        "busy: p99 is above 20.0 ms, 2.5 times that of the quiet load",
        "hogs: p99 is above 20.0 ms, 2.5 times that of the quiet load",
    ]
    assert len(failures(report(8.0, 8.0, 8.0, failed=1))) == 3


async def test_each_load_has_its_first_tokens(monkeypatch: Any) -> None:
    monkeypatch.setattr(tails, "_FEWEST", 8)
    case = TailCase(MeshCase(5.0, batch=8, seconds=0.4, output_len=10), hogs=1)
    found = await run_case(DEMO_MODEL, case)
    assert found["tokens_per_second"] > 0
    for name in LOADS:
        assert found[name]["requests"] >= 8
        assert not found[name]["failed"]
        assert found[name]["p99_added_ttft_ms"] >= found[name]["median_added_ttft_ms"] > 0
