"""The page's view of the mesh names every part and its state."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.gateway.fakes import LIMITS, MODEL, FakeMesh
from tokenloom.v1 import coordinator_pb2, types_pb2


async def until(http: httpx.AsyncClient, name: str, state: str) -> dict[str, Any]:
    """Return the mesh once a part or an engine has this state."""
    while True:
        seen: dict[str, Any] = (await http.get("/mesh")).json()
        if any((each["name"], each["state"]) == (name, state) for each in seen["parts"] + seen["engines"]):
            return seen
        await asyncio.sleep(0)


async def test_every_replica_is_listed(http: httpx.AsyncClient) -> None:
    seen = await until(http, "tokenizer 1", "serving")
    assert (seen["model"], seen["max_model_len"], seen["missing"]) == (MODEL, LIMITS.max_model_len, [])
    assert [(part["kind"], part["name"], part["state"]) for part in seen["parts"]] == [
        ("gateway", "gateway", "serving"),
        ("coordinator", "coordinator", "serving"),
        ("tokenizer", "tokenizer 0", "serving"),
        ("tokenizer", "tokenizer 1", "serving"),
        ("output_processor", "output processor 0", "serving"),
    ]
    (engine,) = seen["engines"]
    assert (engine["name"], engine["state"], engine["running"], engine["kv_usage"]) == ("engine-0", "serving", 3, 0.25)
    assert "address" not in str(seen)


async def test_whether_the_model_reads_images(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    assert not (await until(http, "engine-0", "serving"))["reads_images"]
    mesh.coordinator.limits = types_pb2.ModelLimits(max_model_len=512, media_kinds=[types_pb2.MEDIA_KIND_IMAGE])
    await mesh.coordinator.set_engines("engine-5")
    assert not (await until(http, "engine-5", "serving"))["reads_images"]
    await mesh.coordinator.set_encoders(encoder="unix:/a")
    seen = await until(http, "encoder", "serving")
    assert (seen["reads_images"], seen["reads_sounds"]) == (True, False)


@pytest.mark.parametrize("cross_rows", [0, 1500])
async def test_whether_prompts_hold_sounds(mesh: FakeMesh, http: httpx.AsyncClient, cross_rows: int) -> None:
    """Those of a model that transcribes have them beside them."""
    kinds = [types_pb2.MEDIA_KIND_AUDIO]
    limits = types_pb2.ModelLimits(max_model_len=512, media_kinds=kinds, cross_media_rows=cross_rows)
    mesh.coordinator.limits = limits
    await mesh.coordinator.set_engines("engine-5")
    await mesh.coordinator.set_encoders(encoder="unix:/a")
    seen = await until(http, "encoder", "serving")
    assert (seen["reads_images"], seen["reads_sounds"]) == (False, not cross_rows)


async def test_a_lost_engine_is_named_until_it_returns(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    await mesh.coordinator.set_engines("engine-10", "engine-9")
    seen = await until(http, "engine-10", "serving")
    assert [engine["name"] for engine in seen["engines"]] == ["engine-0", "engine-9", "engine-10"]
    await mesh.coordinator.set_engines("engine-10")
    seen = await until(http, "engine-9", "lost")
    assert [engine["state"] for engine in seen["engines"]] == ["lost", "lost", "serving"]
    await mesh.coordinator.set_engines("engine-10", "engine-9")
    await until(http, "engine-9", "serving")


async def test_encoders_are_listed_by_name(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    await mesh.coordinator.set_encoders(**{"encoder-10": "unix:/a", "encoder-9": "unix:/b"})
    seen = await until(http, "encoder-10", "serving")
    encoders = [part for part in seen["parts"] if part["kind"] == "encoder"]
    assert [part["name"] for part in encoders] == ["encoder-9", "encoder-10"]
    assert "unix" not in str(seen)


async def test_states_of_the_other_parts(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    await mesh.coordinator.set_state(coordinator_pb2.ENGINE_STATE_PAUSED)
    await until(http, "engine-0", "paused")
    await mesh.coordinator.set_away(True)
    await until(http, "coordinator", "lost")


async def test_an_output_processor_that_does_not_answer(socket_dir: Path) -> None:
    fake = FakeMesh(socket_dir)
    addresses = fake.address("mesh"), fake.address("nowhere")
    async with fake.gateway(output_processors=addresses) as mesh, mesh.http() as http:
        await until(http, "output processor 0", "serving")
        await until(http, "output processor 1", "lost")


async def test_what_placement_compares(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    seen = await until(http, "engine-0", "serving")
    by_score = {"waiting": 0, "running": 3, "score": 11}
    assert (seen["placement"], seen["engines"][0]["placement"]) == ("score", by_score)
    mesh.coordinator.placement = coordinator_pb2.PlacementRule.PLACEMENT_RULE_COST
    await mesh.coordinator.set_engines("engine-0", "engine-1")
    seen = await until(http, "engine-1", "serving")
    assert seen["placement"] == "cost"
    assert seen["engines"][0]["placement"] == by_score | {
        "seats": 0,
        "step_seconds": 0.0,
        "uncached_tokens": 1200,
        "uncached_tokens_per_second": 9600.0,
        "expected_seconds": 0.125,
    }


async def test_a_coordinator_of_another_release_names_no_rule(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.coordinator.placement = coordinator_pb2.PlacementRule.PLACEMENT_RULE_UNSPECIFIED
    await mesh.coordinator.set_engines("engine-0", "engine-1")
    assert (await until(http, "engine-1", "serving"))["placement"] is None
    assert "tokenloom_placement_rule{" not in (await http.get("/metrics")).text
