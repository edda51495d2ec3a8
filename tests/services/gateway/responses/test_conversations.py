"""Conversations and compaction of OpenAI's Responses API."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.services.gateway.fakes import MODEL, FakeMesh
from tests.services.gateway.responses.response_clients import CALL, TOOLS, last_chat, openai_client
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.gateway.responses.input_items import compaction, read_input
from tokenloom.services.gateway.responses.responses import COMPACT


@pytest.fixture
async def both(socket_dir: Path) -> AsyncIterator[tuple[FakeMesh, openai.AsyncOpenAI]]:
    async with openai_client(socket_dir) as (mesh, client):
        mesh.outputs.auto = ["Hello"]
        yield mesh, client


Both = tuple[FakeMesh, openai.AsyncOpenAI]


async def test_a_conversation_grows_with_each_response(both: Both) -> None:
    mesh, client = both
    started: Any = {"role": "system", "content": "Be brief."}
    conversation = await client.conversations.create(items=[started], metadata={"topic": "files"})
    assert (conversation.id[:5], conversation.object, conversation.metadata) == (
        "conv_",
        "conversation",
        {"topic": "files"},
    )
    for number in range(2):
        response = await client.responses.create(model=MODEL, input=f"turn {number}", conversation=conversation.id)
        assert response.conversation is not None
        assert response.conversation.id == conversation.id
    turns = [(turn["role"], turn["content"]) for turn in _second(mesh)]
    assert turns == [("system", "Be brief."), ("user", "turn 0"), ("assistant", "Hello"), ("user", "turn 1")]
    items = await client.conversations.items.list(conversation.id, order="asc", limit=4)
    assert [item.type for item in items.data] == ["message"] * 4
    assert items.has_more
    newest = await client.conversations.items.list(conversation.id, limit=1)
    assert newest.data[0].content[0].text == "Hello"  # type: ignore[union-attr]


async def test_items_are_read_and_left_out_by_their_ids(both: Both) -> None:
    mesh, client = both
    texts = [f"turn {number}" for number in range(5)]
    turns: Any = [{"role": "user", "content": text} for text in texts]
    items = client.conversations.items
    name = (await client.conversations.create(items=turns)).id
    listed = [item async for item in items.list(name, limit=2, include=["reasoning.encrypted_content"])]
    found = [(await items.retrieve(item.id, conversation_id=name)).content[0].text for item in listed]  # type: ignore
    assert found == texts[::-1], "the newest first, over three pages"
    left = await items.delete(listed[1].id, conversation_id=name)
    assert (left.id, left.object) == (name, "conversation")
    for call in (items.retrieve, items.delete):
        for item_id, conversation in ((listed[1].id, name), ("item_1", name), (listed[0].id, "conv_1")):
            with pytest.raises(openai.NotFoundError):
                await call(item_id, conversation_id=conversation)
    await client.responses.create(model=MODEL, input="now", conversation=name)
    assert [turn["content"] for turn in last_chat(mesh)] == [*texts[:3], texts[4], "now"]


def _second(mesh: FakeMesh) -> Any:
    """The conversation that was rendered last."""
    chats = [*mesh.tokenizer.chats, *mesh.second_tokenizer.chats]
    return max((json.loads(chat.messages_json) for chat in chats), key=len)


async def test_calls_and_their_results_are_items_too(both: Both) -> None:
    mesh, client = both
    conversation = await client.conversations.create()
    mesh.outputs.auto = CALL
    response = await client.responses.create(model=MODEL, input="Rain?", tools=TOOLS, conversation=conversation.id)
    (call,) = [item for item in response.output if item.type == "function_call"]
    mesh.outputs.auto = ["Dry."]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "dry"}
    await client.responses.create(model=MODEL, input=[result], tools=TOOLS, conversation={"id": conversation.id})
    assert [turn["role"] for turn in _second(mesh)] == ["user", "assistant", "tool"]


async def test_a_repeated_call_adds_its_items_once(both: Both) -> None:
    mesh, client = both
    conversation = await client.conversations.create()
    body = {"model": MODEL, "input": "hi", "conversation": conversation.id}
    async with mesh.http() as http:
        for _ in range(2):
            answer = await http.post("/v1/responses", json=body, headers={"Idempotency-Key": "one"})
            assert answer.status_code == 200, answer.text
    assert len((await client.conversations.items.list(conversation.id)).data) == 2


async def test_conversations_are_changed_and_forgotten(both: Both) -> None:
    _, client = both
    conversation = await client.conversations.create()
    added = await client.conversations.items.create(conversation.id, items=[{"role": "user", "content": "hi"}])
    assert (len(added.data), added.first_id, added.has_more) == (1, added.last_id, False)
    changed = await client.conversations.update(conversation.id, metadata={"a": "b"})
    assert (changed.metadata, changed.created_at) == ({"a": "b"}, conversation.created_at)
    assert (await client.conversations.retrieve(conversation.id)).metadata == {"a": "b"}
    assert len((await client.conversations.items.list(conversation.id)).data) == 1
    assert (await client.conversations.delete(conversation.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.conversations.retrieve(conversation.id)
    with pytest.raises(openai.NotFoundError) as raised:
        await client.responses.create(model=MODEL, input="hi", conversation=conversation.id)
    assert raised.value.param == "conversation"


async def test_a_failed_answer_adds_nothing(both: Both) -> None:
    mesh, client = both
    conversation = await client.conversations.create()
    for names in ({"previous_response_id": "resp_1"}, {"conversation": 3}):
        body = {"model": MODEL, "input": "hi", "conversation": conversation.id} | names
        async with mesh.http() as http:
            assert (await http.post("/v1/responses", json=body)).status_code == 400
    assert not (await client.conversations.items.list(conversation.id)).data


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/conversations", {"items": "x"}, "items"),
        ("/v1/conversations", {"items": [{"role": "user", "content": "x"}] * 21}, "items"),
        ("/v1/conversations", {"items": [{"type": "other"}]}, "items[0].type"),
        ("/v1/conversations", {"metadata": 3}, "metadata"),
        ("/v1/conversations", {"more": 3}, "more"),
        ("/v1/conversations", {"items": {}}, "items"),
        ("/v1/conversations/conv_1", {"items": [None]}, "items"),
        ("/v1/conversations/conv_1/items", {"items": []}, "items"),
        ("/v1/conversations/conv_1/items", {"items": [{"role": "user", "content": "x"}], "metadata": {}}, "metadata"),
    ],
)
async def test_what_is_malformed_is_refused_by_name(http: httpx.AsyncClient, path: str, body: Any, named: str) -> None:
    response = await http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, named)


async def test_a_response_is_no_conversation_and_no_other_way_round(both: Both) -> None:
    mesh, client = both
    response = await client.responses.create(model=MODEL, input="hi")
    conversation = await client.conversations.create()
    async with mesh.http() as http:
        for path in (f"/v1/conversations/{response.id}", f"/v1/responses/{conversation.id}"):
            assert (await http.get(path)).status_code == 404
            assert (await http.delete(path)).status_code == 404
        body = {"model": MODEL, "input": "hi", "previous_response_id": conversation.id}
        answer = await http.post("/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "previous_response_id")
    assert "send it as conversation" in answer.text


async def test_an_item_whose_id_is_null_gets_one(both: Both) -> None:
    mesh, client = both
    conversation = await client.conversations.create()
    async with mesh.http() as http:
        body = {"items": [{"role": "user", "content": "hi", "id": None}]}
        added = (await http.post(f"/v1/conversations/{conversation.id}/items", json=body)).json()
    assert added["first_id"].startswith("item_")


async def test_a_gateway_that_keeps_nothing_says_so(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway(max_stored_response_bytes=0) as mesh, mesh.http() as http:
        response = await http.post("/v1/conversations")
        assert (response.status_code, "--max-stored-response-bytes" in response.text) == (400, True)


async def test_a_conversation_is_compacted(both: Both) -> None:
    mesh, client = both
    mesh.outputs.auto = ["They make a file."]
    talk: Any = [
        {"role": "user", "content": "Make it."},
        {"role": "assistant", "content": "I did."},
        {"role": "user", "content": "And more."},
    ]
    compacted = await client.responses.compact(model=MODEL, input=talk)
    assert last_chat(mesh)[-1] == {"role": "user", "content": COMPACT}
    assert (compacted.object, compacted.usage.output_tokens) == ("response.compaction", len("They make a file."))
    kept = [item.to_dict(warnings=False) for item in compacted.output]
    assert [item["type"] for item in kept] == ["message", "message", "compaction"]
    later: Any = [*kept, {"role": "user", "content": "Go on."}]
    await client.responses.create(model=MODEL, input=later)
    turns = last_chat(mesh)
    assert [turn["content"] for turn in (turns[0], turns[1], turns[3])] == ["Make it.", "And more.", "Go on."]
    assert turns[2]["content"].endswith("They make a file.")


async def test_what_a_client_asks_of_its_turns_shapes_no_summary(both: Both) -> None:
    mesh, _ = both
    form = {"format": {"type": "json_object"}}
    async with mesh.http() as http:
        body = {"model": MODEL, "input": "hi", "tools": TOOLS, "tool_choice": "required", "text": form}
        answer = await http.post("/v1/responses/compact", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-tokenloom-ignored"] == "tools, tool_choice, text"


async def test_a_stored_response_is_compacted(both: Both) -> None:
    mesh, client = both
    first = await client.responses.create(model=MODEL, input="Make it.")
    last_chat(mesh)
    await client.responses.compact(model=MODEL, previous_response_id=first.id)
    assert [turn["role"] for turn in last_chat(mesh)] == ["user", "assistant", "user"]


@pytest.mark.parametrize("sealed", ["x", "tokenloom-1:%%%", "tokenloom-1:/w==", 3])
def test_compactions_of_others_are_refused(sealed: Any) -> None:
    with pytest.raises(InvalidArgument, match="encrypted_content"):
        read_input([{"type": "compaction", "encrypted_content": sealed}])


def test_a_summary_comes_back() -> None:
    (turn,) = read_input([compaction("cmp_1", "Größe: 3 ☃")])
    assert turn["content"].endswith("Größe: 3 ☃")
