"""Sounds are transcribed in pieces, and answered in the forms of OpenAI's API."""

import asyncio
import json
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.services.gateway.openai.ear import (
    ENGLISH,
    FIRST_SPECIAL,
    NO_STAMPS,
    SILENCE,
    STAMP,
    TRAITS,
    Ear,
    listening,
    piece_of,
    prompt_of,
    say,
    send,
    sound,
    tokens,
)
from tokenloom.request import errors
from tokenloom.services.gateway.records.transcript import compression_ratio
from tokenloom.v1 import tokenizer_pb2, types_pb2


@pytest.fixture
async def ear(socket_dir: Path) -> AsyncIterator[Ear]:
    async with listening(socket_dir) as ear:
        yield ear


LONG = {
    0: tokens("| one|| two|| thr", 0, 20, 20, 45, 45),
    900: tokens("| three|| four|", 0, 25, 25, 50),
    1900: tokens("| end|", 5, 30),
}
"""What is heard of a sound of 2.5 s: the first piece ends in the middle of a word."""


async def test_a_short_sound(ear: Ear) -> None:
    ear.heard = {0: tokens(" Hallo.")}
    response = await ear.post(800)
    assert response.status_code == 200, response.text
    assert response.json() == {"text": "Hallo.", "usage": {"type": "duration", "seconds": 1}}
    first, second = ear.requests
    assert (prompt_of(first), prompt_of(second)) == ("^", "^de1")
    assert piece_of(second) == (0, 800)
    asked = first.submit.sampling_params
    assert (list(asked.allowed_token_ids), list(asked.logprob_token_ids)) == ([ENGLISH, ENGLISH + 1], [SILENCE])
    asked = second.submit.sampling_params
    assert (asked.temperature, asked.max_tokens) == (0.0, 444)
    assert (list(asked.transcript.suppressed_token_ids), list(asked.transcript.begin_suppressed_token_ids)) == (
        [7],
        [8],
    )
    assert not asked.transcript.HasField("timestamps")
    calls = [*ear.mesh.tokenizer.transcripts, *ear.mesh.second_tokenizer.transcripts]
    assert not any(each.with_timestamps for each in calls)


async def test_a_long_sound_is_heard_in_pieces_that_begin_at_timestamps(ear: Ear) -> None:
    ear.heard = LONG
    response = await ear.post(2500, response_format="verbose_json", language="German", prompt="Names")
    answer = response.json()
    assert ear.pieces == [(0, 1000), (900, 1000), (1900, 600)]
    assert answer["text"] == "one two three four end"
    assert (answer["task"], answer["language"], answer["duration"]) == ("transcribe", "german", 2.5)
    assert answer["usage"] == {"type": "duration", "seconds": 3}
    assert [(each["id"], each["seek"], each["start"], each["end"], each["text"]) for each in answer["segments"]] == [
        (0, 0, 0.0, 0.4, " one"),
        (1, 0, 0.4, 0.9, " two"),
        (2, 90, 0.9, 1.4, " three"),
        (3, 90, 1.4, 1.9, " four"),
        (4, 190, 1.9, 2.5, " end"),
    ]
    segment = answer["segments"][0]
    assert segment["tokens"] == [STAMP, *b" one", STAMP + 20]
    assert (segment["avg_logprob"], segment["temperature"]) == (-0.5, 0.0)
    assert segment["no_speech_prob"] == pytest.approx(0.125)
    assert segment["compression_ratio"] == pytest.approx(compression_ratio("one two thr"))
    assert {prompt_of(each) for each in ear.requests} == {"Names^", "Names^de1"}
    stamps = ear.requests[-1].submit.sampling_params.transcript.timestamps
    assert (stamps.first_token_id, stamps.no_timestamps_token_id, stamps.num_text_ids) == (
        STAMP,
        NO_STAMPS,
        FIRST_SPECIAL,
    )
    assert stamps.max_initial_index == 50


@pytest.mark.parametrize("form", ["json", "text"])
async def test_a_long_sound_has_timestamps_whatever_the_answer(ear: Ear, form: str) -> None:
    ear.heard = LONG
    response = await ear.post(2500, response_format=form)
    text = response.json()["text"] if form == "json" else response.text
    assert text == ("one two three four end" if form == "json" else "one two three four end\n")


