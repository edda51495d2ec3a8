"""Operators load, unload and pin adapters: on all engines or on none."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.services.gateway.fakes import MODEL, SOON, FakeMesh
from tests.services.gateway.mesh.fake_engines import ADMIN, KEYS, FakeEngine, with_engines
from tests.services.gateway.test_several_meshes import until
from tokenloom.request import errors
from tokenloom.request.adapter_names import MAX_NAME

PIRATE = {"lora_name": "pirate", "lora_path": "/adapters/pirate"}


class Operated:
    """A mesh of two engines and an operator's client."""

    def __init__(self, mesh: FakeMesh, engines: dict[str, FakeEngine], http: httpx.AsyncClient) -> None:
        self.mesh = mesh
        self.engines = engines
        self.http = http

    @property
    def loaded(self) -> list[dict[str, bytes]]:
        """What each engine has, by name."""
        return [{n: a.digest for n, a in engine.loaded.items()} for engine in self.engines.values()]

    async def post(self, action: str, status: int = 200, **body: Any) -> dict[str, Any]:
        response = await self.http.post(f"/v1/{action}_lora_adapter", json=body, headers=ADMIN)
        assert response.status_code == status, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def is_served(self) -> bool:
        response = await self.http.post("/v1/completions", json={"model": "pirate", "prompt": "hi"})
        assert response.status_code in (200, 404)
        return response.status_code == 200


@pytest.fixture
async def operated(socket_dir: Path) -> AsyncIterator[Operated]:
    mesh = FakeMesh(socket_dir)
    mesh.outputs.auto = ["ahoy"]
    async with with_engines(mesh, "e0", "e1") as engines, mesh.gateway(**KEYS), mesh.http() as http:
        await until(http, "ok")
        yield Operated(mesh, engines, http)


