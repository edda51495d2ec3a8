"""Every entrance of a gateway has every guard: see ``table.py``, whose cells are tested here one by one."""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
import pytest_asyncio

from tests.mesh.entrances.calls import (
    GENERATING,
    POOLING,
    STORING,
    TOKENIZING,
    WAYS,
    Client,
    inference,
    kserve,
    outcome,
)
from tests.mesh.entrances.table import (
    BYTES,
    CHARGE,
    DEADLINE,
    GUARDS,
    IDLE,
    KEPT,
    KEY,
    OUTPUTS,
    SHARE,
    TABLE,
    TOKENS,
    Nothing,
    Shown,
    probed,
)
from tests.mesh.harness import SOON, Mesh, Part
from tests.ready_channel import ready_channel
from tokenloom.request.limits import AdmissionLimit
from tokenloom.services.gateway.http import request_body
from tokenloom.services.gateway.mesh.pending_request import PendingRequest
from tokenloom.services.gateway.mesh.text_client import TextClient
from tokenloom.services.gateway.mesh.tokenizer_client import TokenizerClient
from tokenloom.services.gateway.page.page_routes import PAGE_FILES
from tokenloom.services.gateway.service import GatewayService
from tokenloom.v1 import inference_pb2
from tokenloom.v1.engine_pb2 import PAUSE_MODE_KEEP, PauseRequest, ResumeRequest
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub
from tokenloom.v1.kserve import grpc_service_pb2
from tokenloom.v1.vllm import vllm_engine_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROOT = Path(__file__).parents[3]
LIMITS: dict[str, dict[str, float]] = {
    "narrow": {"live_outputs": 1},
    "spent": {"tokens_per_second": 0.001, "token_burst": 200},
    "small": {"body_bytes": 4000},
    "counted": {},
    "other": {},
}
"""The tenants. Each one's key is its name."""
TENANT_CODES = ("429", "RESOURCE_EXHAUSTED", "rate_limit_exceeded")
"""Of a refusal for a tenant's limit."""
BURST = 200
BODY = 4000
CALLS = {**GENERATING, **POOLING, **TOKENIZING, **STORING}
LINE = "a line of POST /v1/batches"
PACKAGES = {"Inference": "tokenloom.v1", "GRPCInferenceService": "inference", "VllmEngine": "vllm.grpc.engine"}
SESSIONS = ("Inference/GenerateSession", "GRPCInferenceService/ModelStreamInfer")


@pytest.fixture(scope="module")
def mesh_options(mesh_dir: Path) -> dict[str, Any]:
    tables = []
    for name, limits in LIMITS.items():
        digest = hashlib.sha256(name.encode()).hexdigest()
        own = "".join(f"{limit} = {value}\n" for limit, value in limits.items())
        tables.append(f'[[tenant]]\nname = "{name}"\nkey_sha256 = ["{digest}"]\n[tenant.limits]\n{own}')
    keys = mesh_dir / "keys.toml"
    keys.write_text("\n".join(tables))
    gateway = {"api_key_file": keys, "cache_salt_secret": "s" * 32, "admin_api_key": ["admin"]}
    return {
        "engine": {"hash_step_seconds": 0.005},
        "gateway": gateway | {"batch_dir": mesh_dir / "gateway-0.d", "page_kills": mesh_dir / "none.sock"},
    }


@dataclass
class Gateways:
    """Gateways of one mesh.

    Attributes:
        plain: Has the tenants' limits only.
        full: Is full with one output.
        hasty: Ends requests and idle sessions after half a second.
    """

    plain: Part
    full: Part
    hasty: Part


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateways(mesh: Mesh) -> AsyncIterator[Gateways]:
    def another(name: str, **extra: Any) -> Part:
        own = {"instance_id": name, "listen": mesh.address(name), "batch_dir": mesh.directory / f"{name}.d"}
        return Part(GatewayService, msgspec.structs.replace(mesh.gateway.settings, **own, **extra))

    full, hasty = another("full", max_live_requests=1), another("hasty", request_timeout=0.5)
    await asyncio.gather(full.start(), hasty.start())
    try:
        yield Gateways(mesh.gateway, full, hasty)
    finally:
        await asyncio.gather(full.stop(), hasty.stop())


@asynccontextmanager
async def paused(mesh: Mesh) -> AsyncIterator[None]:
    """The engine computes nothing for the length of the ``async with``."""
    async with ready_channel(mesh.engines[0].settings.listen) as channel:
        admin = EngineAdminStub(channel)
        await admin.Pause(PauseRequest(mode=PAUSE_MODE_KEEP))
        try:
            yield
        finally:
            await admin.Resume(ResumeRequest())


