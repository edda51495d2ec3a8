"""Events and whole bodies of OpenAI's API become the same answer."""

import json

import pytest

from benchmarks.chaos.clients.answer import Answer, Sample
from benchmarks.chaos.clients.openai_answer import ErrorEvent, EventReader, error_text, take_event, take_whole


def test_events_are_split_however_they_arrive() -> None:
    data = b'id: 7\ndata: {"a": 1}\n\n: a comment\nid: 8\ndata: [DONE]\n\n'
    for size in range(1, len(data) + 1):
        reader = EventReader()
        found = [each for at in range(0, len(data), size) for each in reader.feed(data[at : at + size])]
        assert found == ['{"a": 1}', "[DONE]"]
        assert reader.last_id == "8"


def test_an_event_whose_data_did_not_arrive_is_asked_for_again() -> None:
    reader = EventReader()
    assert list(reader.feed(b"id: 1\ndata: x\n\nid: 2\ndat")) == ["x"]
    assert reader.last_id == "1"
    reader.begin()
    assert list(reader.feed(b"id: 2\ndata: y\n\n")) == ["y"]
    assert reader.last_id == "2"


def test_a_stream_of_completions() -> None:
    answer = Answer()
    logprobs = {"token_logprobs": [-1.0]}
    first = {"index": 1, "text": "a", "token_ids": [5], "logprobs": logprobs, "finish_reason": None}
    last = {"index": 1, "text": "b", "token_ids": [6], "finish_reason": "stop", "stop_reason": "x"}
    assert take_event(answer, json.dumps({"choices": [first]}))
    assert take_event(answer, json.dumps({"choices": [last]}))
    assert not take_event(answer, json.dumps({"choices": [], "usage": {"completion_tokens": 2}}))
    assert answer == Answer({1: Sample([5, 6], "ab", "stop", "x", [-1.0])}, 2)


def test_a_chat_with_tool_calls_whole_and_streamed() -> None:
    streamed, whole = Answer(), Answer()
    name = {"index": 0, "id": "call_1", "function": {"name": "f", "arguments": ""}}
    arguments = {"index": 0, "function": {"arguments": "{}"}}
    for call in (name, arguments):
        take_event(streamed, json.dumps({"choices": [{"index": 0, "delta": {"tool_calls": [call]}, "token_ids": [1]}]}))
    message = {"content": None, "tool_calls": [{"id": "call_2", "function": {"name": "f", "arguments": "{}"}}]}
    take_whole(whole, json.dumps({"choices": [{"index": 0, "message": message, "token_ids": [1, 1]}]}).encode())
    assert streamed == whole
    assert whole.samples[0].tool_calls == [["f", "{}"]]


def test_an_error_event() -> None:
    with pytest.raises(ErrorEvent, match="unavailable: gone"):
        take_event(Answer(), '{"error": {"code": "unavailable", "message": "gone"}}')


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"type": "server_error", "code": null, "message": "m"}}', "server_error: m"),
        (b'{"error": "of Ollama"}', "of Ollama"),
        (b"<html>", None),
        (b"{}", None),
        (b"[1]", None),
    ],
)
def test_error_bodies(body: bytes, text: str | None) -> None:
    assert error_text(body) == text