async def test_load_use_pin_list_and_unload(operated: Operated) -> None:
    assert await operated.post("load", **PIRATE) == {
        "status": "loaded",
        "state": "done",
        "engines": ["e0", "e1"],
    }
    assert operated.loaded[0] == operated.loaded[1] != {}
    assert operated.mesh.coordinator.adapters["pirate"].path == PIRATE["lora_path"]
    assert await operated.is_served()
    (request, *_) = (await operated.http.get("/requests", headers=ADMIN)).json()["requests"]
    assert request["model"] == f"{MODEL}:pirate"
    again = await operated.post("load", 400, **PIRATE)
    assert "loaded already; set load_inplace" in again["error"]["message"]
    assert (await operated.post("pin", lora_name="pirate"))["status"] == "pinned"
    assert operated.mesh.coordinator.adapters["pirate"].pinned
    answer = (await operated.http.get("/v1/lora_adapters", headers=ADMIN)).json()
    (listed,) = answer["adapters"]
    assert (listed["id"], listed["pinned"]) == (f"{MODEL}:pirate", True)
    assert listed["engines"] == {name: {"in_slot": True, "requests": 2, "rank": 8} for name in ("e0", "e1")}
    api = (await operated.http.get("/openapi.json")).json()
    schema = api["paths"]["/v1/lora_adapters"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(answer, {**schema, "components": api["components"]})
    assert (await operated.post("pin", lora_name="pirate", pinned=False))["status"] == "unpinned"
    assert (await operated.post("unload", lora_name="pirate"))["status"] == "unloaded"
    assert operated.loaded == [{}, {}]
    assert not await operated.is_served()
    missing = await operated.post("unload", 404, lora_name="pirate")
    assert "no LoRA adapter 'pirate' is loaded" in missing["error"]["message"]
    await operated.post("pin", 404, lora_name="pirate")


@pytest.mark.parametrize("action", ["load", "pin", "unload"])
async def test_an_engine_that_is_lost_takes_what_the_others_have_when_it_returns(
    operated: Operated, action: str
) -> None:
    if action != "load":
        await operated.post("load", **PIRATE)
    lost = operated.engines["e1"]
    lost.error = errors.Unavailable("the engine has ended")
    answer = await operated.post(action, 202, **(PIRATE if action == "load" else {"lora_name": "pirate"}))
    assert (answer["state"], answer["engines"]) == ("converging", ["e0"])
    assert answer["converging"] == {"e1": "e1: the engine has ended"}
    recorded = operated.mesh.coordinator.adapters
    assert ("pirate" in recorded) == (action != "unload"), "the coordinator sends it to engines that join"
    operated.engines["e0"].error = lost.error
    await operated.post("load", 503, lora_name="other", lora_path="/x")
    assert "other" not in recorded


async def test_an_engine_that_fails_leaves_nothing_on_the_others(operated: Operated) -> None:
    operated.engines["e1"].error = errors.ResourceExhausted("4 adapters are loaded")
    failed = await operated.post("load", 503, **PIRATE)
    assert "e1: 4 adapters are loaded" in failed["error"]["message"]
    assert operated.loaded == [{}, {}]
    assert not await operated.is_served()
    operated.engines["e1"].error = None
    operated.engines["e1"].files[PIRATE["lora_path"]] = b"other"
    differ = await operated.post("load", 400, **PIRATE)
    assert "files differ between e0 and e1" in differ["error"]["message"]
    assert operated.loaded == [{}, {}]


async def test_a_replacement_that_fails_brings_the_former_adapter_back(operated: Operated) -> None:
    await operated.post("load", **PIRATE)
    await operated.post("pin", lora_name="pirate")
    before = operated.loaded
    operated.engines["e1"].files["/new"] = b"other"
    await operated.post("load", 400, lora_name="pirate", lora_path="/new", load_inplace=True)
    assert operated.loaded == before
    operated.engines["e1"].files.clear()
    await operated.post("load", lora_name="pirate", lora_path="/new", load_inplace=True)
    assert operated.loaded[0] == operated.loaded[1] != before[0]
    recorded = operated.mesh.coordinator.adapters["pirate"]
    assert (recorded.path, recorded.pinned) == ("/new", True)


async def test_a_pin_that_fails_is_undone(operated: Operated) -> None:
    await operated.post("load", **PIRATE)
    operated.engines["e1"].error = errors.ResourceExhausted("all slots but one are pinned")
    await operated.post("pin", 503, lora_name="pirate")
    assert not any(engine.loaded["pirate"].pinned for engine in operated.engines.values())


@pytest.mark.parametrize("body", [PIRATE, {"lora_name": "pirate"}])
async def test_a_gateway_that_stops_undoes_what_not_all_engines_have(socket_dir: Path, body: dict[str, str]) -> None:
    mesh, is_pin = FakeMesh(socket_dir), body is not PIRATE
    async with with_engines(mesh, "e0", "e1") as engines, AsyncExitStack() as running:
        await running.enter_async_context(mesh.gateway(**KEYS, drain_timeout=0))
        async with mesh.http() as http:
            await until(http, "ok")
            if is_pin:
                await http.post("/v1/load_lora_adapter", json=PIRATE, headers=ADMIN)
            engines["e1"].may_change.clear()
            path = f"/v1/{'pin' if is_pin else 'load'}_lora_adapter"
            changing = asyncio.create_task(http.post(path, json=body, headers=ADMIN))
            async with asyncio.timeout(SOON):
                while not any(adapter.pinned >= is_pin for adapter in engines["e0"].loaded.values()):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await running.aclose()
            assert (await changing).status_code == 503
        assert [list(engine.loaded) for engine in engines.values()] == [["pirate"] * is_pin] * 2
        assert not any(adapter.pinned for engine in engines.values() for adapter in engine.loaded.values())


async def test_only_operators_change_adapters_and_only_with_good_names(operated: Operated) -> None:
    for headers in ({}, {"authorization": "Bearer user"}):
        for action in ("load", "unload", "pin"):
            refused = await operated.http.post(f"/v1/{action}_lora_adapter", json=PIRATE, headers=headers)
            assert refused.status_code == 401
    for name in ("", "../x", "a..b", "a:b", "/a", "a/", "a b", "x" * (MAX_NAME + 1), "é"):
        wrong = await operated.post("load", 400, lora_name=name, lora_path="/x")
        assert wrong["error"]["param"] == "lora_name", name
    for path in ("", "x" * 5000, "a\0b"):
        assert (await operated.post("load", 400, lora_name="a", lora_path=path))["error"]["param"] == "lora_path"
    for body in ({}, {"lora_name": 1, "lora_path": "x"}, {"lora_name": "a"}):
        await operated.post("load", 400, **body)
    assert operated.loaded == [{}, {}]


async def test_engines_without_adapters_take_no_part(operated: Operated) -> None:
    operated.mesh.coordinator.limits.max_lora_rank = 0
    await operated.mesh.coordinator.set_engines("e0", "e1")
    refused: dict[str, Any] = {"status": "loaded"}
    while refused.get("status") == "loaded":  # until the gateway has the snapshot
        # Refused, too, if the snapshot has arrived since the adapter was loaded.
        await operated.http.post("/v1/unload_lora_adapter", json={"lora_name": "pirate"}, headers=ADMIN)
        response = await operated.http.post("/v1/load_lora_adapter", json=PIRATE, headers=ADMIN)
        refused = response.json()
    assert "start the engines with --enable-lora" in refused["error"]["message"]


async def test_an_unload_stands_though_engines_are_lost_and_the_coordinator_was_restarted(operated: Operated) -> None:
    await operated.post("load", **PIRATE)
    coordinator = operated.mesh.coordinator
    coordinator.taken_over = [coordinator.adapters["pirate"]]
    for engine in operated.engines.values():
        engine.error = errors.Unavailable("gone")
    answer = await operated.post("unload", 202, lora_name="pirate")
    assert (answer["engines"], list(answer["converging"])) == ([], ["e0", "e1"])
    assert not coordinator.taken_over
    assert "pirate" not in coordinator.adapters


async def test_a_coordinator_that_is_restarted_is_asked_again(operated: Operated) -> None:
    operated.mesh.coordinator.failures = [errors.Unavailable("restarting")]
    await operated.post("load", **PIRATE)
    assert "pirate" in operated.mesh.coordinator.adapters
