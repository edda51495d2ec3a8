"""A body is read within its limit and the gateway's budget, and its bytes are always returned to the budget."""

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.services.gateway.fakes import HEADERS, MODEL, SOON, FakeMesh
from tests.services.gateway.http.test_http_exchange import FakeConnection
from tokenloom.request import errors
from tokenloom.request.limits import AdmissionLimit
from tokenloom.services.gateway.http.client_flow import ClientDisconnected
from tokenloom.services.gateway.http.request_body import UNREAD_BYTES, BodyTimeout, RequestBody
from tokenloom.services.gateway.tenants.tenant import TenantLimits
from tokenloom.services.gateway.tenants.tenant_shares import TenantShare


class Sender:
    """Sends a body as a connection delivers it."""

    def __init__(self, budget: int = 100) -> None:
        self.budget = AdmissionLimit(budget)
        self.connection = FakeConnection()
        self.body = RequestBody(self.connection.flow, self.budget)

    def send(self, piece: bytes, *, is_last: bool = False) -> None:
        self.body.arrive(piece)
        if is_last:
            self.body.end()

    def leave(self) -> None:
        self.connection.flow.lose()


@pytest.fixture
async def sender() -> Sender:
    return Sender()


@pytest.mark.parametrize("length", [None, 5])
async def test_a_body_in_pieces(sender: Sender, length: int | None) -> None:
    sender.send(b"ab")
    assert sender.budget.taken == 2, "nothing reads it yet"
    reading = asyncio.create_task(sender.body.read(5, length))
    await asyncio.sleep(0)
    assert sender.budget.taken == (length or 2)
    sender.send(b"cd")
    await asyncio.sleep(0)
    assert not reading.done()
    sender.send(b"e", is_last=True)
    await reading
    assert sender.body.is_incomplete is False
    with sender.body as body:
        assert body.data == b"abcde"
        assert sender.budget.taken == 5
    assert not body.data
    assert not sender.budget.taken


async def test_a_body_over_its_limit_is_dropped_at_once(sender: Sender) -> None:
    reading = asyncio.create_task(sender.body.read(5, None))
    await asyncio.sleep(0)
    sender.send(b"abc")
    sender.send(b"def")
    sender.send(b"ghi")
    assert not sender.body.data
    assert not sender.budget.taken
    with pytest.raises(errors.PayloadTooLarge):
        await reading


async def test_a_body_that_is_over_its_limit_before_it_is_read(sender: Sender) -> None:
    sender.send(b"abcdef", is_last=True)
    with pytest.raises(errors.PayloadTooLarge):
        await sender.body.read(5, None)
    assert not sender.budget.taken


async def test_an_announced_body_without_room_is_refused_before_it_is_read(sender: Sender) -> None:
    sender.budget.take(60)
    with pytest.raises(errors.ResourceExhausted):
        await sender.body.read(1000, 41)
    assert sender.budget.taken == 60


@pytest.mark.parametrize("is_read", [False, True])
async def test_a_growing_body_without_room_is_refused(sender: Sender, is_read: bool) -> None:
    sender.budget.take(90)
    reading = asyncio.create_task(sender.body.read(1000, None))
    if is_read:
        await asyncio.sleep(0)
    sender.send(b"x" * 10)
    sender.send(b"x")
    sender.send(b"x", is_last=True)
    with pytest.raises(errors.ResourceExhausted):
        await reading
    assert sender.budget.taken == 90


def a_share(limit: int) -> TenantShare:
    return TenantShare("a", TenantLimits(body_bytes=limit))


@pytest.mark.parametrize("length", [None, 3])
async def test_the_bytes_of_a_body_count_for_its_tenant(sender: Sender, length: int | None) -> None:
    share = a_share(10)
    sender.send(b"a")
    sender.body.count_for(share)
    assert share.body_bytes == 1
    reading = asyncio.create_task(sender.body.read(100, length))
    await asyncio.sleep(0)
    sender.send(b"bc", is_last=True)
    with sender.body:
        await reading
        assert (share.body_bytes, sender.budget.taken) == (3, 3)
    assert (share.body_bytes, sender.budget.taken) == (0, 0)


