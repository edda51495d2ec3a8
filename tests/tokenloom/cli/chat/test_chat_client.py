"""A streamed chat against a small server."""

import pytest

from tests.tokenloom.cli.fake_server import FakeServer, events, piece
from tokenloom.cli.chat.chat_client import Answer, stream_chat
from tokenloom.cli.failures import RequestFailed
from tokenloom.cli.server import Server


def ask(url: str) -> tuple[Answer, list[str], list[str]]:
    pieces: list[str] = []
    thoughts: list[str] = []
    body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
    return stream_chat(Server(url), body, pieces.append, thoughts.append), pieces, thoughts


def test_pieces_usage_and_timeline_are_collected(server: FakeServer) -> None:
    last = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}, "timeline": {"decode_ms": 1.5}}
    server.reply(200, events(piece("Hel"), piece("lo", "stop"), last))
    answer, pieces, thoughts = ask(server.url)
    assert (pieces, thoughts) == (["Hel", "lo"], [])
    assert (answer.text, answer.finish_reason) == ("Hello", "stop")
    assert answer.usage["completion_tokens"] == 2
    assert answer.timeline == {"decode_ms": 1.5}
    assert 0 < answer.seconds_to_first_token <= answer.seconds
    assert server.requests[0][3]["stream_options"] == {"include_usage": True}


def test_thoughts_are_no_part_of_the_answer(server: FakeServer) -> None:
    server.reply(200, events({"choices": [{"delta": {"reasoning_content": "Hm."}}]}, piece("Yes", "stop")))
    answer, pieces, thoughts = ask(server.url)
    assert (answer.text, pieces, thoughts) == ("Yes", ["Yes"], ["Hm."])


def test_an_error_in_the_stream_says_why(server: FakeServer) -> None:
    server.reply(200, events(piece("Hel"), {"error": {"message": "the engine went away"}}))
    with pytest.raises(RequestFailed, match="the engine went away"):
        ask(server.url)


def test_an_answer_without_its_end_is_a_failure(server: FakeServer) -> None:
    server.reply(200, events(piece("Hel")))
    with pytest.raises(RequestFailed, match="incomplete"):
        ask(server.url)
