"""Tool calls through the whole mesh: the template writes the tools, forced calls obey their schemas."""

import json
from typing import Any

import httpx
import jsonschema
import pytest

from tests.mesh.harness import MODEL, Mesh
from tokenloom.client import AsyncClient, Message

pytestmark = pytest.mark.asyncio(loop_scope="module")

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"day": {"$ref": "#/$defs/day"}, "hour": {"type": "integer", "minimum": 0, "maximum": 23}},
    "required": ["day", "hour"],
    "additionalProperties": False,
    "$defs": {"day": {"enum": ["Monday", "Tuesday"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "set_alarm", "description": "Set it.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "stop"}},
]
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Wake me."}], "tools": TOOLS, "max_tokens": 60}


@pytest.fixture(scope="module")
def mesh_options() -> dict[str, Any]:
    return {"engine": {"max_model_len": 512}}  # with room for tools in a prompt


async def answer(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await http.post("/v1/chat/completions", json={**BODY, **fields})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


async def test_a_named_call_obeys_its_schema(http: httpx.AsyncClient) -> None:
    named = {"type": "function", "function": {"name": "set_alarm"}}
    for seed in range(4):
        choice = await answer(http, tool_choice=named, seed=seed)
        assert choice["finish_reason"] == "tool_calls", choice
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "set_alarm"
        jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)


async def test_strict_tools_leave_the_text_free_until_a_call_begins(http: httpx.AsyncClient) -> None:
    strict = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS]
    choice = await answer(http, tools=strict, max_tokens=8)
    assert choice["message"]["content"]
    assert choice["finish_reason"] in ("stop", "length")


async def test_required_calls_obey_their_schemas(http: httpx.AsyncClient) -> None:
    for seed in range(4):
        choice = await answer(
            http, tool_choice="required", tools=TOOLS[:1], parallel_tool_calls=False, seed=seed, max_tokens=120
        )
        assert choice["finish_reason"] == "tool_calls", choice
        (call,) = choice["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)


FLAG = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "f"}}], ids=["required", "named"]
)
@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": FLAG["properties"], "required": ["on"]},
        {"anyOf": [{"type": "string"}, FLAG]},
        {"type": ["object", "string"], "properties": FLAG["properties"], "required": ["on"]},
        {"$ref": "#/$defs/flag", "$defs": {"flag": {"oneOf": [{"type": "null"}, FLAG]}}},
        {**FLAG, "properties": {"on": {"const": {"$ref": "#/$defs/none"}}}},
    ],
)
async def test_forced_arguments_are_objects(http: httpx.AsyncClient, parameters: Any, choice: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    made = await answer(http, tools=tools, tool_choice=choice, parallel_tool_calls=False, seed=3, max_tokens=120)
    assert made["finish_reason"] == "tool_calls", made
    arguments = json.loads(made["message"]["tool_calls"][0]["function"]["arguments"])
    assert arguments["on"] in (True, False, {"$ref": "#/$defs/none"})


@pytest.mark.parametrize("parameters", [{}, {"type": "string"}])
async def test_forced_arguments_begin_an_object(http: httpx.AsyncClient, parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    named = {"type": "function", "function": {"name": "f"}}
    made = await answer(http, tools=tools, tool_choice=named, seed=3, max_tokens=20)
    assert made["message"]["tool_calls"][0]["function"]["arguments"].startswith("{")


async def test_a_call_that_is_cut_off_ends_with_length(http: httpx.AsyncClient) -> None:
    choice = await answer(http, tool_choice="required", max_tokens=3)
    assert choice["finish_reason"] == "length"


async def test_grpc_calls_obey_their_schemas_too(mesh: Mesh) -> None:
    conversation: list[Message] = [{"role": "user", "content": "Wake me."}]
    async with AsyncClient(mesh.gateway.settings.listen, timeout=30) as client:
        answer = await client.chat(conversation, tools=TOOLS, tool_choice="required", max_tokens=120, seed=1)
        assert answer.outputs[0].finish_reason == "tool_calls", answer
        first = answer.tool_calls[0]
        result: Message = {"role": "tool", "content": "done", "tool_call_id": first.id}
        conversation += [answer.message, result]
        named = {"type": "function", "function": {"name": "set_alarm"}}
        answer = await client.chat(conversation, tools=TOOLS, tool_choice=named, max_tokens=60, seed=2)
        (call,) = answer.tool_calls
        assert call.name == "set_alarm"
        jsonschema.validate(json.loads(call.arguments), PARAMETERS)


async def test_the_template_writes_the_tools(mesh: Mesh, http: httpx.AsyncClient) -> None:
    told = (await http.post("/tokenize", json={"messages": BODY["messages"], "tools": TOOLS})).json()
    text = (await http.post("/detokenize", json={"tokens": told["tokens"]})).json()["prompt"]
    assert json.dumps(TOOLS[0]) in text
    assert text.endswith("<|im_start|>assistant\n")
    plain = await http.post("/tokenize", json={"prompt": text, "return_token_strs": True})
    assert plain.json()["tokens"] == told["tokens"]
    assert len(plain.json()["token_strs"]) == told["count"]
