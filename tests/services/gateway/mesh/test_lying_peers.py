"""Peers that send whatever they like: every request ends with an answer that it may have or a typed error, and the
gateway goes on."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.mutations import mutated
from tests.services.gateway import fakes
from tests.services.gateway.fakes import MODEL, FakeMesh, FakeTokenizer
from tokenloom.v1 import coordinator_pb2

MAX_TOKENS = 5


class LyingQueue(asyncio.Queue[Any]):
    """Changes some of the frames that pass."""

    rng: random.Random

    def put_nowait(self, frame: Any) -> None:
        if frame is not None and self.rng.random() < 0.3:
            frame = mutated(frame, self.rng, self.rng.randint(1, 3))
        super().put_nowait(frame)


async def ask(http: httpx.AsyncClient, *, streamed: bool) -> None:
    """Complete once; the answer is whole and within its budget, or a typed error."""
    body = {"model": MODEL, "prompt": "text", "max_tokens": MAX_TOKENS, "stream": streamed, "logprobs": 1}
    response = await http.post("/v1/completions", json=body)
    if response.status_code != 200:
        assert response.json()["error"]["code"], response.text
    elif streamed:
        *_, last = response.text.strip().split("\n\n")
        events = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
        assert last == "data: [DONE]" or "error" in json.loads(events[-1]), response.text
        assert sum(
            bool(choice["text"]) for event in events[:-1] for choice in json.loads(event).get("choices", ())
        ) <= (MAX_TOKENS + 1)
    else:
        assert response.json()["usage"]["completion_tokens"] <= MAX_TOKENS


@pytest.mark.parametrize("seed", range(8))
async def test_an_output_processor(socket_dir: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(LyingQueue, "rng", rng, raising=False)
    mesh = FakeMesh(socket_dir)
    mesh.outputs.auto = ["ab", "c"]
    init = fakes.FakeSession.__init__

    def lying(self: fakes.FakeSession) -> None:
        init(self)
        self.frames = LyingQueue()

    async with mesh.gateway(request_timeout=0.4), mesh.http() as http:
        monkeypatch.setattr(fakes.FakeSession, "__init__", lying)
        mesh.outputs.sessions[-1].end()
        for number in range(8):
            await ask(http, streamed=number % 2 == 0)
        monkeypatch.setattr(fakes.FakeSession, "__init__", init)
        mesh.outputs.sessions[-1].end()
        while (await http.post("/v1/completions", json={"model": MODEL, "prompt": "a"})).status_code != 200:
            pass


@pytest.mark.parametrize("seed", range(8))
async def test_a_tokenizer(socket_dir: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    mesh = FakeMesh(socket_dir)
    mesh.outputs.auto = ["ab"]
    encode = FakeTokenizer.Encode

    async def lie(self: FakeTokenizer, request: Any, context: Any) -> Any:
        answer = await encode(self, request, context)
        return mutated(answer, rng, 2) if self is mesh.tokenizer else answer

    async with mesh.gateway(), mesh.http() as http:
        monkeypatch.setattr(FakeTokenizer, "Encode", lie)
        for _ in range(8):
            await ask(http, streamed=False)


@pytest.mark.parametrize("seed", range(8))
async def test_a_coordinator(socket_dir: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it says, the gateway goes on, and answers as before once it says what is."""
    rng = random.Random(seed)
    mesh = FakeMesh(socket_dir)
    mesh.outputs.auto = ["ab"]
    entry = mesh.coordinator._entry

    def lie(name: str) -> coordinator_pb2.EngineEntry:
        return mutated(entry(name), rng, rng.randint(1, 3))

    async with mesh.gateway(request_timeout=0.4), mesh.http() as http:
        monkeypatch.setattr(mesh.coordinator, "_entry", lie)
        for number in range(8):
            await mesh.coordinator.set_engines("engine-0", f"engine-{number}")
            await ask(http, streamed=False)
            assert (await http.get("/metrics")).status_code == 200
            assert (await http.get("/health")).status_code in (200, 503)
        monkeypatch.setattr(mesh.coordinator, "_entry", entry)
        await mesh.coordinator.set_engines("engine-0")
        while (await http.post("/v1/completions", json={"model": MODEL, "prompt": "a"})).status_code != 200:
            pass