async def test_subtitles(ear: Ear) -> None:
    ear.heard = {0: tokens("| one --> two|| three|", 0, 20, 21, 40)}
    srt = await ear.post(900, response_format="srt")
    assert srt.text == ("1\n00:00:00,000 --> 00:00:00,400\none -> two\n\n2\n00:00:00,420 --> 00:00:00,800\nthree\n\n")
    vtt = await ear.post(900, response_format="vtt")
    assert vtt.text == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:00.400\none -> two\n\n00:00:00.420 --> 00:00:00.800\nthree\n\n"
    )
    ear.heard = {0: tokens("| a & <b>\n\nc|", 0, 20)}
    srt, vtt = [await ear.post(900, response_format=form) for form in ("srt", "vtt")]
    assert srt.text == "1\n00:00:00,000 --> 00:00:00,400\na & <b> c\n\n"
    assert vtt.text == "WEBVTT\n\n00:00:00.000 --> 00:00:00.400\na &amp; &lt;b> c\n\n"
    assert {each.headers["content-type"] for each in (srt, vtt)} == {"text/plain; charset=utf-8"}


async def test_words(ear: Ear) -> None:
    ear.heard = {0: tokens("| ab, cd|| e|", 0, 20, 20, 30)}
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": "word", "language": "de"}
    answer = (await ear.post(900, **fields)).json()
    assert "segments" not in answer
    assert answer["words"] == [
        {"word": "ab,", "start": 0.02, "end": 0.1},
        {"word": "cd", "start": 0.1, "end": 0.16},
        {"word": "e", "start": 0.2, "end": 0.24},
    ]
    aligned = ear.requests[-1].submit
    assert aligned.pooling_params.task == types_pb2.POOLING_TASK_ALIGN
    assert (aligned.pooling_params.skipped_tokens, aligned.pooling_params.aligned_rows) == (4, 45)
    assert list(aligned.prompt.token_ids) == [*b"^de1", *ear.heard[0][:-1]]
    both = {**fields, "timestamp_granularities[]": ["word", "segment"]}
    answer = (await ear.post(900, **both)).json()
    assert (len(answer["segments"]), len(answer["words"])) == (2, 3)


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_a_stream_has_each_token_of_a_short_sound(ear: Ear) -> None:
    ear.heard = {0: tokens(" so ")}
    response = await ear.post(900, stream="true", language="en")
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *deltas, done = events_of(response.text)
    assert {each["type"] for each in deltas} == {"transcript.text.delta"}
    assert "".join(each["delta"] for each in deltas) == done["text"] == "so "
    assert done["usage"] == {"type": "duration", "seconds": 1}
    assert ear.requests[0].submit.text.stream_interval == 1


async def test_a_stream_has_segments_of_a_long_sound_once_they_stay(ear: Ear) -> None:
    ear.heard = LONG
    *deltas, done = events_of((await ear.post(2500, stream="true")).text)
    text = "one two three four end"
    assert "".join(each["delta"] for each in deltas) == done["text"] == text
    assert len(deltas) >= 3


async def test_a_stream_begins_before_the_sound_ends(ear: Ear) -> None:
    ear.heard = LONG
    answer, held = ear.answer, asyncio.Event()

    def hold(request: Any) -> None:
        if piece_of(request)[0] == 900:
            held.set()
        else:
            answer(request)

    ear.answer = hold  # type: ignore[method-assign]
    async with ear.http.stream(
        "POST", "/v1/audio/transcriptions", data={"stream": "true", "language": "de"}, files=sound(2500)
    ) as response:
        lines = response.aiter_lines()
        assert json.loads((await anext(lines)).removeprefix("data: "))["delta"]
        await held.wait()
        answer(ear.requests[-1])
        assert [line async for line in lines if line][-1] == "data: [DONE]"


async def test_log_probabilities(ear: Ear) -> None:
    ear.heard = {0: tokens(" a")}
    fields = {"include[]": "logprobs", "language": "de"}
    expected = [{"token": each, "bytes": [ord(each)], "logprob": -0.5} for each in " a"]
    assert (await ear.post(900, **fields)).json()["logprobs"] == expected
    *_, done = events_of((await ear.post(900, **fields, stream="true")).text)
    assert done["logprobs"] == expected


