"""The session that a client names reaches the mesh as a number, whichever way its agent names it."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.services.gateway.fakes import MODEL, FakeMesh

KEYS = ("sk-a", "sk-b")
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TURN = [{"role": "user", "content": "hi"}]
CLAUDE_CODE = {"metadata": {"user_id": "user_1f0a_account__session_3c7e1f52-6e7d-4a2a-9f5d-8f3f6f0c2a11"}}
ROADS = {
    "chat": (CHAT, {"messages": TURN, "prompt_cache_key": "s"}, {}),
    "completion": ("/v1/completions", {"prompt": "ab", "prompt_cache_key": "s"}, {}),
    "codex": (RESPONSES, {"input": "hi", "prompt_cache_key": "s"}, {"session_id": "s"}),
    "newer codex": (RESPONSES, {"input": "hi"}, {"session-id": "s"}),
    "opencode": (CHAT, {"messages": TURN}, {"x-session-affinity": "s"}),
    "messages": (MESSAGES, {"messages": TURN, "metadata": {"user_id": "s"}}, {}),
    "claude code": (MESSAGES, {"messages": TURN, **CLAUDE_CODE}, {"x-claude-code-session-id": "s"}),
    "router": (CHAT, {"messages": TURN, "prompt_cache_key": "other"}, {"x-session-id": "s"}),
}
NONE = {
    "aider": (CHAT, {"messages": TURN, "stream": False}, {}),
    "empty": (CHAT, {"messages": TURN, "prompt_cache_key": ""}, {"x-session-id": ""}),
    "null": (MESSAGES, {"messages": TURN, "metadata": {"user_id": None}}, {}),
}


@pytest.fixture
async def guarded(socket_dir: Path) -> AsyncIterator[FakeMesh]:
    async with FakeMesh(socket_dir).gateway(api_key=KEYS) as mesh:
        mesh.outputs.auto = ["x"]
        yield mesh


async def ask(
    mesh: FakeMesh, road: tuple[str, dict[str, Any], dict[str, str]], key: str = KEYS[0]
) -> tuple[int, dict[str, Any]]:
    """Return the session of the request in the mesh, and the answer."""
    path, body, headers = road
    for session in mesh.outputs.sessions:
        session.requests.clear()
    async with mesh.http(headers={"authorization": f"Bearer {key}", **headers}) as http:
        response = await http.post(path, json={"model": MODEL, "max_tokens": 3, **body})
    assert response.status_code == 200, response.text
    assert "x-tokenloom-ignored" not in response.headers or path == RESPONSES
    (submit,) = (each.submit for session in mesh.outputs.sessions for each in session.requests.values())
    return submit.session, response.json()


async def test_every_way_to_name_a_session_names_the_same_one(guarded: FakeMesh) -> None:
    found = {name: (await ask(guarded, road))[0] for name, road in ROADS.items()}
    assert len(set(found.values())) == 1, found
    assert found["chat"] != 0
    assert {name: (await ask(guarded, road))[0] for name, road in NONE.items()} == dict.fromkeys(NONE, 0)


async def test_the_name_of_a_session_is_of_its_tenant(guarded: FakeMesh) -> None:
    mine, theirs = [(await ask(guarded, ROADS["chat"], key))[0] for key in KEYS]
    assert mine != theirs


async def test_claude_codes_user_id_names_its_session(guarded: FakeMesh) -> None:
    body = {"messages": TURN, **CLAUDE_CODE}
    first, again = [(await ask(guarded, (MESSAGES, body, {})))[0] for _ in range(2)]
    other, _ = await ask(guarded, (MESSAGES, {"messages": TURN, "metadata": {"user_id": "user_2"}}, {}))
    assert first == again != 0
    assert other != first


async def test_responses_that_continue_one_are_of_one_session(guarded: FakeMesh) -> None:
    first, answer = await ask(guarded, (RESPONSES, {"input": "1"}, {}))
    assert first == 0, "nothing says yet that it goes on"
    found = []
    for text in "234":
        session, answer = await ask(guarded, (RESPONSES, {"input": text, "previous_response_id": answer["id"]}, {}))
        found.append(session)
    assert found[0] == found[1] == found[2] != 0


async def test_a_user_id_that_is_no_text_is_refused(guarded: FakeMesh) -> None:
    async with guarded.http(headers={"authorization": f"Bearer {KEYS[0]}"}) as http:
        body = {"model": MODEL, "max_tokens": 3, "messages": TURN, "metadata": {"user_id": 7}}
        response = await http.post(MESSAGES, json=body)
    assert response.status_code == 400
    assert "metadata.user_id must be a string" in response.text