def routes(gateway: Part) -> dict[str, Sequence[str]]:
    """Return the methods of each route, as the application has them."""
    assert isinstance(gateway.service, GatewayService)
    found = {
        path: tuple(methods) for path, methods in gateway.service.routes.items() if not path.startswith(PAGE_FILES)
    }
    return found | {f"{PAGE_FILES}*": ("GET",)}


def rpcs() -> list[str]:
    protos = inference_pb2, grpc_service_pb2, vllm_engine_pb2
    services = [each.DESCRIPTOR.services_by_name for each in protos]
    return [
        f"{service.name}/{method.name}"
        for by_name in services
        for service in by_name.values()
        for method in service.methods
    ]


async def test_the_table_has_every_entrance_of_the_gateway(gateways: Gateways) -> None:
    http = {f"{method} {path}" for path, methods in routes(gateways.plain).items() for method in methods}
    ways = {name for name in TABLE if name not in http and " " in name.removeprefix("POST ").removeprefix("a ")}
    assert {name for name in TABLE if name not in ways} == http | set(rpcs())
    assert ways == {name for name in (*CALLS, *WAYS) if name not in http and "/" not in name.partition(" ")[0]}
    assert all(tuple(row) == GUARDS for row in TABLE.values())


async def test_a_cell_names_its_test_or_its_reason() -> None:
    for row in TABLE.values():
        for cell in row.values():
            if isinstance(cell, Shown):
                path, _, name = cell.test.partition("::")
                assert re.search(rf"def {name}\(", (ROOT / path).read_text()), cell.test
            if isinstance(cell, Nothing):
                assert len(cell.reason.split()) > 3


@pytest.mark.parametrize("name", probed(KEY))
async def test_key(gateways: Gateways, name: str) -> None:
    for key in ("", "unknown"):
        client = Client(gateways.plain, key)
        if name in rpcs():
            service, _, method = name.partition("/")
            code = await _code(client, f"/{PACKAGES[service]}.{service}/{method}")
            assert code == grpc.StatusCode.UNAUTHENTICATED
        else:
            method, path = name.split()
            async with client.http() as http:
                response = await http.request(method, path.replace("*", "x"))
            assert response.status_code == 401


async def _code(client: Client, path: str) -> grpc.StatusCode:
    """Return the code of a call that sends nothing but an empty message."""
    async with ready_channel(client.address) as channel:
        call = channel.stream_stream(path)(iter([b""]), metadata=client.metadata if client.key else ())
        code: grpc.StatusCode = await call.code()
        return code


async def expect_refusal(client: Client, name: str, limit: str, *codes: str) -> None:
    """Call an entrance that a limit refuses, and see the limit count it. A batch's line waits instead of failing."""
    before = await client.refused(limit)
    if name == LINE:
        line = asyncio.create_task(outcome(CALLS[name], client))
        await client.until_refused(limit, before + 1)
        line.cancel()
        await asyncio.wait([line])
        return
    reply = await outcome(CALLS[name], client)
    assert any(code in reply.error for code in codes), reply
    assert await client.refused(limit) == before + 1


@pytest.mark.parametrize("name", probed(SHARE))
async def test_tenant_share(gateways: Gateways, name: str) -> None:
    narrow, other = Client(gateways.plain, "narrow"), Client(gateways.plain, "other")
    if name in WAYS:
        begun = await WAYS[name].begin(narrow, 150)
        await expect_refusal(narrow, "POST /v1/completions", "live_outputs", "429")
        assert await WAYS[name].go_on(narrow, begun, 150) > 150
        await narrow.until_idle()
        return
    async with narrow.held():
        await expect_refusal(
            narrow, name, "live_outputs", "429", "RESOURCE_EXHAUSTED", "live_outputs", "rate_limit_exceeded"
        )
        assert not (await outcome(CALLS[name], other)).error
    await narrow.until_idle()
    assert not (await outcome(CALLS[name], narrow)).error, "what the refused call had taken is given back"
    await narrow.until_idle()


@pytest.mark.parametrize("name", probed(OUTPUTS))
async def test_outputs(gateways: Gateways, name: str) -> None:
    holder, other = Client(gateways.full, "counted"), Client(gateways.full, "other")
    async with holder.held():
        await expect_refusal(other, name, "max_live_requests", "503", "RESOURCE_EXHAUSTED", "too many", "server_error")
    await holder.until_idle()