@pytest.mark.parametrize("route", ["transcriptions", "translations"])
@pytest.mark.parametrize("fields", [{}, {"response_format": "verbose_json"}])
async def test_answers_are_as_described(ear: Ear, route: str, fields: dict[str, str]) -> None:
    if route == "transcriptions":
        fields = {**fields, **({"timestamp_granularities[]": "word"} if fields else {"include[]": "logprobs"})}
    ear.heard = {0: tokens("| a b|", 0, 20)}
    answer = await ear.post(900, route=route, **fields)
    assert answer.status_code == 200, answer.text
    api = (await ear.http.get("/openapi.json")).json()
    schema = api["paths"][f"/v1/audio/{route}"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(answer.json(), {**schema, "components": api["components"]})


@pytest.mark.parametrize("texts", [(b" ", b"\xc3", b"\xbc", b"!"), (b" a", b"\xc3"), (b" ", b"\xc3")])
async def test_a_stream_has_the_log_probability_of_each_token(ear: Ear, texts: tuple[bytes, ...]) -> None:
    def answer(request: Any) -> None:
        for each in texts:
            send(request, [ord("a")], [each], types_pb2.Logprobs(sampled=[-0.5], rank=[1]))
        request.finish()

    ear.answer = answer  # type: ignore[method-assign]
    *deltas, done = events_of((await ear.post(900, language="de", stream="true", **{"include[]": "logprobs"})).text)
    assert "".join(each["delta"] for each in deltas) == done["text"]
    assert [token for each in deltas for token in each["logprobs"]] == done["logprobs"]
    assert [bytes(each["bytes"]) for each in done["logprobs"]] == list(texts)


async def test_what_computed_the_pieces_is_named(ear: Ear) -> None:
    versions, usual = {0: "a", 900: "a+b", 1900: "b"}, ear.answer

    def answer(request: Any) -> None:
        if request.submit.sampling_params.max_tokens == 1:
            usual(request)
            return
        start, _ = piece_of(request)
        say(request, LONG[start])
        timeline = types_pb2.Timeline(mixed_numerics=start == 900)
        request.finish(weights_version=versions[start], timeline=timeline)

    ear.answer = answer  # type: ignore[method-assign]
    fields = {"language": "de"}
    for form in ("json", "verbose_json"):
        whole = (await ear.post(2500, **fields, response_format=form)).json()
        assert (whole["weights_version"], whole["mixed_numerics"]) == ("a+b", True)
    *_, done = events_of((await ear.post(2500, **fields, stream="true")).text)
    assert (done["weights_version"], done["mixed_numerics"]) == ("a+b", True)
    versions |= {900: "b", 1900: "a"}
    assert (await ear.post(2500, **fields)).json()["weights_version"] == "a+b+a"


@pytest.mark.parametrize("aborted", [-1, 900])
async def test_a_piece_that_engines_end_early_is_missed(ear: Ear, aborted: int) -> None:
    """As in a pause. The answer was 200, and had a hole or no language. -1: the request that finds the language."""
    usual, ear.heard = ear.answer, LONG

    def answer(request: Any) -> None:
        if (-1 if request.submit.sampling_params.max_tokens == 1 else piece_of(request)[0]) == aborted:
            request.finish(types_pb2.FINISH_REASON_ABORT)
        else:
            usual(request)

    ear.answer = answer  # type: ignore[method-assign]
    refused = await ear.post(2500)
    assert refused.status_code == 503
    assert "before the sound was heard; retry" in refused.json()["error"]["message"]
    *_, last = (await ear.post(2500, stream="true")).text.strip().split("\n\n")
    assert "before the sound was heard; retry" in last


async def test_translations(ear: Ear) -> None:
    ear.heard = {0: tokens("| yes|", 0, 9)}
    answer = (await ear.post(900, route="translations", response_format="verbose_json")).json()
    assert (answer["task"], answer["language"], answer["text"]) == ("translate", "english", "yes")
    assert prompt_of(ear.requests[-1]) == "^de2"


async def test_a_sound_without_a_frame_is_silent(ear: Ear) -> None:
    answer = (await ear.post(9, response_format="verbose_json")).json()
    assert (answer["text"], answer["segments"], answer["duration"]) == ("", [], 0.009)
    assert not ear.requests


async def test_files_are_put_once_and_released(ear: Ear) -> None:
    ear.heard = LONG
    await ear.post(2500)
    (put,) = [each for encoder in ear.encoders for each in encoder.puts]
    assert put.kind == types_pb2.MEDIA_KIND_AUDIO
    holder = next(each for each in ear.encoders if each.puts)
    assert await asyncio.wait_for(holder.released.get(), 30) == put.request_id


async def test_the_file_is_put_again_where_an_encoder_has_lost_it(ear: Ear) -> None:
    ear.heard = LONG
    answer = ear.answer

    def lose(request: Any) -> None:
        if piece_of(request)[0] == 900:
            for each in ear.encoders:
                each.files.clear()
        answer(request)

    ear.answer = lose  # type: ignore[method-assign]
    assert (await ear.post(2500)).json()["text"] == "one two three four end"
    assert sum(len(each.puts) for each in ear.encoders) == 2


@pytest.mark.parametrize("aligns", [False, True])
async def test_an_engine_that_lost_the_rows_gets_them_from_another_encoder(ear: Ear, *, aligns: bool) -> None:
    ear.heard = {0: tokens("| one|| two|", 0, 20, 20, 40)}
    answer, lost = ear.answer, list[Any]()

    def lose(request: Any) -> None:
        is_silence = request.submit.sampling_params.max_tokens == 1
        if lost or is_silence or request.submit.HasField("pooling_params") != aligns:
            if lost and request.submit.journals:  # it goes on behind the tokens that the client may have already
                say(request, ear.heard[0][6:])
                request.finish()
            else:
                answer(request)
            return
        lost.append(request)
        holder = next(each for each in ear.encoders if each.puts)
        holder.error = errors.Unavailable("gone")
        holder.files.clear()
        if not aligns:
            say(request, ear.heard[0][:6])
        request.fail(errors.MediaLost("the encoder does not have the file"))

    ear.answer = lose  # type: ignore[method-assign]
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": ["word", "segment"]}
    result = (await ear.post(900, language="de", **fields)).json()
    assert [each["text"] for each in result["segments"]] == [" one", " two"]
    assert [each["word"] for each in result["words"]] == ["one", "two"]
    assert sum(len(each.puts) for each in ear.encoders) == 2
    again = ear.requests[ear.requests.index(lost[0]) + 1]
    (first,), (second,) = lost[0].submit.prompt.media, again.submit.prompt.media
    assert first.encoder != second.encoder


async def test_a_client_that_leaves_ends_everything(ear: Ear) -> None:
    held, answer = asyncio.Event(), ear.answer

    def hold(request: Any) -> None:
        if request.submit.sampling_params.max_tokens == 1:
            answer(request)
        else:
            say(request, tokens("| on", 0)[:-1])
            held.set()

    ear.answer = hold  # type: ignore[method-assign]
    call = asyncio.create_task(ear.post(2500))
    await held.wait()
    call.cancel()
    await asyncio.wait_for(ear.requests[-1].cancelled.wait(), 30)
    holder = next(each for each in ear.encoders if each.puts)
    await asyncio.wait_for(holder.released.get(), 30)


FORM = "response_format must be one of json, text, srt, verbose_json, vtt"


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"response_format": "diarized_json"}, "response_format", FORM),
        ({"language": "xx"}, "language", "language 'xx' is not known; there are: en, de"),
        ({"temperature": "warm"}, "temperature", "temperature must be a number from 0 to 2"),
        ({"temperature": "nan"}, "temperature", "temperature must be a number from 0 to 2"),
        ({"temperature": "2.1"}, "temperature", "temperature must be a number from 0 to 2"),
        ({"seed": "-1"}, "seed", "seed must be a whole number from 0 on, below 2^63"),
        ({"seed": "9" * 40}, "seed", "seed must be a whole number from 0 on, below 2^63"),
        ({"stream": "maybe"}, "stream", "stream must be true or false"),
        ({"stream": "true", "response_format": "srt"}, "stream", "stream is for response_format json or text"),
        (
            {"timestamp_granularities[]": "word"},
            "timestamp_granularities",
            "timestamp_granularities needs response_format verbose_json",
        ),
        (
            {"timestamp_granularities[]": "line", "response_format": "verbose_json"},
            "timestamp_granularities",
            "timestamp_granularities may hold segment and word",
        ),
        ({"include[]": "words"}, "include", "include may hold logprobs, with response_format json"),
    ],
)
async def test_refusals_name_the_field(ear: Ear, fields: dict[str, str], field: str, message: str) -> None:
    response = await ear.post(**fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["message"]) == (field, message)
    assert not ear.requests


