"""``/tokenize`` and ``/detokenize``: vLLM's shapes, the tokenizer's ids."""

import json
from typing import Any

import httpx
import pytest

from tests.services.gateway.fakes import LIMITS, FakeMesh

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def test_a_text(http: httpx.AsyncClient) -> None:
    response = await http.post("/tokenize", json={"prompt": "hi"})
    assert response.json() == {
        "count": 2,
        "max_model_len": LIMITS.max_model_len,
        "tokens": [104, 105],
        "token_strs": None,
        "plain_text_tokens": [],
    }
    told = await http.post("/tokenize", json={"prompt": "hi", "return_token_strs": True})
    assert told.json()["token_strs"] == ["h", "i"]


async def test_a_conversation_with_tools(mesh: FakeMesh, http: httpx.AsyncClient) -> None:
    body = {"messages": [USER], "tools": [TOOL], "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}}
    response = await http.post("/tokenize", json=body)
    (chat,) = [*mesh.tokenizer.chats, *mesh.second_tokenizer.chats]
    assert bytes(response.json()["tokens"]) == chat.messages_json
    assert json.loads(chat.tools_json) == [TOOL]
    assert json.loads(chat.template_kwargs_json) == {"a": 1}
    assert not chat.add_generation_prompt


async def test_fields_without_effect_are_named(http: httpx.AsyncClient) -> None:
    of_chats = {"tools": [TOOL], "chat_template_kwargs": {"a": 1}, "add_generation_prompt": True}
    response = await http.post("/tokenize", json={"prompt": "hi", "user": "me", **of_chats})
    assert response.json()["tokens"] == [104, 105]
    assert set(response.headers["x-tokenloom-ignored"].split(", ")) == {*of_chats, "user"}
    plain = await http.post("/tokenize", json={"prompt": "hi", "tools": None, "add_special_tokens": True})
    assert "x-tokenloom-ignored" not in plain.headers
    chat = await http.post("/tokenize", json={"messages": [USER], **of_chats})
    assert "x-tokenloom-ignored" not in chat.headers


async def test_back_to_text(http: httpx.AsyncClient) -> None:
    response = await http.post("/detokenize", json={"tokens": [104, 105]})
    assert response.json() == {"prompt": "hi"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": [USER], "tools": [{}]}, "tools[0]"),
        ("/tokenize", {"prompt": "a", "tools": [{}]}, "tools[0]"),
        ("/tokenize", {"prompt": "a", "tools": "f"}, "tools"),
        ("/tokenize", {"prompt": "a", "continue_final_message": 5}, "continue_final_message"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [2**32]}, "tokens"),
    ],
)
async def test_bad_bodies_are_refused(http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str) -> None:
    response = await http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_another_model(http: httpx.AsyncClient) -> None:
    assert (await http.post("/tokenize", json={"model": "other", "prompt": "a"})).status_code == 404
