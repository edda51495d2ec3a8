"""Replicas of the tokenizer: turns, retries, and replicas that differ from the first one."""

import asyncio
from pathlib import Path

import grpc.aio
import httpx
import pytest

from tests.loop_clock import settle
from tests.services.gateway.fakes import SOON, FakeMesh
from tokenloom.request import errors
from tokenloom.services.gateway.mesh.tokenizer_client import MAX_CALLS, TokenizerClient
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.peers.members import PeerMembers
from tokenloom.v1 import tokenizer_pb2

BODY = {"prompt": "text", "max_tokens": 3}


async def test_calls_take_turns(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ["x"]
    for _ in range(6):
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
    assert mesh.tokenizer.calls == mesh.second_tokenizer.calls == 3


async def test_an_unavailable_replica_is_passed_over(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.outputs.auto = ["x"]
    mesh.tokenizer.unavailable = True
    for _ in range(4):
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
    assert mesh.tokenizer.calls >= 1


async def test_all_unavailable(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    mesh.tokenizer.unavailable = mesh.second_tokenizer.unavailable = True
    response = await http.post("/v1/completions", json=BODY)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    mesh.tokenizer.unavailable = False
    mesh.outputs.auto = ["x"]
    async with asyncio.timeout(30):
        while (await http.post("/v1/completions", json=BODY)).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_replica_of_another_model_gets_nothing(socket_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    mesh = FakeMesh(socket_dir)
    mesh.second_tokenizer.fingerprint.tokenizer = b"other" * 4
    mesh.second_tokenizer.tells.clear()  # the first to answer is the one that is served
    async with mesh.gateway(), mesh.http() as http:
        mesh.second_tokenizer.tells.set()
        async with asyncio.timeout(SOON):
            while "differs from the first one" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        mesh.outputs.auto = ["x"]
        for _ in range(4):
            assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        assert mesh.second_tokenizer.calls == 0


class DeadReplica:
    """A replica that no call reaches."""

    def __init__(self) -> None:
        self.calls = 0

    async def Encode(self, request: object, metadata: object) -> None:
        self.calls += 1
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())


async def test_calls_that_fail_everywhere_do_not_multiply() -> None:
    client = TokenizerClient(PeerMembers(("unix:/none",)), Channels(None))
    replicas = {f"unix:/{number}": DeadReplica() for number in range(8)}
    client._stubs = replicas  # type: ignore[assignment]
    for _ in range(200):
        client._alive = set(replicas)
        with pytest.raises(errors.Unavailable):
            await client.encode(["text"])
    num_calls = sum(replica.calls for replica in replicas.values())
    assert 400 <= num_calls < 450  # one free retry each, then a tenth of the requests, and the reserve


class LostReplica(DeadReplica):
    """A replica whose calls fail some time later."""

    def __init__(self) -> None:
        super().__init__()
        self.is_noticed = asyncio.Event()

    async def Encode(self, request: object, metadata: object) -> None:
        self.calls += 1
        await self.is_noticed.wait()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata())


class LivingReplica:
    def __init__(self) -> None:
        self.calls = 0

    async def Encode(self, request: object, metadata: object) -> tokenizer_pb2.EncodeResponse:
        self.calls += 1
        return tokenizer_pb2.EncodeResponse()


async def test_calls_in_between_do_not_turn_a_retry_back_to_the_lost_replica() -> None:
    client = TokenizerClient(PeerMembers(("unix:/none",)), Channels(None))
    lost, living = LostReplica(), LivingReplica()
    client._stubs = {"unix:/0": living, "unix:/1": lost}  # type: ignore[dict-item]
    client._alive = set(client._stubs)
    first = asyncio.ensure_future(client.encode(["text"]))
    await settle()
    await client.encode(["text"])
    lost.is_noticed.set()
    await first
    assert (lost.calls, living.calls) == (1, 2)


class SlowReplica:
    """A replica that answers when it is asked to."""

    def __init__(self) -> None:
        self.calls = 0
        self.answers = asyncio.Event()

    async def Encode(self, request: object, metadata: object) -> int:
        self.calls += 1
        await self.answers.wait()
        return self.calls


async def test_a_burst_of_calls_waits_in_the_gateway() -> None:
    client = TokenizerClient(PeerMembers(("unix:/none",)), Channels(None))
    replica = SlowReplica()
    client._stubs = {"unix:/0": replica}  # type: ignore[dict-item]
    client._alive = {"unix:/0"}
    calls = [asyncio.ensure_future(client.encode(["text"])) for _ in range(3 * MAX_CALLS)]
    await settle()
    assert replica.calls == MAX_CALLS
    calls[-1].cancel()  # the deadline of a request that waits
    replica.answers.set()
    await asyncio.wait(calls)
    assert replica.calls == 3 * MAX_CALLS - 1


class ReconnectedReplica:
    """A replica whose connection is lost in its first call."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self.code = code
        self.waits: list[bool] = []

    async def Encode(self, request: object, wait_for_ready: bool = False, **_: object) -> int:
        self.waits.append(wait_for_ready)
        if not wait_for_ready:
            raise grpc.aio.AioRpcError(self.code, grpc.aio.Metadata(), grpc.aio.Metadata())
        return 7


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
async def test_the_only_replica_is_asked_again_when_its_connection_was_lost(code: grpc.StatusCode) -> None:
    client = TokenizerClient(PeerMembers(("unix:/none",)), Channels(None))
    replica = ReconnectedReplica(code)
    client._stubs = {"unix:/0": replica}  # type: ignore[dict-item]
    client._alive = {"unix:/0"}
    assert await client.encode(["text"]) == 7  # type: ignore[comparison-overlap]
    with pytest.raises(errors.Unavailable):
        await client.encode(["text"])  # no probe has found it alive since then
    assert replica.waits == [False, True, False]