async def test_fields_without_effect_are_named(ear: Ear) -> None:
    ear.heard = {0: tokens(" a")}
    response = await ear.post(**{"chunking_strategy[type]": "server_vad", "foo": "1"})
    assert response.status_code == 200
    assert response.headers["x-tokenloom-ignored"] == "chunking_strategy, foo"


async def test_unknown_fields_are_refused_where_the_operator_wants_it(socket_dir: Path) -> None:
    async with listening(socket_dir, strict=True) as ear:
        response = await ear.post(foo="1")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "foo")


async def test_english_only_models_ask_for_no_language(socket_dir: Path) -> None:
    traits = tokenizer_pb2.TranscriptTraits()
    traits.CopyFrom(TRAITS)
    traits.ClearField("languages")
    async with listening(socket_dir, traits) as ear:
        ear.heard = {0: tokens("| a|", 0, 9)}
        answer = (await ear.post(response_format="verbose_json")).json()
        assert (answer["language"], answer["text"]) == ("english", "a")
        assert [prompt_of(each) for each in ear.requests] == ["^", "^en1"]
        response = await ear.post(route="translations")
        assert (response.status_code, response.json()["error"]["message"]) == (
            400,
            "the model knows English only: it does not translate",
        )
        assert (await ear.post(language="de")).json()["error"]["param"] == "language"


