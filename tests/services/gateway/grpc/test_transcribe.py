"""Sounds are transcribed over gRPC as over HTTP."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.services.gateway.fakes import FakeMesh
from tests.services.gateway.openai.ear import NO_STAMPS, STAMP, Ear, listening, piece_of, prompt_of, say, tokens
from tests.services.gateway.openai.test_transcription_limits import hold
from tests.services.gateway.openai.test_transcriptions import LONG
from tokenloom.client import AsyncClient, Client, TimedText
from tokenloom.request import errors
from tokenloom.services.gateway.grpc import other_calls
from tokenloom.v1 import inference_pb2, tokenizer_pb2, types_pb2

Response = inference_pb2.TranscribeResponse


@pytest.fixture
async def ear(socket_dir: Path) -> AsyncIterator[Ear]:
    async with listening(socket_dir) as ear:
        yield ear


async def requests(num_samples: int, size: int = 7, **options: Any) -> AsyncIterator[inference_pb2.TranscribeRequest]:
    """The options, then a sound in parts of ``size`` bytes."""
    yield inference_pb2.TranscribeRequest(options=inference_pb2.TranscribeOptions(**options))
    data = b"sound %d of tones" % num_samples
    for start in range(0, len(data), size):
        yield inference_pb2.TranscribeRequest(data=data[start : start + size])


async def ask(ear: Ear, num_samples: int = 800, **options: Any) -> list[Response]:
    async with ear.mesh.inference() as stub:
        return [each async for each in stub.Transcribe(requests(num_samples, **options))]


async def refusal(ear: Ear, sent: AsyncIterator[inference_pb2.TranscribeRequest]) -> tuple[grpc.StatusCode, str]:
    """The code and the message with which a call ends."""
    async with ear.mesh.inference() as stub:
        call = stub.Transcribe(sent)
        with pytest.raises(grpc.aio.AioRpcError):  # of the call, or of a message that it does not take any more
            await call.read()
        return await call.code(), await call.details()


async def test_text_is_streamed_and_the_sound_named_last(ear: Ear) -> None:
    ear.heard = {0: tokens(" Hallo, Joerg.")}
    *parts, last = await ask(ear)
    assert "".join(each.text for each in parts) == "Hallo, Joerg."
    assert last == Response(seconds=0.8, language="de")
    assert not any(each.seconds or each.tokens for each in parts)
    assert [prompt_of(each) for each in ear.requests] == ["^", "^de1"]


async def test_what_computed_it_is_named_last(ear: Ear) -> None:
    def answer(request: Any) -> None:
        say(request, tokens(" x"))
        request.finish(weights_version="a", timeline=types_pb2.Timeline(mixed_numerics=True))

    ear.answer = answer  # type: ignore[method-assign]
    *_, last = await ask(ear, language="de")
    assert (last.weights_version, last.mixed_numerics) == ("a", True)


async def test_options_reach_the_model(ear: Ear) -> None:
    ear.heard = {0: tokens(" x")}
    await ask(ear, model="fake", language="German", prompt="Names", temperature=0.5, seed=7, translate=True)
    (request,) = ear.requests
    assert request.submit.sampling_params.temperature == 0.5
    assert request.submit.sampling_params.seed == 7
    (call,) = [*ear.mesh.tokenizer.transcripts, *ear.mesh.second_tokenizer.transcripts]
    assert (call.task, call.language, call.previous_text) == (tokenizer_pb2.TRANSCRIPT_TASK_TRANSLATE, "de", "Names")


async def test_a_long_sound_has_segments(ear: Ear) -> None:
    ear.heard = LONG
    *parts, last = await ask(ear, 2500, language="de", return_segments=True)
    assert ear.pieces == [(0, 1000), (900, 1000), (1900, 600)]
    assert "".join(each.text for each in parts) == "one two three four end"
    assert len(parts) >= 3
    assert last.seconds == 2.5
    assert [(each.start, each.end, each.text) for each in last.segments] == [
        (0.0, 0.4, " one"),
        (0.4, 0.9, " two"),
        (0.9, 1.4, " three"),
        (1.4, 1.9, " four"),
        (1.9, 2.5, " end"),
    ]
    assert last.segments[0].avg_logprob == -0.5
    assert last.segments[0].no_speech_prob == pytest.approx(0.125)
    assert not last.words
    stamps = ear.requests[-1].submit.sampling_params.transcript.timestamps
    assert (stamps.first_token_id, stamps.no_timestamps_token_id) == (STAMP, NO_STAMPS)


async def test_words_and_tokens(ear: Ear) -> None:
    ear.heard = {0: tokens("| ab, cd|| e|", 0, 20, 20, 30)}
    *parts, last = await ask(ear, 900, language="de", return_words=True, return_logprobs=True)
    assert [(each.text, each.start, each.end) for each in last.words] == [
        ("ab,", 0.02, 0.1),
        ("cd", 0.1, 0.16),
        ("e", 0.2, 0.24),
    ]
    assert not last.segments
    heard = [each for part in parts for each in part.tokens]
    assert b"".join(each.text for each in heard) == b" ab, cd e"
    assert [each.id for each in heard] == list(b" ab, cd e")
    assert {each.logprob for each in heard} == {-0.5}
    assert ear.requests[-1].submit.pooling_params.task == types_pb2.POOLING_TASK_ALIGN


async def test_the_sound_is_on_disk_once_and_given_back(ear: Ear) -> None:
    ear.heard = {0: tokens(" x")}
    response = await ear.post(800)
    assert response.status_code == 200
    await ask(ear)
    first, second = [each for each in ear.requests if each.submit.sampling_params.max_tokens > 1]
    (one,), (other,) = first.submit.prompt.media, second.submit.prompt.media
    assert one.digest == other.digest, "the same bytes are the same sound"
    assert piece_of(first) == piece_of(second)


async def test_what_is_wrong_is_refused_by_name(ear: Ear) -> None:
    async def only(*sent: inference_pb2.TranscribeRequest) -> AsyncIterator[inference_pb2.TranscribeRequest]:
        for each in sent:
            yield each

    options = inference_pb2.TranscribeRequest(options=inference_pb2.TranscribeOptions())
    data = inference_pb2.TranscribeRequest(data=b"x")
    cases = [
        (only(data), "the first message must hold the options"),
        (only(), "the first message must hold the options"),
        (only(options, data, options), "each message after the first one must hold data"),
        (only(options), "the sound is empty"),
        (requests(800, language="elvish"), "language 'elvish' is not known"),
        (requests(800, temperature=2.5), "temperature must be a number from 0 to 2"),
        (requests(800, temperature=float("nan")), "temperature must be a number from 0 to 2"),
        (requests(800, seed=1 << 63), "seed must be below 2^63"),
    ]
    for sent, message in cases:
        code, details = await refusal(ear, sent)
        assert code is grpc.StatusCode.INVALID_ARGUMENT, details
        assert message in details
    assert not ear.requests
    assert (await refusal(ear, requests(800, model="other")))[0] is grpc.StatusCode.NOT_FOUND


async def test_a_sound_larger_than_the_limit_is_refused(socket_dir: Path) -> None:
    async with listening(socket_dir, max_audio_bytes=16) as ear:
        assert "larger than 16 bytes" in (await refusal(ear, requests(800, size=9)))[1]
        ear.heard = {0: tokens(" x")}
        assert (await ask(ear, 8))[-1].seconds > 0
    assert not ear.mesh.outputs.requests.qsize()


async def test_options_count_as_other_messages_do(socket_dir: Path) -> None:
    async with listening(socket_dir, tenant_body_bytes=50) as ear:
        code, details = await refusal(ear, requests(800, prompt="x" * 50))
        assert (code, "limit body_bytes is 50" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        ear.heard = {0: tokens(" x")}
        assert (await ask(ear, prompt="x" * 40))[-1].seconds
        assert 'tokenloom_tenant_body_bytes{tenant=""} 0.0' in (await ear.http.get("/metrics")).text


async def test_a_model_that_does_not_transcribe_refuses(mesh: FakeMesh) -> None:
    async with mesh.inference() as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Transcribe(requests(800)).read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "does not transcribe sounds" in (refused.value.details() or "")


async def test_limits_of_a_tenant(socket_dir: Path) -> None:
    async with listening(socket_dir, tenant_live_outputs=1) as ear:
        held = hold(ear)
        async with ear.mesh.inference() as stub:
            call = stub.Transcribe(requests(800, language="de"))
            await held.wait()
            code, details = await refusal(ear, requests(800))
            assert (code, "live_outputs" in details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
            call.cancel()
    async with listening(socket_dir, tenant_tokens_per_second=0.001, tenant_token_burst=450) as ear:
        ear.heard = {0: tokens(" a")}
        assert (await ask(ear, language="de"))[-1].seconds
        code, details = await refusal(ear, requests(800, language="de"))
        assert (code, "tokens_per_second" in details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)


async def test_a_full_gateway(socket_dir: Path) -> None:
    async with listening(socket_dir, max_live_requests=1) as ear:
        held = hold(ear)
        async with ear.mesh.inference() as stub:
            call = stub.Transcribe(requests(800, language="de"))
            await held.wait()
            assert (await refusal(ear, requests(800)))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
            call.cancel()


async def test_a_piece_that_takes_too_long(socket_dir: Path) -> None:
    async with listening(socket_dir, request_timeout=0.3) as ear:
        hold(ear)
        assert (await refusal(ear, requests(800, language="de")))[0] is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_sound_that_stops(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_calls, "_DRAIN_SECONDS", 0.05)
    async with listening(socket_dir, request_timeout=0.3) as ear, ear.mesh.inference() as stub:
        call = stub.Transcribe()
        async for each in requests(800):
            await call.write(each)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "no part of the sound arrived" in await call.details()
        assert not ear.requests


async def test_tokens_are_charged_once(ear: Ear) -> None:
    ear.heard = {0: tokens("| one||", 0, 20, 20), 400: tokens("| two|", 0, 20)}
    await ask(ear, 1400, language="de")
    num_prompt = sum(len(each.submit.prompt.token_ids) for each in ear.requests)
    num_output = sum(map(len, ear.heard.values()))
    metrics = (await ear.http.get("/metrics")).text
    assert f'tokenloom_tenant_tokens_total{{tenant=""}} {float(num_prompt + num_output)}' in metrics


async def test_the_clients(ear: Ear) -> None:
    ear.heard = {0: tokens("| ab, cd|| e|", 0, 20, 20, 30)}
    sound = b"sound 900 of tones" + bytes(600_000)
    async with AsyncClient(ear.mesh.grpc_address, timeout=30) as client:
        heard = await client.transcribe(sound, language="de", return_segments=True, return_words=True)
        assert (heard.text, heard.seconds, heard.language) == ("ab, cd e", 0.9, "de")
        assert [each.text for each in heard.segments] == [" ab, cd", " e"]
        assert heard.words[0] == TimedText("ab,", 0.02, 0.1)
        with pytest.raises(errors.InvalidArgument, match="language 'xx' is not known"):
            await client.transcribe(sound, language="xx")
        with pytest.raises(errors.InvalidArgument, match="bytes of a file"):
            await client.transcribe("a.wav")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="'top_p' is not an option"):
            await client.transcribe(sound, top_p=1)
    with Client(ear.mesh.grpc_address, timeout=30) as blocking:
        assert (await asyncio.to_thread(blocking.transcribe, sound, language="de")).text == "ab, cd e"


async def test_cancelling_the_call_cancels_the_request(ear: Ear) -> None:
    begun = asyncio.Event()

    def hold(request: Any) -> None:
        ear.heard = {}
        held.append(request)
        begun.set()

    held: list[Any] = []
    ear.answer = hold  # type: ignore[method-assign]
    async with ear.mesh.inference() as stub:
        call = stub.Transcribe(requests(800, language="de"))
        async with asyncio.timeout(30):
            await begun.wait()
            call.cancel()
            await held[0].cancelled.wait()
