"""A client that leaves ends what is done for it, whichever server tells."""

import asyncio
from typing import Any

import pytest

from tests.services.gateway.http.test_uvicorn_protocol import FakeConnection
from tokenloom.services.gateway.http.exchange import ClientDisconnected, Exchange
from tokenloom.services.gateway.http.uvicorn_protocol import EXTENSION


class Client:
    """Of an exchange under any ASGI server, or, with a connection, under ours."""

    def __init__(self, connection: FakeConnection | None = None) -> None:
        self._left = asyncio.Event()
        self._connection = connection
        scope: dict[str, Any] = {} if connection is None else {"extensions": {EXTENSION: connection.writer}}
        scope |= {"method": "POST", "path": "/", "headers": [], "query_string": b""}
        self.exchange = Exchange(scope, self._receive, self._send)

    def leave(self) -> None:
        self._left.set()
        if self._connection is not None:
            self._connection.cycle.disconnected = True
            for on_lost in tuple(self._connection.watchers):
                on_lost()

    async def _receive(self) -> dict[str, Any]:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        raise AssertionError("nothing is answered")


@pytest.fixture(params=["any server", "ours"])
async def client(request: pytest.FixtureRequest) -> Client:
    return Client(FakeConnection() if request.param == "ours" else None)


async def test_leaving_cancels_the_body(client: Client) -> None:
    entered = asyncio.Event()

    async def serve() -> None:
        with client.exchange.until_disconnected():
            entered.set()
            await asyncio.Event().wait()

    serving = asyncio.create_task(serve())
    await entered.wait()
    client.leave()
    with pytest.raises(ClientDisconnected):
        await asyncio.wait_for(serving, 30)


async def test_another_s_cancellation_stays_one(client: Client) -> None:
    with pytest.raises(asyncio.CancelledError), client.exchange.until_disconnected():
        raise asyncio.CancelledError


async def test_after_the_body_nothing_is_cancelled(client: Client) -> None:
    with client.exchange.until_disconnected():
        pass
    client.leave()
    await asyncio.sleep(0)


async def test_who_left_before_is_not_served() -> None:
    client = Client(FakeConnection())
    client.leave()
    with pytest.raises(ClientDisconnected), client.exchange.until_disconnected():
        raise AssertionError("it was served")
