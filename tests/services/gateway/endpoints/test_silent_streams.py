"""What a client of each API receives while its prompt waits, over HTTP."""

import asyncio
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.loop_clock import pass_time, settle
from tests.services.gateway.fakes import MODEL, FakeMesh
from tokenloom.request import errors

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
STREAMS: list[tuple[str, dict[str, Any], bytes, bytes]] = [
    ("/v1/chat/completions", CHAT, b": keep-alive\n\n", b"data: {"),
    ("/v1/completions", {"model": MODEL, "prompt": "hi", "stream": True}, b": keep-alive\n\n", b"data: {"),
    ("/v1/responses", {"model": MODEL, "input": "hi", "stream": True}, b": keep-alive\n\n", b"event: error\ndata: "),
    ("/v1/messages", {**CHAT, "max_tokens": 8}, b'event: ping\ndata: {"type":"ping"}\n\n', b"event: error\n"),
    ("/api/chat", CHAT, b'"content":""},"done":false}\n', b'{"error":'),
    ("/api/generate", {"model": MODEL, "prompt": "hi"}, b'"response":"","done":false}\n', b'{"error":'),
]


@pytest.mark.parametrize(("path", "body", "skipped", "error"), STREAMS)
async def test_the_head_comes_after_five_seconds_and_an_error_in_the_apis_form(
    mesh: FakeMesh, http: httpx.AsyncClient, path: str, body: dict[str, Any], skipped: bytes, error: bytes
) -> None:
    async def receive() -> list[bytes]:
        async with http.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            began.set()
            return [piece async for piece in response.aiter_raw()]

    began = asyncio.Event()
    receiving = asyncio.create_task(receive())
    submitted = await mesh.outputs.next_request()
    for _ in range(6):
        pass_time(1.0)
        await settle()
    async with asyncio.timeout(30):
        await began.wait()
    submitted.fail(errors.Internal())
    text = b"".join(await receiving)
    first, _, rest = text.partition(b"\n" if path.startswith("/api") else b"\n\n")
    assert (first + (b"\n" if path.startswith("/api") else b"\n\n")).endswith(skipped)
    assert error in rest


async def test_an_early_error_keeps_its_status(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    receiving = asyncio.create_task(http.post("/v1/chat/completions", json=CHAT))
    submitted = await mesh.outputs.next_request()
    pass_time(3.0)
    await settle()
    submitted.fail(errors.ResourceExhausted("full"))
    assert (await receiving).status_code == 503


async def test_an_answer_that_is_not_streamed_keeps_its_status(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    receiving = asyncio.create_task(http.post("/v1/chat/completions", json={**CHAT, "stream": False}))
    submitted = await mesh.outputs.next_request()
    for _ in range(12):
        pass_time(1.0)
        await settle()
    submitted.fail(errors.ResourceExhausted("full"))
    assert (await receiving).status_code == 503


async def test_openais_and_anthropics_clients_skip_it(mesh: FakeMesh) -> None:
    async def chat(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def message(client: anthropic.AsyncAnthropic) -> str:
        turns: Any = [{"role": "user", "content": "hi"}]
        async with client.messages.stream(model=MODEL, max_tokens=8, messages=turns) as stream:
            return "".join([text async for text in stream.text_stream])

    url = f"http://{mesh.http_address}"
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as first,
        anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=0) as second,
    ):
        for call in (chat(first), message(second)):
            asking = asyncio.create_task(call)
            submitted = await mesh.outputs.next_request()
            for _ in range(17):
                pass_time(1.0)
                await settle()
            submitted.answer("Hel", "lo")
            assert await asking == "Hello"
