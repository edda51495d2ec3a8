"""Engines and gateways are lost between the turns of a conversation and within one, with ``--replay-ids``: the tokens
that a prompt repeats belong to the request, whichever engine continues it."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.mesh.answers.test_agent_turns import TOOL, continued, conversation
from tests.mesh.asking import ask
from tests.mesh.faults.test_killed_gateways import Stream, process
from tests.mesh.harness import MODEL, SOON, Mesh

ENGINE = {"max_model_len": 2048, "num_kv_blocks": 512, "hash_step_seconds": 0.02}
FIELDS = {"model": MODEL, "temperature": 0, "tools": [TOOL], "return_token_ids": True, "return_timeline": True}
CHAT = "/v1/chat/completions"


def mesh_of(directory: Path) -> Mesh:
    return Mesh(directory, engines=2, output_processors=2, engine=ENGINE, gateway={"replay_ids": True})


class Conversation:
    """Sends its messages with each turn, and keeps the tokens of prompt and answer."""

    def __init__(self, name: str) -> None:
        self.messages: list[dict[str, Any]] = conversation(name)
        self.tokens: list[int] = []

    async def turn(self, mesh: Mesh, http: httpx.AsyncClient) -> str:
        """Have a turn whose prompt repeats all tokens before. Return the engine that ran it."""
        answer = (await http.post(CHAT, json={**FIELDS, "messages": self.messages, "max_tokens": 12})).json()
        prompt, ids = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
        assert prompt[: len(self.tokens)] == self.tokens
        assert ids == mesh.expected(prompt, 12)[: len(ids)]
        self.tokens = prompt + ids
        self.messages = continued(self.messages, answer)
        engine: str = answer["timeline"]["decode_engine"]
        return engine

    async def fresh(self, http: httpx.AsyncClient) -> list[int]:
        """The tokens of its messages, as a tokenizer writes them."""
        body = {"model": MODEL, "messages": self.messages, "tools": [TOOL]}
        ids: list[int] = (await http.post("/tokenize", json=body)).json()["tokens"]
        return ids

    async def is_fresh(self, http: httpx.AsyncClient) -> bool:
        """Whether the tokens are those that a tokenizer writes."""
        return (await self.fresh(http))[: len(self.tokens)] == self.tokens

    def stream(self) -> Stream:
        fields = {**FIELDS, "messages": self.messages, "max_tokens": 60, "ignore_eos": True}
        return Stream(CHAT, fields | {"stream_options": {"include_usage": True}})


def ids_of(stream: Stream) -> tuple[list[int], list[int]]:
    """The tokens of prompt and answer."""
    (prompt,) = [event["prompt_token_ids"] for event in stream.events if "prompt_token_ids" in event]
    return prompt, stream.answer()["choices"][0]["token_ids"]


async def test_an_engine_is_lost_between_two_turns(socket_dir: Path) -> None:
    async with mesh_of(socket_dir).running() as mesh, mesh.http() as http, asyncio.timeout(SOON):
        talk = Conversation("within")
        first = [await talk.turn(mesh, http) for _ in range(2)][-1]
        assert not await talk.is_fresh(http), "the answers have other tokens than the model generated"
        victim = next(engine for engine in mesh.engines if engine.settings.instance_id == first)
        await victim.kill()
        assert await talk.turn(mesh, http) != first
        assert await talk.turn(mesh, http) != first


@pytest.mark.parametrize("with_gateway", [False, True], ids=["engine", "gateway and engine"])
async def test_an_engine_is_lost_within_a_turn(socket_dir: Path, with_gateway: bool) -> None:
    async with (
        mesh_of(socket_dir).running() as mesh,
        mesh.http() as http,
        process(mesh, socket_dir, "--replay-ids") as (gateway, other),
        asyncio.timeout(SOON),
    ):
        talk = Conversation("within")
        asked = other if with_gateway else http
        home = [await talk.turn(mesh, asked) for _ in range(2)][-1]
        stream = talk.stream()
        reading = asyncio.create_task(stream.read(asked))
        await stream.begun.wait()
        if with_gateway:
            os.kill(gateway.pid, signal.SIGKILL)
            await asyncio.wait([reading])
            assert not stream.is_done
        victim = next(engine for engine in mesh.engines if engine.settings.instance_id == home)
        await victim.kill()
        await (stream.read(http) if with_gateway else reading)
        prompt, ids = ids_of(stream)
        assert prompt[: len(talk.tokens)] == talk.tokens, "as it was generated"
        assert not await talk.is_fresh(http)
        assert ids == mesh.expected(prompt, 60)


async def test_a_gateway_is_lost_between_two_turns(socket_dir: Path) -> None:
    async with mesh_of(socket_dir).running() as mesh, mesh.http() as http, asyncio.timeout(SOON):
        talk = Conversation("within")
        async with process(mesh, socket_dir, "--replay-ids") as (gateway, other):
            for _ in range(2):
                await talk.turn(mesh, other)
            os.kill(gateway.pid, signal.SIGKILL)
        fresh = await talk.fresh(http)
        assert not await talk.is_fresh(http)
        talk.tokens = []  # another gateway remembers no turn: what it renders is a fresh tokenization
        await talk.turn(mesh, http)
        assert talk.tokens[: len(fresh)] == fresh
        await talk.turn(mesh, http)
        assert (await ask(http, fresh, 4)).token_ids == mesh.expected(fresh, 4)
