"""The plain client gives up where the resuming one calls again."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from benchmarks.chaos.clients import gateway_probe, openai_clients
from benchmarks.chaos.clients.answer import Answer, Progress
from benchmarks.chaos.clients.exchange import Exchange
from benchmarks.chaos.clients.failure import RequestFailed
from benchmarks.chaos.clients.mix import Case
from benchmarks.chaos.clients.openai_answer import take_event
from benchmarks.chaos.clients.openai_clients import PlainClient, ResumingClient
from tests.benchmarks.chaos.clients.fake_server import END, STREAM, answering, chunk, event

REFUSAL = b'{"error": {"code": "unavailable", "type": "server_error", "message": "no engine"}}'


def exchange(*, streamed: bool = True) -> Exchange:
    return Exchange(5, Case("a case", [1, 2], streamed=streamed), 0, Progress(0.0), 10.0)


def unary(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def closed_port() -> str:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{bound.getsockname()[1]}"


async def test_a_whole_stream() -> None:
    sent, requests = exchange(), list[str]()
    async with answering([STREAM + event("a") + event("b") + END], requests) as address:
        await PlainClient([address], "m").send(sent)
    assert sent.answer.samples[0].text == "ab"
    assert sent.progress.first is not None


async def test_a_stream_that_is_cut() -> None:
    async with answering([STREAM + event("a")], []) as address:
        with pytest.raises(RequestFailed, match="cut") as caught:
            await PlainClient([address], "m").send(exchange())
    assert not caught.value.is_typed


async def test_a_stream_that_ends_without_its_last_event() -> None:
    async with answering([STREAM + event("a") + b"0\r\n\r\n"], []) as address:
        with pytest.raises(RequestFailed, match=r"cut: .*without \[DONE\]"):
            await PlainClient([address], "m").send(exchange())


async def test_typed_errors_before_and_within_a_stream() -> None:
    within = STREAM + event("a") + chunk(f"data: {REFUSAL.decode()}\n\n") + END
    for response, kind in ((unary("503 Unavailable", REFUSAL), "503 unavailable"), (within, "unavailable")):
        for resuming in (False, True):
            async with answering([response], []) as address:
                client = ResumingClient([address], "m", "run") if resuming else PlainClient([address], "m")
                with pytest.raises(RequestFailed) as caught:
                    await client.send(exchange())
            assert caught.value.kind == kind
            assert caught.value.is_typed


async def test_a_refused_connection_is_counted() -> None:
    sent = exchange()
    with pytest.raises(RequestFailed, match="refused"):
        await PlainClient([closed_port()], "m").send(sent)
    assert sent.refused == 1


async def test_the_resuming_client_asks_for_what_is_missing() -> None:
    sent, requests = exchange(), list[str]()
    responses = [STREAM + event("a", 1) + event("b", 2), STREAM + event("c", 3) + END]
    async with answering(responses, requests) as address:
        await ResumingClient([address, address], "m", "run").send(sent)
    assert sent.answer.samples[0].text == "abc"
    assert sent.resumed == 1
    first, second = requests
    assert "Idempotency-Key: run-5\r\n" in first
    assert "Idempotency-Key: run-5\r\n" in second
    assert "Last-Event-ID: 0\r\n" in first
    assert "Last-Event-ID: 2\r\n" in second


async def test_the_resuming_client_takes_back_what_a_delayed_call_has_taken() -> None:
    taken = b'{"error": {"code": "aborted", "type": "invalid_request_error", "message": "continues elsewhere"}}'
    within = STREAM + event("a", 1) + chunk(f"data: {taken.decode()}\n\n") + END
    sent, requests = exchange(), list[str]()
    async with answering([unary("409 Conflict", taken), within, STREAM + event("b", 2) + END], requests) as address:
        await ResumingClient([address, closed_port()], "m", "run").send(sent)
    assert sent.answer.samples[0].text == "ab"
    assert (sent.resumed, sent.refused) == (2, 0)
    assert "Last-Event-ID: 1\r\n" in requests[2]


async def test_the_resuming_client_survives_a_refused_connection() -> None:
    sent = exchange(streamed=False)
    body = b'{"choices": [{"index": 0, "text": "whole", "token_ids": [1]}]}'
    async with answering([unary("200 OK", body)], []) as address:
        await ResumingClient([closed_port(), address], "m", "run").send(sent)
    assert sent.answer.samples[0].text == "whole"
    assert sent.refused == 1


async def test_the_resuming_client_leaves_a_gateway_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_probe, "EVERY_SECONDS", 0.01)
    monkeypatch.setattr(gateway_probe, "TIMEOUT_SECONDS", 0.05)
    body = b'{"choices": [{"index": 0, "text": "whole", "token_ids": [1]}]}'
    sent = exchange(streamed=False)
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # connections wait for it
        first = f"127.0.0.1:{frozen.getsockname()[1]}"
        async with answering([unary("200 OK", body)], []) as second:
            await ResumingClient([first, second], "m", "run").send(sent)
    assert sent.answer.samples[0].text == "whole"
    assert (sent.resumed, sent.refused) == (1, 0)


@asynccontextmanager
async def slow_gateway(answer: Callable[[asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    """Yield the address of a gateway that answers each connection so, and keeps it open until the client leaves."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await answer(writer)
        with suppress(ConnectionError):
            await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()[:2]
        yield f"{host}:{port}"


async def test_gateways_that_are_all_slow_are_not_left_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    waited, is_patient = list[float](), asyncio.Event()

    async def until_lost(address: str, seconds: float) -> None:
        waited.append(seconds)
        if seconds < 10.0:
            return  # no gateway answers its health check as soon as that
        is_patient.set()
        await asyncio.Event().wait()

    async def answer(writer: asyncio.StreamWriter) -> None:
        await is_patient.wait()
        writer.write(unary("200 OK", b'{"choices": [{"index": 0, "text": "whole", "token_ids": [1]}]}'))

    monkeypatch.setattr(gateway_probe, "until_lost", until_lost)
    monkeypatch.setattr(openai_clients, "_FIRST_WAIT", 0.0)
    sent = exchange(streamed=False)
    async with asyncio.timeout(30), slow_gateway(answer) as address:
        await ResumingClient([address] * 2, "m", "run").send(sent)
    assert sent.answer.samples[0].text == "whole"
    assert waited == [1.5, 3.0, 6.0, 12.0]
    assert sent.resumed == 3


async def test_a_gateway_that_has_sent_output_is_left_as_soon_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    waited, has_output = list[float](), asyncio.Event()

    async def until_lost(address: str, seconds: float) -> None:
        waited.append(seconds)
        if len(waited) > 2:
            await asyncio.Event().wait()
        if len(waited) == 2:
            await has_output.wait()

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + (event("a", 1) if len(waited) < 3 else event("b", 2) + END))

    def note(answer: Answer, data: str) -> bool:
        has_output.set()
        return take_event(answer, data)

    monkeypatch.setattr(openai_clients, "take_event", note)
    monkeypatch.setattr(gateway_probe, "until_lost", until_lost)
    monkeypatch.setattr(openai_clients, "_FIRST_WAIT", 0.0)
    sent = exchange()
    async with asyncio.timeout(30), slow_gateway(answer) as address:
        await ResumingClient([address] * 2, "m", "run").send(sent)
    assert sent.answer.samples[0].text == "ab"
    assert waited == [1.5, 3.0, 1.5]


async def test_a_stream_without_event_ids_cannot_be_resumed() -> None:
    async with answering([STREAM + event("a")], []) as address:
        with pytest.raises(RequestFailed, match="no id to resume from"):
            await ResumingClient([address], "m", "run").send(exchange())