async def test_a_model_that_transcribes_reads_no_texts(ear: Ear) -> None:
    turns = [{"role": "user", "content": "hi"}]
    for route, body in (("chat/completions", {"messages": turns}), ("completions", {"prompt": "hi"})):
        response = await ear.http.post(f"/v1/{route}", json=body)
        assert response.status_code == 400
        assert "send them to /v1/audio/transcriptions" in response.json()["error"]["message"]


async def test_a_model_of_texts_transcribes_nothing(http: httpx.AsyncClient) -> None:
    large = {"file": ("a.wav", b"x" * (20 << 20))}  # it is refused before it has arrived
    response = await http.post("/v1/audio/transcriptions", files=large)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "the model 'fake' does not transcribe sounds"


async def test_a_model_that_is_not_served(ear: Ear) -> None:
    response = await ear.post(model="whisper-1")
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")


async def test_sounds_that_are_too_large(socket_dir: Path) -> None:
    async with listening(socket_dir, max_audio_bytes=1000) as ear:
        data = b"sound 100 " + b"x" * (200 << 10)
        response = await ear.http.post("/v1/audio/transcriptions", files={"file": ("a.wav", data)})
        assert response.status_code == 413


async def test_a_form_without_a_file(ear: Ear) -> None:
    response = await ear.http.post("/v1/audio/transcriptions", files={"model": (None, b"fake")})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "file")
    response = await ear.http.post("/v1/audio/transcriptions", files={"file": ("a.wav", b"")})
    assert response.json()["error"]["message"] == "the file is empty"
    assert (await ear.http.post("/v1/audio/transcriptions", json={})).status_code == 415


async def test_a_file_that_no_encoder_reads(ear: Ear) -> None:
    response = await ear.http.post("/v1/audio/transcriptions", files={"file": ("a.wav", b"bad sound")})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "file")


async def test_the_openai_client(ear: Ear) -> None:
    ear.heard = {0: tokens("| one|| two|", 0, 20, 20, 40)}
    async with openai.AsyncOpenAI(base_url=f"http://{ear.mesh.http_address}/v1", api_key="-", max_retries=0) as client:
        create = client.audio.transcriptions.create
        file = sound(900)["file"]
        assert (await create(file=file, model="fake", response_format="srt")).startswith("1\n00:00:00,000 --> ")
        verbose = await create(
            file=file, model="fake", response_format="verbose_json", timestamp_granularities=["word", "segment"]
        )
        assert verbose.segments is not None
        assert verbose.words is not None
        assert [each.text for each in verbose.segments] == [" one", " two"]
        assert [each.word for each in verbose.words] == ["one", "two"]
        ear.heard = {0: tokens(" one")}
        assert (await create(file=file, model="fake", prompt="a", language="de", temperature=0.5)).text == "one"
        stream = await create(file=file, model="fake", stream=True, include=["logprobs"])
        kinds = [event.type async for event in stream]
        assert set(kinds[:-1]) == {"transcript.text.delta"}
        assert kinds[-1] == "transcript.text.done"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the client's own: some of its versions give it
            translated = await client.audio.translations.create(file=file, model="fake", response_format="text")
        assert str(translated) == "one\n"


async def test_the_gateway_drains_after_the_last_piece(ear: Ear) -> None:
    ear.heard = LONG
    answer, began = ear.answer, asyncio.Event()

    def hold(request: Any) -> None:
        if not began.is_set() and request.submit.sampling_params.max_tokens > 1:
            began.set()
        else:
            answer(request)

    ear.answer = hold  # type: ignore[method-assign]
    call = asyncio.create_task(ear.post(2500))
    await began.wait()
    service = ear.mesh.service
    assert service is not None
    assert service._started is not None
    drains = asyncio.create_task(service._started[0].first.generator.drain())
    await asyncio.sleep(0)
    refused = await ear.post(2500)
    assert refused.status_code == 503
    answer(ear.requests[-1])
    assert (await call).json()["text"] == "one two three four end"
    await drains


async def test_seconds_are_counted(ear: Ear) -> None:
    ear.heard = LONG
    await ear.post(2500)
    metrics = (await ear.http.get("/metrics")).text
    assert 'tokenloom_gateway_sound_seconds_total{model_name="fake"} 2.5' in metrics
