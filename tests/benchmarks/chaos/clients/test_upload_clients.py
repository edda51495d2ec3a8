"""A batch outlives the loss of its gateway, and its client waits for it; a transcription is sent again."""

import json
from dataclasses import replace

import pytest

from benchmarks.chaos.clients.answer import Progress
from benchmarks.chaos.clients.exchange import Exchange
from benchmarks.chaos.clients.failure import RequestFailed
from benchmarks.chaos.clients.mix import Case
from benchmarks.chaos.clients.upload_clients import BatchClient, TranscriptClient, form_of
from tests.benchmarks.chaos.clients.fake_server import END, STREAM, answering, chunk
from tests.benchmarks.chaos.clients.test_openai_clients import unary

LOST = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"
"""The gateway ends in the middle of an answer."""
GONE = unary("404 Not Found", b'{"error": {"code": "not_found", "message": "no file"}}')


def found(**fields: object) -> bytes:
    return unary("200 OK", json.dumps(fields).encode())


def batch(status: str, **fields: object) -> bytes:
    return found(id="batch_1", status=status, output_file_id="file-2", error_file_id=None, **fields)


def exchange() -> Exchange:
    case = Case("batch file", call="POST /v1/batches", options={"lines": [{"prompt": "a"}, {"prompt": "b"}]})
    return Exchange(5, case, 0, Progress(0.0), 10.0)


async def test_it_calls_again_until_the_results_are_there() -> None:
    lines = [{"custom_id": str(number), "id": f"r{number}", "response": {"request_id": "x"}} for number in (1, 0)]
    results = unary("200 OK", "\n".join(map(json.dumps, lines)).encode())
    sent, requests = exchange(), list[str]()
    script = [LOST, found(id="file-1"), batch("validating"), LOST, batch("completed"), LOST, results, LOST, GONE, GONE]
    async with answering(script, requests) as address:
        await BatchClient([address], "m").send(sent)
    assert json.loads(sent.answer.samples[0].text) == [{"custom_id": str(number), "response": {}} for number in (0, 1)]
    assert sent.resumed == 4
    assert [head.split(" HTTP")[0] for head in requests][-2:] == ["DELETE /v1/files/file-1", "DELETE /v1/files/file-2"]


async def test_a_batch_that_fails_is_a_failed_request() -> None:
    async with answering([found(id="file-1"), batch("failed")], []) as address:
        with pytest.raises(RequestFailed, match="batch failed"):
            await BatchClient([address], "m").send(exchange())


def transcription(*, streamed: bool = False) -> Exchange:
    options = {"file": b"RIFF", "fields": {"language": "en"}}
    case = Case("transcript", streamed=streamed, call="POST /v1/audio/transcriptions", options=options)
    return Exchange(5, case, 1, Progress(0.0), 10.0)


def test_a_form_has_its_fields_before_its_file() -> None:
    lines = form_of({"model": "m", "language": "en"}, "a.wav", b"\xff\r\n").split(b"\r\n")
    assert lines[0] == b"--chaos"
    assert lines[-2] == b"--chaos--"
    assert [line for line in lines if b"name=" in line][-1].endswith(b'name="file"; filename="a.wav"')
    assert b"\xff" in lines


async def test_a_transcription_is_sent_again_to_the_next_gateway() -> None:
    sent, first, second = transcription(), list[str](), list[str]()
    segments = [{"text": "hm", "avg_logprob": -1.5, "no_speech_prob": 0.25}]
    async with answering([LOST], first) as lost, answering([found(text="hm", segments=segments)], second) as other:
        await TranscriptClient([other, lost], "m").send(sent)
    assert json.loads(sent.answer.samples[0].text) == {"text": "hm", "segments": [{"text": "hm"}]}
    assert sent.answer.samples[0].logprobs == [-1.5, 0.25]
    assert (len(first), len(second), sent.resumed) == (1, 1, 1)
    assert "multipart/form-data; boundary=chaos" in second[0]


def event_stream(*events: dict[str, str]) -> bytes:
    return STREAM + b"".join(chunk(f"data: {json.dumps(event)}\n\n") for event in events)


async def test_a_streamed_transcription_begins_anew_after_a_loss() -> None:
    delta, done = {"type": "transcript.text.delta", "delta": "hm"}, {"type": "transcript.text.done", "text": "hmhm"}
    sent = transcription(streamed=True)
    async with answering([event_stream(delta), event_stream(delta, delta, done) + END], []) as address:
        await TranscriptClient([address], "m").send(replace(sent, gateway=0))
    assert (sent.answer.samples[0].text, sent.progress.first is not None) == ("hmhm", True)


async def test_a_stream_whose_pieces_are_not_its_text_has_failed() -> None:
    events = event_stream({"type": "transcript.text.done", "text": "hm"}) + END
    async with answering([events], []) as address:
        with pytest.raises(RequestFailed, match="the pieces are ''"):
            await TranscriptClient([address], "m").send(replace(transcription(streamed=True), gateway=0))


async def test_a_text_that_begins_as_json_does_is_none() -> None:
    options = {"file": b"RIFF", "fields": {"response_format": "text"}}
    sent = Exchange(5, replace(transcription().case, options=options), 0, Progress(0.0), 10.0)
    async with answering([unary("200 OK", b"{ hm")], []) as address:
        await TranscriptClient([address], "m").send(sent)
    assert sent.answer.samples[0].text == "{ hm"


async def test_a_refused_transcription_is_not_sent_again() -> None:
    refused = unary("400 Bad Request", b'{"error": {"code": "invalid_argument", "message": "no sound"}}')
    async with answering([refused], []) as address:
        with pytest.raises(RequestFailed, match="no sound"):
            await TranscriptClient([address], "m").send(replace(transcription(), gateway=0))
