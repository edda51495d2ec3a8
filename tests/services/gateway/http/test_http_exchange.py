"""Clients that leave, what a body must be declared as, and how errors are reported."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any, cast

import pytest

from tokenloom.request import errors
from tokenloom.request.limits import AdmissionLimit
from tokenloom.services.gateway.http import http_exchange
from tokenloom.services.gateway.http.client_flow import ClientDisconnected, ClientFlow, Headers, ResponseWriter
from tokenloom.services.gateway.http.http_exchange import (
    OPENAI,
    RESPONSES,
    ErrorForm,
    HttpExchange,
    UnsupportedMediaType,
    respond_in_pieces,
    shaping_stage,
)
from tokenloom.services.gateway.http.request_body import RequestBody
from tokenloom.services.gateway.tenants.tenant import Tenant


def _tree(cls: type[errors.TokenloomError]) -> list[type[errors.TokenloomError]]:
    return [leaf for child in cls.__subclasses__() for leaf in (child, *_tree(child))]


class FakeTransport:
    def __init__(self) -> None:
        self.sent = b""
        self.is_aborted = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        self.is_aborted = True

    def pause_reading(self) -> None:
        """Nothing is read."""

    def resume_reading(self) -> None:
        """Nothing is read."""


class FakeConnection:
    """A connection in the middle of a request."""

    default_headers: Headers = ()
    is_ending = False

    def __init__(self, *, is_head: bool = False, speaks_1_1: bool = True, keep_alive: bool = True) -> None:
        self.transport = FakeTransport()
        self.flow = ClientFlow(cast(asyncio.Transport, self.transport))
        self.ended: list[tuple[bool, bool]] = []
        self.response = ResponseWriter(self.flow, self, is_head=is_head, speaks_1_1=speaks_1_1, keep_alive=keep_alive)
        self.body = RequestBody(self.flow, AdmissionLimit(1000))

    def end_response(self, *, keep_alive: bool, lingers: bool) -> None:
        self.ended.append((keep_alive, lingers))


class Client:
    """The client of an exchange."""

    def __init__(self, *headers: tuple[bytes, bytes]) -> None:
        self.connection = FakeConnection()
        self.exchange = HttpExchange(("POST", "/", b""), headers, self.connection.body, self.connection.response)

    def send_body(self, body: bytes) -> None:
        self.connection.body.arrive(body)
        self.connection.body.end()

    def leave(self) -> None:
        self.connection.flow.lose()


@pytest.fixture
async def client() -> Client:
    return Client()


@pytest.mark.parametrize("kind", [b"application/json", b"Application/JSON ; charset=utf-8"])
async def test_a_json_body(kind: bytes) -> None:
    client = Client((b"content-type", kind))
    client.send_body(b"{}")
    with await client.exchange.read_body(2) as body:
        assert body.data == b"{}"
    assert not body.data


@pytest.mark.parametrize(
    "headers", [(), *([(b"content-type", kind)] for kind in (b"text/plain", b"", b"application/ld+json", b"json"))]
)
async def test_other_types_are_refused(headers: Any) -> None:
    client = Client(*headers)
    client.send_body(b"{}")
    with pytest.raises(UnsupportedMediaType, match="application/json"):
        await client.exchange.read_body(2)


@pytest.mark.parametrize("is_whole", [True, False])
async def test_a_response_before_the_end_of_the_body_is_the_last(is_whole: bool) -> None:
    client = Client()
    client.connection.body.arrive(b"{")
    if is_whole:
        client.connection.body.end()
    await client.exchange.respond(401, b"{}")
    assert (b"connection: close" in client.connection.transport.sent) is not is_whole
    assert client.connection.ended == [(True, not is_whole)]


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


async def test_a_client_that_left_before_is_not_served(client: Client) -> None:
    client.leave()
    with pytest.raises(ClientDisconnected), client.exchange.until_disconnected():
        raise AssertionError("it was served")


@pytest.mark.parametrize("cls", [cls for cls in _tree(errors.TokenloomError) if cls.__module__ == errors.__name__])
async def test_a_final_error_says_that_it_must_not_be_retried(cls: type[errors.TokenloomError]) -> None:
    error = cls("what was wrong")
    error.retry_after = 1.5
    client = Client()
    await client.exchange.fail(error)
    lines = client.connection.transport.sent.partition(b"\r\n\r\n")[0].split(b"\r\n")[1:]
    headers = dict(line.split(b": ", 1) for line in lines)
    assert (headers.get(b"x-should-retry"), headers.get(b"retry-after")) == (
        (b"false", None) if cls.is_final else (None, b"2")
    )


@pytest.mark.parametrize("form", [OPENAI, RESPONSES])
async def test_an_error_within_a_stream_has_the_status_that_it_would_have_had_before(form: ErrorForm) -> None:
    client = Client()
    client.exchange.error_form = form
    await client.exchange.start(200, ())
    await client.exchange.fail(errors.InvalidArgument("the regex is wrong", "regex"))
    event = client.connection.transport.sent.partition(b"data: ")[2].partition(b"\n")[0]
    error = json.loads(event)["error"]
    assert (error["status"], error["code"], error["param"]) == (400, "invalid_argument", "regex")


class LargeAnswers:
    """Answers whose blocks each take a slice, of clients of several tenants.

    Attributes:
        made: The tenants of the blocks beyond the first one of each answer, with the turn of the event loop.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seconds = count()
        monkeypatch.setattr(http_exchange.time, "perf_counter", lambda: float(next(seconds)))
        self.made: list[tuple[int, str]] = []
        self.shaping = shaping_stage()
        self._turn = 0
        self._count_turn()

    def respond(self, tenant: str, num_blocks: int) -> tuple[Client, asyncio.Task[None]]:
        client = Client()
        client.exchange.tenant = Tenant(name=tenant, cache_salt=b"")
        client.exchange.shaping = self.shaping
        return client, asyncio.create_task(respond_in_pieces(client.exchange, self._blocks(tenant, num_blocks)))

    def _blocks(self, tenant: str, num_blocks: int) -> Iterator[bytes]:
        for number in range(num_blocks):
            if number:
                self.made.append((self._turn, tenant))
            yield b"[%d]" % number

    def _count_turn(self) -> None:
        self._turn += 1
        asyncio.get_running_loop().call_soon(self._count_turn)


async def test_a_turn_of_the_event_loop_has_a_slice_of_one_large_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = LargeAnswers(monkeypatch)
    clients = [answers.respond("a", 5) for _ in range(4)]
    for client, task in clients:
        await asyncio.wait_for(task, 30)
        assert client.connection.transport.sent.endswith(b"\r\n\r\n[0][1][2][3][4]")
    turns = Counter(turn for turn, _ in answers.made)
    assert len(answers.made) == 4 * 4
    assert set(turns.values()) == {1}


async def test_tenants_with_large_answers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = LargeAnswers(monkeypatch)
    tasks = [answers.respond("a", 30)[1] for _ in range(8)]
    await asyncio.sleep(0)
    _, of_other = answers.respond("b", 10)
    await asyncio.wait_for(of_other, 30)
    made = [tenant for _, tenant in answers.made]
    beside = made[made.index("b") :]
    assert beside.count("b") == 9
    assert beside.count("a") <= 10, "however many answers it has"
    await asyncio.wait_for(asyncio.gather(*tasks), 30)


async def test_a_client_that_leaves_gives_its_turn_back(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = LargeAnswers(monkeypatch)
    tasks = [answers.respond("a", 50)[1] for _ in range(3)]
    for task in tasks:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.wait_for(answers.respond("b", 5)[1], 30)
    assert answers.shaping.num_waiting == 0
