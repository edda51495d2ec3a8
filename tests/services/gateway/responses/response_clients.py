"""Clients of OpenAI's Responses API."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.services.gateway.fakes import MODEL, FakeMesh

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [{"type": "function", "name": "get_weather", "description": "It.", "parameters": SCHEMA}]
CALL = ("I ask.\n", '<tool_call>\n{"name": "get_', 'weather", "arguments": {"city"', ': "Oslo"}}\n</tool_call>')


async def post(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await http.post("/v1/responses", json={"model": MODEL, "input": "hi", **fields})


def last_chat(mesh: FakeMesh) -> Any:
    """The only conversation that a tokenizer was given since the last call."""
    (chat,) = [*mesh.tokenizer.chats, *mesh.second_tokenizer.chats]
    mesh.tokenizer.chats.clear()
    mesh.second_tokenizer.chats.clear()
    return json.loads(chat.messages_json)


@asynccontextmanager
async def openai_client(directory: Path, **settings: Any) -> AsyncIterator[tuple[FakeMesh, openai.AsyncOpenAI]]:
    """OpenAI's client of a gateway that reads Hermes' tool calls."""
    async with FakeMesh(directory).gateway(**{"tool_call_parser": "hermes", **settings}) as mesh:
        url = f"http://{mesh.http_address}/v1"
        client = openai.AsyncOpenAI(base_url=url, api_key="a key", max_retries=0)
        yield mesh, client
        await client.close()
