"""Tests what a gateway keeps of streams that it turns into chats chunk by chunk: its memory is bounded."""

import tracemalloc

import pytest

from tokenloom.services.gateway.assistant.message_plans import MessagePlan
from tokenloom.services.gateway.mesh.text_client import TextState
from tokenloom.services.gateway.openai import derender
from tokenloom.services.gateway.openai.answer import AssistantTurn
from tokenloom.services.gateway.openai.derender import DerenderSession, DerenderSessions


def session(name: str, num_tool_bytes: int = 0) -> DerenderSession:
    return DerenderSession(name, AssistantTurn(MessagePlan(), False, False), TextState([]), num_tool_bytes)


def put(sessions: DerenderSessions, kept: DerenderSession, token_ids: list[int], text: str = "") -> None:
    kept.feed(text)
    kept.num_tokens += len(token_ids)
    sessions.put("tenant", kept, token_ids, b"{}")


def test_a_long_chunk_without_text_takes_no_memory() -> None:
    sessions = DerenderSessions()
    tracemalloc.start()
    try:
        for number in range(8):
            put(sessions, session(str(number)), [100_000 + each for each in range(131_072)])
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1 << 20


def test_the_last_chunk_may_come_again() -> None:
    sessions = DerenderSessions()
    put(sessions, session("a"), [1, 2])
    again = sessions.take("tenant", "a", 0, [1, 2])
    assert again is not None
    assert again.repeated == b"{}"
    assert sessions.take("tenant", "a", 0, [1, 3]) is None
    following = sessions.take("tenant", "a", 2, [1, 2])
    assert following is not None
    assert following.repeated is None


@pytest.mark.parametrize("of_tools", [False, True])
def test_sessions_beyond_the_limit_of_characters_go(monkeypatch: pytest.MonkeyPatch, of_tools: bool) -> None:
    """Text that a parser holds back, and tools that it needs to read calls, count although no answer has shown them."""
    monkeypatch.setattr(derender, "MAX_CHARS", 1000)
    sessions = DerenderSessions()
    for name in "abc":
        kept = session(name, num_tool_bytes=100 if of_tools else 0)
        put(sessions, kept, [1], text="" if of_tools else "x" * 400)
    found = [sessions.take("tenant", name, 1, []) is not None for name in "abc"]
    assert found == [False, True, True]
