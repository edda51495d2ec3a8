"""Reasoning through all services: its budget, the constraint after it and its tokens in the usage.

The hash worker draws any token; the demo's tokenizer writes each mark in several tokens.
"""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import pytest_asyncio

from tests.mesh.harness import MODEL, Mesh
from tests.mesh.split import SplitMesh
from tests.ready_channel import ready_channel
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "age", "schema": SCHEMA}}
CODE = r"[A-Z]{2}-[0-9]{3}"


@pytest.fixture(scope="module")
def mesh_options() -> dict[str, Any]:
    return {"engine": {"reasoning_parser": "deepseek_r1"}, "gateway": {"reasoning_parser": "deepseek_r1"}}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Age?"}], "max_tokens": 100, **fields}


async def test_a_chats_answer_follows_its_reasoning_and_obeys_the_schema(http: httpx.AsyncClient) -> None:
    for budget in (0, 1, 7):
        body = chat(response_format=FORMAT, thinking_token_budget=budget)
        answer = (await http.post("/v1/chat/completions", json=body)).json()
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop", answer
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        assert ("reasoning" in choice["message"]) == (budget > 0)
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": budget}


@pytest.mark.parametrize("text", ["What does </think> mean?", "<think></think>", "<think>"])
async def test_marks_in_a_users_text_say_nothing_about_the_answer(http: httpx.AsyncClient, text: str) -> None:
    messages = [{"role": "user", "content": text}]
    for more in ({"thinking_token_budget": 3, "response_format": FORMAT}, {"thinking_token_budget": 3}):
        answer = (await http.post("/v1/chat/completions", json=chat(messages=messages, **more))).json()
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}, more


async def test_a_stream_reports_the_reasoning_tokens_so_far(http: httpx.AsyncClient) -> None:
    body = chat(
        response_format=FORMAT,
        thinking_token_budget=5,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [line async for line in response.aiter_lines() if line.startswith("data: {")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    counts = [event["usage"]["completion_tokens_details"]["reasoning_tokens"] for event in events]
    assert counts[-1] == 5
    assert max(counts) <= 5 + len(["<", "/", "th", "ink"]), "the beginning of a mark may still be reasoning"
    content = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    jsonschema.validate(json.loads(content), SCHEMA)


async def test_completions_and_samples(mesh: Mesh, http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 60, "n": 3, "seed": 5, "return_token_ids": True}
    body |= {"thinking_token_budget": 4, "structured_outputs": {"regex": CODE}}
    answer = (await http.post("/v1/completions", json=body)).json()
    end = mesh.tokenizer.encode("</think>", add_special_tokens=False).ids
    for choice in answer["choices"]:
        assert choice["token_ids"][4 : 4 + len(end)] == end
        assert re.fullmatch(CODE, choice["text"].partition("</think>")[2])
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 12}


async def test_public_grpc(mesh: Mesh) -> None:
    params = types_pb2.SamplingParams(
        max_tokens=50, structured_outputs=types_pb2.StructuredOutputs(regex=CODE), thinking_token_budget=3
    )
    messages = [inference_pb2.ChatMessage(role="user", content="Once")]
    request = inference_pb2.GenerateRequest(chat=inference_pb2.ChatPrompt(messages=messages), sampling_params=params)
    async with ready_channel(mesh.gateway.settings.listen) as channel:
        responses = [each async for each in inference_pb2_grpc.InferenceStub(channel).Generate(request)]
    assert re.fullmatch(CODE, "".join(response.text for response in responses))
    assert responses[-1].usage.reasoning_tokens == 3


async def test_a_prompt_that_closes_the_reasoning_is_answered_at_once(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": "<think></think>", "max_tokens": 60, "structured_outputs": {"regex": CODE}}
    answer = (await http.post("/v1/completions", json=body)).json()
    assert re.fullmatch(CODE, answer["choices"][0]["text"])
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_a_constraint_binds_what_gpt_oss_writes_for_the_user(socket_dir: Path) -> None:
    """The header of that message, which the demo's tokenizer writes in several tokens, ends the reasoning."""
    parser = {"reasoning_parser": "openai_gptoss"}
    async with Mesh(socket_dir, engine=parser, gateway=parser).running() as mesh, mesh.http() as http:
        body = chat(response_format=FORMAT, thinking_token_budget=0)
        answer = (await http.post("/v1/chat/completions", json=body)).json()
        (choice,) = answer["choices"]
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        assert "reasoning" not in choice["message"]
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_without_a_parser_a_budget_is_refused_by_name(socket_dir: Path) -> None:
    async with Mesh(socket_dir).running() as mesh, mesh.http() as http:
        for path, body in (
            ("/v1/chat/completions", chat(thinking_token_budget=5)),
            ("/v1/completions", {"model": MODEL, "prompt": "Once", "thinking_token_budget": 5}),
        ):
            response = await http.post(path, json=body)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "thinking_token_budget")
            assert "--reasoning-parser" in error["message"]
        plain = (await http.post("/v1/chat/completions", json=chat())).json()
        assert "completion_tokens_details" not in plain["usage"]


async def test_a_constraint_that_covers_the_reasoning_leaves_none(socket_dir: Path) -> None:
    engine = {"reasoning_parser": "deepseek_r1", "enable_in_reasoning": True}
    options = {"engine": engine, "gateway": {"reasoning_parser": "deepseek_r1"}}
    async with Mesh(socket_dir, **options).running() as mesh, mesh.http() as http:
        answer = (await http.post("/v1/chat/completions", json=chat(response_format=FORMAT))).json()
        jsonschema.validate(json.loads(answer["choices"][0]["message"]["content"]), SCHEMA)
        both = chat(response_format=FORMAT, thinking_token_budget=5)
        refused = (await http.post("/v1/chat/completions", json=both)).json()["error"]
        assert refused["param"] == "thinking_token_budget"
        assert "--enable-in-reasoning" in refused["message"]


@pytest_asyncio.fixture(loop_scope="module")
async def split(socket_dir: Path) -> AsyncIterator[SplitMesh]:
    async with SplitMesh(socket_dir, engine={"reasoning_parser": "deepseek_r1"}).running() as mesh:
        yield mesh


async def test_reasoning_continues_where_the_prefill_left_it(split: SplitMesh) -> None:
    end = split.tokenizer.encode("</think>", add_special_tokens=False).ids
    async with split.http() as http:
        for budget in (0, 1, 2, 6):  # the first token comes from the prefill engine: it may be the mark's
            for prompt in (list(range(1, 40 + budget)), list(range(300, 1200))):  # one chunk, and several
                body = {"model": MODEL, "prompt": prompt, "max_tokens": 60, "return_token_ids": True}
                body |= {"thinking_token_budget": budget, "structured_outputs": {"regex": CODE}}
                (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
                assert choice["token_ids"][:budget] == split.expected(prompt, budget)
                assert choice["token_ids"][budget : budget + len(end)] == end
                assert re.fullmatch(CODE, choice["text"].partition("</think>")[2])
    await split.check_nothing_is_left()
    assert all(engine.core.num_steps > 0 for engine in split.engines)
