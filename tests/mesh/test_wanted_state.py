"""An operator wants a state of the whole mesh: engines that come back take it, and one that fails is named."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.mesh.asking import ask
from tests.mesh.harness import SOON, VOCAB_SIZE, Mesh
from tests.ready_channel import ready_channel
from tokenloom.model_files.checkpoint import weights_fingerprint
from tokenloom.request.errors import FailedPrecondition
from tokenloom.services.coordinator.coordinator_servicer import CoordinatorServicer
from tokenloom.services.coordinator.engines.engine_record import EngineRecord
from tokenloom.services.engine.engine_admin import Administration
from tokenloom.v1.engine_pb2 import SetRoleRequest
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub
from tokenloom.v1.types_pb2 import ENGINE_ROLE_DECODE, ENGINE_ROLE_PREFILL, EngineRole

ADMIN = {"authorization": "Bearer root"}
KEYS = {"admin_api_key": ("root",)}
NAMES = ["engine-0", "engine-1"]


def roles(index: int) -> dict[str, Any]:
    return {"role": "decode" if index else "prefill", "kv_transports": ("shm",)}


@pytest.fixture
async def mesh(socket_dir: Path) -> AsyncIterator[Mesh]:
    async with Mesh(socket_dir, engines=2, gateway=KEYS, engine=roles).running() as made:
        yield made


async def post(http: httpx.AsyncClient, path: str) -> dict[str, Any]:
    response = await http.post(path, headers=ADMIN)
    assert response.status_code in (200, 202), response.text
    answer: dict[str, Any] = response.json()
    assert (answer["state"] == "done") == (response.status_code == 200)
    return answer


async def until_equal(http: httpx.AsyncClient, path: str, value: bool) -> None:
    async with asyncio.timeout(SOON):
        while (answer := await http.get(path, headers=ADMIN)).is_error or (  # noqa: ASYNC110
            answer.json()["engines"] != dict.fromkeys(NAMES, value)
        ):
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("begin", "end", "shown"),
    [("/pause?mode=keep", "/resume", "/is_paused"), ("/sleep", "/wake_up", "/is_sleeping")],
)
@pytest.mark.parametrize("also", [False, True])
async def test_an_engine_that_comes_back_is_as_the_others(
    mesh: Mesh, begin: str, end: str, shown: str, also: bool
) -> None:
    """The state outlives the coordinator too (``also``), because the other engine knows it."""
    async with mesh.http() as http:
        await post(http, begin)
        await mesh.engines[0].kill()
        if also:
            await mesh.coordinator.kill()
            await mesh.coordinator.start()
        await mesh.engines[0].start()
        asked = asyncio.create_task(ask(http, [1, 2, 3], 3))
        await until_equal(http, shown, True)
        assert not asked.done()
        assert (await post(http, end))["engines"] == NAMES
        async with asyncio.timeout(SOON):
            assert (await asked).token_ids == mesh.expected([1, 2, 3], 3)


@pytest.mark.parametrize("end", ["/wake_up", "/resume"])
async def test_a_sleep_that_fails_on_one_engine_names_it_and_can_be_ended(
    mesh: Mesh, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep, failures = Administration.sleep, [True]

    async def fail(engine: Administration, level: int, mode: Any) -> None:
        if engine._engine.host.settings.instance_id == "engine-1" and failures:
            raise FailedPrecondition("a worker has failed")
        await sleep(engine, level, mode)

    monkeypatch.setattr(Administration, "sleep", fail)
    async with mesh.http() as http:
        answer = await post(http, "/sleep")
        assert (answer["engines"], answer["converging"]) == (["engine-0"], {"engine-1": "a worker has failed"})
        asked = asyncio.create_task(ask(http, [1, 2, 3], 3))
        assert await post(http, "/sleep") == answer, "it may be repeated"
        assert not asked.done(), "the engine that is awake gets no requests"
        if end == "/resume":
            failures.clear()
            await until_equal(http, "/is_sleeping", True)  # it goes on trying
        assert (await post(http, end))["engines"] == NAMES
        await until_equal(http, "/is_paused", False)
        async with asyncio.timeout(SOON):
            assert (await asked).token_ids == mesh.expected([1, 2, 3], 3)


async def test_a_role_outlives_the_process(mesh: Mesh) -> None:
    def role() -> EngineRole:
        servicer = mesh.coordinator.service.servicer  # type: ignore[union-attr]
        entry = servicer._registry.entry("engine-1")
        return EngineRole.ENGINE_ROLE_UNSPECIFIED if entry is None else entry.report.role

    async with ready_channel(mesh.engines[1].settings.listen) as channel:
        await EngineAdminStub(channel).SetRole(SetRoleRequest(role=ENGINE_ROLE_PREFILL))
    async with asyncio.timeout(SOON):
        while role() != ENGINE_ROLE_PREFILL:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await mesh.engines[1].kill()
    await mesh.engines[1].start()
    assert role() == ENGINE_ROLE_PREFILL != ENGINE_ROLE_DECODE


def checkpoint(path: Path, weights: bytes, vocab_size: int | None = None) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"vocab_size": vocab_size or VOCAB_SIZE}))
    (path / "model.safetensors").write_bytes(weights)
    return path


async def test_weights_of_the_whole_mesh(mesh: Mesh, tmp_path: Path) -> None:
    new, unfit = checkpoint(tmp_path / "new", b"new"), checkpoint(tmp_path / "unfit", b"unfit", 5)
    registry: Any = mesh.coordinator.service.servicer._registry  # type: ignore[union-attr]

    def weights(name: str) -> bytes:
        entry = registry.entry(name)
        return b"" if entry is None else bytes(entry.identity.fingerprint.weights)

    async with mesh.http() as http:
        before = registry.wanted.revision
        for path in (unfit, "/nowhere", "relative"):
            refused = await http.post(f"/reload_weights?path={path}", headers=ADMIN)
            assert refused.status_code == 400, refused.text
        assert registry.wanted.revision == before, "a path that is refused changes nothing"
        asked = [asyncio.create_task(ask(http, [1, 2, 3], 60)) for _ in range(4)]
        assert (await post(http, f"/reload_weights?path={new}"))["engines"] == NAMES
        assert [weights(name) for name in NAMES] == [weights_fingerprint(new)] * 2
        async with asyncio.timeout(SOON):
            for each in asked:
                assert (await each).token_ids == mesh.expected([1, 2, 3], 60)
        await mesh.engines[1].kill()
        await mesh.engines[1].start()
        async with asyncio.timeout(SOON):
            while weights("engine-1") != weights_fingerprint(new):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert (await ask(http, [1, 2, 3], 3)).token_ids == mesh.expected([1, 2, 3], 3)


@pytest.mark.parametrize("older", ["coordinator", "engines"])
async def test_parts_of_an_older_release_are_asked_one_by_one(
    mesh: Mesh, older: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unknown(*_: object) -> None:
        raise NotImplementedError

    if older == "coordinator":
        monkeypatch.setattr(CoordinatorServicer, "SetDesiredState", unknown)
        servicer: Any = mesh.coordinator.service.servicer  # type: ignore[union-attr]
        monkeypatch.setattr(servicer, "SetDesiredState", unknown, raising=False)
        await mesh.coordinator.kill()
        await mesh.coordinator.start()
    else:
        monkeypatch.setattr(EngineRecord, "follows", False)
    async with mesh.http() as http:
        await mesh.until_missing()
        assert (await post(http, "/pause?mode=keep"))["engines"] == NAMES
        await until_equal(http, "/is_paused", True)
        assert (await post(http, "/resume"))["engines"] == NAMES
        async with asyncio.timeout(SOON):
            assert (await ask(http, [1, 2, 3], 3)).token_ids == mesh.expected([1, 2, 3], 3)
