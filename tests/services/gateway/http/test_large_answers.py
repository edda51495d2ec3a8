"""A large answer is shaped and written in slices between which the event loop runs."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.services.gateway.fakes import MODEL, FakeMesh, FakeRequest
from tokenloom.services.gateway.endpoints import generation_endpoint
from tokenloom.services.gateway.http import http_exchange as pieces
from tokenloom.services.gateway.http.http_exchange import HttpExchange
from tokenloom.services.gateway.openai import answer, openai_logprobs
from tokenloom.v1.output_processor_pb2 import ProcessFrame, SlotTextLogprobs
from tokenloom.v1.types_pb2 import Logprobs

NUM_TOKENS, TOP = 400, 20
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": TOP},
    COMPLETIONS: {"prompt": "hi", "logprobs": TOP},
}


def frame(request: FakeRequest, sample: int, num_parts: int) -> ProcessFrame:
    """Return a frame with all tokens of a sample, whose log probabilities come in so many parts."""
    size = NUM_TOKENS // num_parts
    texts = [b"t%d" % id_ for id_ in range(TOP)] * size
    columns = Logprobs(
        sampled=[-0.5] * size, rank=[1] * size, top=TOP, token_id=[*range(TOP)] * size, logprob=[-0.5] * size * TOP
    )
    parts = [
        SlotTextLogprobs(
            slot=request.submit.slot,
            sample_index=sample,
            token_index=number * size,
            logprobs=columns,
            sampled_text=[b"a"] * size,
            token_text=texts,
        )
        for number in range(num_parts)
    ]
    return ProcessFrame(
        slot=[request.submit.slot],
        sample_index=[sample],
        text=["a" * NUM_TOKENS],
        token_index=[0],
        num_tokens=[NUM_TOKENS],
        token_ids=[97] * NUM_TOKENS,
        logprobs=parts,
    )


async def post(mesh: FakeMesh, http: httpx.AsyncClient, path: str, num_parts: int, **fields: Any) -> str:
    num_samples = fields.get("n", 1)
    task = asyncio.create_task(
        http.post(path, json={"model": MODEL, "max_tokens": NUM_TOKENS, **BODIES[path], **fields})
    )
    request = await mesh.outputs.next_request()
    session = request._session
    for sample in range(num_samples):
        session.frames.put_nowait(frame(request, sample, num_parts))
    request._num_tokens = [NUM_TOKENS] * num_samples
    for sample in range(num_samples):
        request.finish()
        session.frames._queue[-1].finished[0].sample_index = sample  # type: ignore[attr-defined]
    response = await task
    assert response.status_code == 200, response.text
    return response.text


@asynccontextmanager
async def most_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Counter[str]]:
    """Count the largest number of positions that are shaped, and bytes that are written, in one turn of the loop."""
    now: Counter[str] = Counter()
    most: Counter[str] = Counter()

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            now["positions"] += 1
            return function(*args, **kwargs)

        return call

    async def write(exchange: HttpExchange, body: bytes) -> None:
        now["bytes"] += len(body)
        await original(exchange, body)

    original = HttpExchange.write
    monkeypatch.setattr(answer, "chat_entry", counted(openai_logprobs.chat_entry))
    monkeypatch.setattr(openai_logprobs.CompletionLogprobs, "add", counted(openai_logprobs.CompletionLogprobs.add))
    monkeypatch.setattr(HttpExchange, "write", write)

    async def watch() -> None:
        while True:
            for name, count in now.items():
                most[name] = max(most[name], count)
            now.clear()
            await asyncio.sleep(0)

    watcher = asyncio.create_task(watch())
    try:
        yield most
    finally:
        watcher.cancel()


@pytest.mark.parametrize("num_parts", [1, 200])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_answer_is_shaped_in_slices(
    path: str, num_parts: int, mesh: FakeMesh, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with most_in_a_turn(monkeypatch) as most:
        answer = json.loads(await post(mesh, http, path, num_parts, n=2))
    step = -(-512 // (1 + TOP))
    assert 0 < most["positions"] <= generation_endpoint.VALUES_PER_SLICE // (1 + TOP) + step < NUM_TOKENS
    assert most["bytes"] < 2 * pieces.PIECE_BYTES
    assert len(answer["choices"]) == 2
    for index, choice in enumerate(answer["choices"]):
        assert (choice["index"], choice["finish_reason"]) == (index, "stop")
        names = list(choice)
        assert names.index("logprobs") + 1 == names.index("finish_reason")
        if path == CHAT:
            assert [at["token"] for at in choice["logprobs"]["content"]] == ["a"] * NUM_TOKENS
            assert choice["logprobs"]["refusal"] is None
        else:
            assert choice["logprobs"]["text_offset"] == list(range(NUM_TOKENS))
            assert choice["logprobs"]["top_logprobs"][-1] == {**{f"t{id_}": -0.5 for id_ in range(TOP)}, "a": -0.5}
    assert answer["usage"]["completion_tokens"] == 2 * NUM_TOKENS


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_stream_that_was_held_back_is_shaped_in_slices(
    path: str, mesh: FakeMesh, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with most_in_a_turn(monkeypatch) as most:
        text = await post(mesh, http, path, 200, stream=True)
    assert 0 < most["positions"] < NUM_TOKENS
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    found = [choice["logprobs"] for event in events for choice in event["choices"] if choice["logprobs"]]
    if path == CHAT:
        assert sum(len(each["content"]) for each in found) == NUM_TOKENS
    else:
        assert [offset for each in found for offset in each["text_offset"]] == list(range(NUM_TOKENS))
