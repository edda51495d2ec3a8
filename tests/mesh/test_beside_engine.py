"""A gateway that stands for one engine at an endpoint picker: requests are placed there, and its load is shown."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.mesh.harness import MODEL, SOON, Mesh

LONG: dict[str, Any] = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True}


async def shown(http: httpx.AsyncClient) -> dict[str, float]:
    """Return what a picker reads: the samples under vLLM's names that have no label ``engine``."""
    families = text_string_to_metric_families((await http.get("/metrics")).text)
    samples = [sample for family in families for sample in family.samples]
    return {sample.name: sample.value for sample in samples if "engine" not in sample.labels}


async def running(mesh: Mesh) -> list[float]:
    return [await mesh.gauge("requests_running", part.settings.instance_id) for part in mesh.engines]


async def test_requests_run_at_the_engine_whose_load_is_shown_and_move_when_it_dies(socket_dir: Path) -> None:
    mesh = Mesh(socket_dir, engines=3, engine={"hash_step_seconds": 0.02}, gateway={"beside_engine": "engine-1"})
    async with asyncio.timeout(4 * SOON), mesh.running(), mesh.http() as http:
        tasks = [asyncio.create_task(http.post("/v1/completions", json=LONG)) for _ in range(6)]
        await mesh.until_running(6)
        assert await running(mesh) == [0, 6, 0], "by load alone each engine would have two"
        assert (await shown(http))["vllm:num_requests_running"] == 6
        orca = {"endpoint-load-metrics-format": "JSON"}
        answer = await http.post("/v1/completions", json={**LONG, "max_tokens": 1}, headers=orca)
        load = json.loads(answer.headers["endpoint-load-metrics"].removeprefix("JSON "))
        assert load["named_metrics"]["num_requests_running"] >= 6
        await mesh.engines[1].kill()
        responses = await asyncio.gather(*tasks)
        assert [response.status_code for response in responses] == [200] * 6
        assert "vllm:num_requests_running" in await shown(http)
        await mesh.engines[1].start()
        await mesh.until_missing()
        again = [asyncio.create_task(http.post("/v1/completions", json=LONG)) for _ in range(3)]
        await mesh.until_running(3)
        assert await running(mesh) == [0, 3, 0]
        await asyncio.gather(*again)
        await mesh.until_idle()
