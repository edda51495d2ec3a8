"""Errors name the client's own field, and contexts that are too long are named as each API's clients recognise them."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.services.gateway.fakes import LIMITS, MODEL, FakeMesh
from tokenloom.request import errors

N = LIMITS.max_model_len
LONG = "x" * (N + 30)
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
LONG_CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": LONG}]}
RESPONSE: dict[str, Any] = {"model": MODEL, "input": "hi"}
MESSAGE: dict[str, Any] = {**CHAT, "max_tokens": 8}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

FIELDS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 10_000}, "top_logprobs"),
    ("/v1/chat/completions", {**CHAT, "max_completion_tokens": N}, "max_completion_tokens"),
    ("/v1/chat/completions", {**CHAT, "max_tokens": N}, "max_tokens"),
    ("/v1/chat/completions", LONG_CHAT, "messages"),
    ("/v1/completions", {"model": MODEL, "prompt": LONG}, "prompt"),
    ("/v1/completions", {"model": MODEL, "prompt": "a", "logprobs": 10_000}, "logprobs"),
    ("/v1/responses", {**RESPONSE, "input": LONG}, "input"),
    ("/v1/responses", {"model": MODEL}, "input"),
    ("/v1/responses", {**RESPONSE, "tools": [{"type": "function", "name": "no name"}]}, "tools[0].name"),
    ("/v1/responses", {**RESPONSE, "top_p": 9}, "top_p"),
    ("/v1/embeddings", {"model": MODEL, "input": "hi", "truncate_prompt_tokens": -5}, "truncate_prompt_tokens"),
]


@pytest.mark.parametrize(("path", "body", "field"), FIELDS)
async def test_the_field_is_the_clients(
    mesh: FakeMesh, http: httpx.AsyncClient, path: str, body: dict[str, Any], field: str
) -> None:
    response = await http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert field in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/messages", {**MESSAGE, "tools": [{"name": "no name", "input_schema": {}}]}, "tools[0].name"),
        ("/v1/messages", {**MESSAGE, "stop_sequences": ["x"] * 99}, "stop_sequences may hold"),
        ("/api/chat", {**CHAT, "options": {"repeat_penalty": -1}}, "options.repeat_penalty must be"),
        ("/api/generate", {"model": MODEL, "prompt": LONG}, "but prompt has"),
    ],
)
async def test_apis_without_a_param_name_it_in_the_message(
    mesh: FakeMesh, http: httpx.AsyncClient, path: str, body: dict[str, Any], words: str
) -> None:
    response = await http.post(path, json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert words in (error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", LONG_CHAT),
        ("/v1/chat/completions", {**CHAT, "max_tokens": N}),
        ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 10 * N}),
        ("/v1/chat/completions", {**LONG_CHAT, "messages": LONG_CHAT["messages"] * 90}),
        ("/v1/completions", {"model": MODEL, "prompt": LONG}),
        ("/v1/completions", {"model": MODEL, "prompt": [1] * (N + 1)}),
        ("/v1/responses", {**RESPONSE, "input": LONG}),
    ],
)
async def test_openais_clients_recognise_a_context_that_is_too_long(
    mesh: FakeMesh, http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    response = await http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (
        400,
        "context_length_exceeded",
        "invalid_request_error",
    )
    assert f"maximum context length is {N} tokens" in error["message"]
    assert error["message"].endswith("(context_length_exceeded)")  # langchain-openai reads the message alone


CONSTRAINT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": []}}}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {**CHAT, "response_format": CONSTRAINT}, "response_format"),
        ("/v1/chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": "required"}, "tools"),
        ("/v1/completions", {"model": MODEL, "prompt": "a", "response_format": CONSTRAINT}, "response_format"),
        ("/v1/completions", {"model": MODEL, "prompt": "a", "structured_outputs": {"json": {}}}, "structured_outputs"),
    ],
)
async def test_a_constraint_that_cannot_be_compiled_is_the_clients(
    mesh: FakeMesh, http: httpx.AsyncClient, path: str, body: dict[str, Any], field: str
) -> None:
    asking = asyncio.create_task(http.post(path, json=body))
    words = "structured_outputs: Unsatisfiable schema"
    (await mesh.outputs.next_request()).fail(errors.InvalidArgument(words, "structured_outputs"))
    error = (await asking).json()["error"]
    assert (error["param"], error["message"]) == (field, f"{field}: Unsatisfiable schema")


async def test_anthropics_clients_recognise_it(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/messages", json={**LONG_CHAT, "max_tokens": 8})
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert f" tokens > {N} maximum" in error["message"]
    assert error["message"].startswith("prompt is too long: ")


async def test_anthropics_clients_recognise_it_where_another_part_has_found_it(
    mesh: FakeMesh, http: httpx.AsyncClient
) -> None:
    asking = asyncio.create_task(http.post("/v1/messages", json=MESSAGE))
    (await mesh.outputs.next_request()).fail(errors.ContextLengthExceeded.of(9, 5, "messages has 9", "messages"))
    error = (await asking).json()["error"]
    assert error["message"] == (
        "prompt is too long. This model's maximum context length is 5 tokens, but messages has 9"
    )


async def test_ollamas_clients_recognise_it(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    response = await http.post("/api/chat", json=LONG_CHAT)
    assert response.status_code == 400
    assert f"maximum context length is {N} tokens" in response.json()["error"]
    assert response.json()["error"].startswith("the input length exceeds the context length")