@pytest.mark.parametrize("name", probed(TOKENS))
async def test_tokens(gateways: Gateways, name: str) -> None:
    client = Client(gateways.plain, "spent")
    await client.spend(BURST)
    await expect_refusal(
        client, name, "tokens_per_second", "429", "RESOURCE_EXHAUSTED", "tokens_per", "rate_limit_exceeded"
    )
    await client.until_idle()


@pytest.mark.parametrize("name", probed(BYTES))
async def test_bytes(gateways: Gateways, name: str) -> None:
    client = Client(gateways.plain, "small")
    async with client.held_bytes(BODY - 8):
        await expect_refusal(client, name, "body_bytes", "429", "RESOURCE_EXHAUSTED", "bytes")
    assert not (await outcome(CALLS[name], client)).error


@pytest.mark.parametrize("name", probed(KEPT))
async def test_bytes_kept(gateways: Gateways, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prompt that waits for its answer is counted, once for each call, and given back at the end."""
    limits, taken = set[AdmissionLimit](), list[int]()

    def take(
        self: PendingRequest,
        submit: object,
        collector: object,
        index: int,
        kept: AdmissionLimit,
        *rest: Any,
        **more: Any,
    ) -> None:
        before = kept.taken
        init(self, submit, collector, index, kept, *rest, **more)  # type: ignore[arg-type]
        limits.add(kept)
        taken.append(kept.taken - before)
        assert taken[-1] == self.num_bytes > 0

    init = PendingRequest.__init__
    monkeypatch.setattr(PendingRequest, "__init__", take)
    client = Client(gateways.plain, "other")
    if name in WAYS:
        begun = await WAYS[name].begin(client, 50)
        await WAYS[name].go_on(client, begun, 50)
        assert len(taken) == 2
    else:
        assert not (await outcome(CALLS[name], client)).error
        assert len(taken) == 1
    await client.until_idle()
    assert not any(limit.taken for limit in limits)


@pytest.mark.parametrize("name", probed(DEADLINE))
async def test_deadline(mesh: Mesh, gateways: Gateways, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client, loop = Client(gateways.hasty, "other"), asyncio.get_running_loop()
    began = loop.time()
    if name in WAYS:
        begun = await WAYS[name].begin(client, 250)  # they take longer than both timeouts
        reply = await outcome(lambda client: WAYS[name].go_on(client, begun, 250), client)
    elif name in TOKENIZING:
        for method in ("encode", "encode_chat", "decode"):
            monkeypatch.setattr(TokenizerClient, method, _forever)
        monkeypatch.setattr(TextClient, "_call", _forever)
        reply = await outcome(CALLS[name], client)
    else:
        async with paused(mesh):
            reply = await outcome(CALLS[name], client)
    # 503: the engine was taken out of service before the request reached it, and the request waited for another one.
    ends = "504", "deadline", "longer than", "server_error", "503", "unavailable"
    assert any(code in reply.error.lower() for code in ends), reply
    assert loop.time() - began > 0.2
    await client.until_idle()


async def _forever(*_: object, **__: object) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("name", probed(IDLE))
async def test_idle_time(gateways: Gateways, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends nothing more is not waited for, and what it held is free again."""
    if name not in SESSIONS:
        monkeypatch.setattr(request_body, "BODY_SECONDS", 0.05)
        key = "admin" if "lora" in name else "other"
        status = await Client(gateways.plain, key).stalled(*name.split())
        assert status == 408
        return
    client = Client(gateways.hasty, "other")
    opening = inference(client) if name == SESSIONS[0] else kserve(client)
    async with asyncio.timeout(SOON), opening as stub:
        call = getattr(stub, name.partition("/")[2])(metadata=client.metadata)
        assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await client.until("tokenloom_tenant_sessions", lambda number: not number)


@pytest.mark.parametrize("name", probed(CHARGE))
async def test_charge_once(gateways: Gateways, name: str) -> None:
    client = Client(gateways.plain, "counted")
    before = await client.charged()
    if name in WAYS:
        begun = await WAYS[name].begin(client, 100)
        reply = await outcome(lambda client: WAYS[name].go_on(client, begun, 100), client)
    else:
        reply = await outcome(CALLS[name], client)
    assert not reply.error
    assert reply.tokens > 0
    await client.until_idle()
    assert await client.charged() - before == reply.tokens
