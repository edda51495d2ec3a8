"""A gateway is killed or stopped under load, and no client is refused: the supervisor holds the listening sockets."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import httpx
import psutil
import pytest

from tokenloom.client import AsyncClient
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2

MODEL = "tokenloom-demo"
PROMPT = list(range(100, 120))
TOKENS = 8
TIMEOUT = 60.0
CLIENTS = 4
"""Of each kind."""
Ask = Callable[[], Awaitable[None]]


@pytest.fixture(scope="module")
def mesh(serve: Any) -> Any:
    """``migrate``: a gateway that is stopped sends the clients that can resume away at once."""
    return serve("--worker", "hash", "--drain", "migrate", TOKENLOOM_HASH_STEP_SECONDS="0.001")


@pytest.fixture
def grpc_address(mesh: Any) -> str:
    return next(str(part["address"]) for part in mesh.ps() if part["service"] == "gateway")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_our_clients_do_not_notice_a_restart(mesh: Any, grpc_address: str, number: signal.Signals) -> None:
    """Streams of 2 s each are in their middle when the gateway goes."""
    streaming = asyncio.Semaphore(0)

    async def stream(client: AsyncClient) -> str:
        text = ""
        stream = await client.stream(PROMPT, max_tokens=1500, temperature=0, ignore_eos=True)
        streaming.release()
        async for chunk in stream:
            text += chunk.text
        assert chunk.usage is not None
        assert chunk.usage.completion_tokens == 1500
        return text

    async with asyncio.timeout(120), AsyncClient(grpc_address, timeout=TIMEOUT) as client:
        expected = await stream(client)
        old = mesh.part("gateway")
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(stream(client)) for _ in range(8)]
            for _ in range(1 + len(tasks)):
                await streaming.acquire()
            old.send_signal(number)
        assert [task.result() for task in tasks] == [expected] * len(tasks)
        await restarted(mesh, old)


def options(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **more}


async def post(http: httpx.AsyncClient, url: str) -> None:
    response = await http.post(f"{url}/v1/completions", json=options())
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == TOKENS


async def call(channel: grpc.aio.Channel) -> None:
    """Make a call as a client that retries nothing."""
    request = inference_pb2.GenerateRequest(
        token_ids=types_pb2.TokenIds(ids=PROMPT),
        sampling_params=types_pb2.SamplingParams(max_tokens=TOKENS, min_tokens=TOKENS, temperature=0),
    )
    responses = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=TIMEOUT)
    assert sum([len(response.token_ids) async for response in responses]) == TOKENS


class Load:
    """Makes requests from several clients until it is left; keeps what failed."""

    def __init__(self) -> None:
        self.num_answered = 0
        self.failures: list[Exception] = []
        self._stopping = False

    @asynccontextmanager
    async def running(self, clients: list[Ask]) -> AsyncIterator["Load"]:
        async with asyncio.TaskGroup() as group:
            for ask in clients:
                group.create_task(self._repeat(ask))
            try:
                yield self
            finally:
                self._stopping = True

    async def answers(self, count: int) -> None:
        """Wait for so many more answers."""
        wanted = self.num_answered + count
        while self.num_answered < wanted and not self.failures:  # noqa: ASYNC110 - the test polls processes too
            await asyncio.sleep(0.01)

    async def _repeat(self, ask: Ask) -> None:
        while not self._stopping and not self.failures:
            try:
                await ask()
                self.num_answered += 1
            except Exception as error:
                self.failures.append(error)


async def restarted(mesh: Any, old: psutil.Process) -> None:
    """Return when another process has taken a gateway's place."""
    while True:
        try:
            if mesh.part("gateway").pid != old.pid:
                return
        except (StopIteration, psutil.NoSuchProcess):
            pass
        await asyncio.sleep(0.05)


async def test_no_connection_is_refused_while_a_killed_gateway_restarts(mesh: Any, grpc_address: str) -> None:
    async def connect_http() -> None:
        async with httpx.AsyncClient(timeout=TIMEOUT) as http:
            await post(http, mesh.url)

    async def connect_grpc() -> None:
        async with grpc.aio.insecure_channel(grpc_address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            await call(channel)

    async with asyncio.timeout(120):
        await connect_http()
        await connect_grpc()
        gateway = mesh.part("gateway")
        gateway.kill()
        gateway.wait(TIMEOUT)
        async with Load().running([connect_http, connect_grpc] * CLIENTS) as load:
            await load.answers(50)
    assert load.failures == []


async def test_no_request_fails_while_a_gateway_is_stopped_under_load(mesh: Any, grpc_address: str) -> None:
    async with httpx.AsyncClient(timeout=TIMEOUT) as http, asyncio.timeout(180):
        channels = [
            grpc.aio.insecure_channel(grpc_address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(CLIENTS)
        ]
        clients: list[Ask] = [lambda: post(http, mesh.url)] * CLIENTS
        clients += [lambda channel=channel: call(channel) for channel in channels]  # type: ignore[misc]
        async with Load().running(clients) as load:
            for _ in range(3):
                await load.answers(50)
                gateway = mesh.part("gateway")
                gateway.terminate()
                await restarted(mesh, gateway)
            await load.answers(50)
        for channel in channels:
            await channel.close()
    assert load.failures == []