@pytest.mark.parametrize("length", [None, 5])
async def test_a_body_without_room_in_its_tenants_part_is_refused(sender: Sender, length: int | None) -> None:
    share = a_share(10)
    share.take_bytes(6, 6)
    sender.body.count_for(share)
    sender.send(b"abcde", is_last=True)
    with pytest.raises(errors.RateLimitExceeded) as caught:
        await sender.body.read(100, length)
    assert caught.value.limit == "body_bytes"
    assert (share.body_bytes, sender.budget.taken) == (6, 0)


async def test_a_tenant_that_has_no_room_for_what_has_arrived_already(sender: Sender) -> None:
    share = a_share(10)
    share.take_bytes(9, 9)
    sender.send(b"ab", is_last=True)
    sender.body.count_for(share)
    with pytest.raises(errors.RateLimitExceeded):
        await sender.body.read(100, 2)
    assert (share.body_bytes, sender.budget.taken) == (9, 0)


async def test_a_full_gateway_leaves_nothing_counted_for_the_tenant(sender: Sender) -> None:
    share = a_share(10)
    sender.budget.take(98)
    sender.body.count_for(share)
    with pytest.raises(errors.ResourceExhausted) as caught:
        await sender.body.read(100, 5)
    assert caught.value.http_status == 503
    assert (share.body_bytes, sender.budget.taken) == (0, 98)


async def test_the_connection_pauses_until_the_body_is_read() -> None:
    sender = Sender(1 << 20)
    flow = sender.connection.flow
    sender.send(b" " * UNREAD_BYTES)
    assert not flow.read_paused
    sender.send(b" ")
    assert flow.read_paused
    reading = asyncio.create_task(sender.body.read(1 << 20, None))
    await asyncio.sleep(0)
    assert not flow.read_paused
    sender.send(b" " * UNREAD_BYTES, is_last=True)
    assert not flow.read_paused
    await reading


async def test_the_client_gets_its_continue(sender: Sender) -> None:
    sender.body = RequestBody(sender.connection.flow, sender.budget, expects_continue=True)
    reading = asyncio.create_task(sender.body.read(10, 2))
    await asyncio.sleep(0)
    assert sender.connection.transport.sent == b"HTTP/1.1 100 Continue\r\n\r\n"
    sender.send(b"{}", is_last=True)
    await reading


async def test_a_client_that_leaves(sender: Sender) -> None:
    reading = asyncio.create_task(sender.body.read(10, 5))
    sender.send(b"a")
    await asyncio.sleep(0)
    sender.leave()
    with pytest.raises(ClientDisconnected), sender.body:
        await reading
    assert not sender.budget.taken


async def test_a_body_that_does_not_come(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenloom.services.gateway.http.request_body.BODY_SECONDS", 0)
    with pytest.raises(BodyTimeout), sender.body:
        await sender.body.read(10, 5)
    assert not sender.budget.taken


async def open_post(mesh: FakeMesh, length: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Announce a body and send its first byte."""
    host, _, port = mesh.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n{" % (HEADERS, length))
    return reader, writer


async def test_a_gateway_refuses_bodies_above_its_budget(socket_dir: Path) -> None:
    limits = {"max_body_bytes": 1000, "max_body_bytes_in_flight": 2000}
    good = {"model": MODEL, "prompt": "a" * 100}
    async with FakeMesh(socket_dir).gateway(**limits) as mesh, mesh.http() as http:
        mesh.outputs.auto = ["x"]
        slow = [await open_post(mesh, 990) for _ in range(2)]
        refused = await _until(http, good, 503)
        assert refused.json()["error"]["code"] == "resource_exhausted"
        assert refused.headers["retry-after"] == "1"
        for _, writer in slow:
            writer.close()
        await _until(http, good, 200)
        for _ in range(30):  # what was generated holds no bytes
            assert (await http.post("/v1/completions", json=good)).status_code == 200


async def _until(http: httpx.AsyncClient, body: object, status: int) -> httpx.Response:
    async with asyncio.timeout(SOON):
        while (response := await http.post("/v1/completions", json=body)).status_code != status:
            pass
    return response
