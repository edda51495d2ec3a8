"""A streamed chat against a small server."""

import io
from typing import Any

import pytest
from rich.console import Console

from tests.tokenloom.cli.fake_server import FakeServer, events, piece
from tokenloom.cli.chat.chat_client import Answer, stream_chat, timeline_table
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


def rows(**engines: Any) -> list[list[str]]:
    times = {
        "tokenize": 1.0,
        "placement": 0.5,
        "queued": 0.5,
        "prefill": 10.0,
        "kv_transfer": 2.0 * (engines["prefill_engine"] != engines["decode_engine"]),
        "decode": 202.0,
        "detokenize": 3.0,
    }
    timeline = {f"{step}_ms": ms for step, ms in times.items()} | {"total_ms": 222.0} | engines
    usage = {"prompt_tokens": 12, "completion_tokens": 101}
    stream = io.StringIO()
    answer = Answer(usage=usage, timeline=timeline, seconds_to_first_token=0.0125)
    Console(file=stream, width=120).print(timeline_table(answer))
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in stream.getvalue().splitlines() if "│" in line]


def test_every_step_has_its_row_and_the_rest_is_the_gateways() -> None:
    assert rows(prefill_engine="engine-0", decode_engine="engine-1") == [
        ["tokenizer", "tokenize", "1.0", "chat template and text to 12 tokens"],
        ["coordinator", "placement", "0.5", "selected engine-0 to prefill, engine-1 to decode"],
        ["engine", "queue", "0.5", "waited for a slot in the batch"],
        ["engine", "prefill", "10.0", "12 prompt tokens, first answer token"],
        ["engine", "KV transfer", "2.0", "KV blocks of the prompt, engine-0 to engine-1"],
        ["engine", "decode", "200.0", "101 answer tokens, 500 a second"],
        ["output processor", "detokenize", "3.0", "tokens to text"],
        ["gateway", "other", "5.0", "HTTP, and calls between the services"],
        ["all", "total", "222.0", "first text after 12 ms"],
    ]


def test_drafts_have_a_row() -> None:
    drafts = {"num_drafts": 20, "num_draft_tokens": 100, "num_accepted_tokens": 60}
    table = rows(prefill_engine="engine-0", decode_engine="engine-0", drafts=drafts)
    assert ["engine", "drafts", "", "60% of 100 drafts right, 4.0 tokens a step with drafts"] in table


def test_one_engine_transfers_nothing() -> None:
    table = rows(prefill_engine="engine-0", decode_engine="engine-0")
    assert ["coordinator", "placement", "0.5", "selected engine-0"] in table
    assert ["engine", "KV transfer", "0.0", "none: one engine did both"] in table
    assert ["engine", "decode", "202.0", "101 answer tokens, 495 a second"] in table
