"""Bytes of a stream to times and counts."""

import pytest

from tests.benchmarks.fake_server import DONE, event, text, usage
from tokenloom.bench.load.events import AnswerReader, Outcome


def read(*arrivals: tuple[float, bytes], sent: float = 10.0) -> Outcome:
    reader = AnswerReader(Outcome(0.0), sent)
    for now, data in arrivals:
        reader.feed(data, now)
    reader.end()
    return reader.outcome


def test_times_are_those_of_outputs() -> None:
    outcome = read((10.5, text("a")), (10.75, text("")), (11.0, text("c")), (12.0, usage(4, 3) + DONE))
    assert (outcome.ttft, outcome.itl, outcome.latency) == (0.5, [0.25, 0.25], 1.0)
    assert (outcome.input_tokens, outcome.output_tokens, outcome.error) == (4, 3, "")
    assert outcome.tpot == 0.25


def test_an_event_may_come_in_pieces_and_several_at_once() -> None:
    data = text("a") + text("b") + DONE
    for cut in range(1, len(data)):
        outcome = read((10.5, data[:cut]), (11.0, data[cut:]))
        assert outcome.output_tokens == 2, cut


def test_lines_may_end_in_crlf_and_comments_are_skipped() -> None:
    assert read((10.5, b": ping\r\n\r\n" + text("a").replace(b"\n", b"\r\n"))).output_tokens == 1


def test_usage_counts_tokens_of_merged_events() -> None:
    outcome = read((10.5, text("abc")), (11.5, text("def")), (12.0, usage(1, 6)))
    assert outcome.output_tokens == 6
    assert outcome.tpot == pytest.approx(1 / 5)


def test_a_chats_role_is_no_output() -> None:
    role = event(choices=[{"delta": {"role": "assistant", "content": ""}}])
    word = event(choices=[{"delta": {"content": "a"}}])
    end = event(choices=[{"delta": {}, "finish_reason": "stop"}])
    outcome = read((10.25, role), (10.5, word), (11.0, word), (12.0, end))
    assert (outcome.ttft, outcome.latency, outcome.output_tokens) == (0.5, 1.0, 2)


def test_an_error_event_fails_the_request() -> None:
    assert read((10.5, text("a")), (11.0, event(error={"message": "the engine failed"}))).error == "the engine failed"


def test_an_empty_stream_is_a_failure() -> None:
    assert "without an output" in read((10.5, DONE)).error


def test_a_single_token_has_no_time_per_token() -> None:
    assert read((10.5, text("a"))).tpot is None


def test_the_timeline_is_kept() -> None:
    timeline = {"queued_ms": 1.5, "decode_engine": "engine-0", "cache_miss": {"cause": "evicted", "token": 16}}
    outcome = read((10.5, text("a") + event(choices=[], timeline=timeline)))
    assert (outcome.timeline, outcome.error) == (timeline, "")


def test_cached_tokens_are_counted_in_each_api() -> None:
    miss = {"cause": "evicted", "token": 32, "missed_tokens": 8}
    details = {"cached_tokens": 32, "cache_miss": miss}
    chat = event(choices=[], usage={"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": details})
    response = {"usage": {"input_tokens": 40, "output_tokens": 2, "input_tokens_details": details}}
    message = {
        "input_tokens": 3,
        "cache_creation_input_tokens": 5,
        "output_tokens": 2,
        "cache_read_input_tokens": 32,
        "cache_miss": miss,
    }
    for payload in (
        text("a") + chat,
        event(type="response.output_text.delta", delta="a") + event(type="response.completed", response=response),
        event(type="content_block_delta", delta={"type": "text_delta", "text": "a"})
        + event(type="message_delta", delta={"stop_reason": "max_tokens"}, usage=message),
    ):
        outcome = read((10.5, payload))
        assert (outcome.input_tokens, outcome.cached_tokens, outcome.output_tokens) == (40, 32, 2), payload
        assert outcome.miss_cause == "evicted"
        assert (outcome.ttft, outcome.error) == (0.5, "")


def test_a_failed_response_fails_the_request() -> None:
    failed = event(type="response.failed", response={"error": {"message": "the engine failed"}, "usage": None})
    assert read((10.5, failed)).error == "the engine failed"


def test_a_chats_call_is_an_output() -> None:
    call = event(choices=[{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}}])
    assert read((10.5, call)).output_tokens == 1
