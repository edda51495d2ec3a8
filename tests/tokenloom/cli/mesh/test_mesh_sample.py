"""One moment of a mesh."""

from pathlib import Path
from typing import ClassVar

from tokenloom.cli.mesh.mesh_sample import parse, take_sample
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
