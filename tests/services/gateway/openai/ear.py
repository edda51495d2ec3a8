"""A gateway before a model that transcribes: a second is a piece, a byte is a token, and a test says what is heard."""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.services.gateway.fake_encoders import FakeEncoder, with_encoders
from tests.services.gateway.fakes import EOS, FakeMesh, FakeRequest
from tokenloom.v1 import output_processor_pb2, tokenizer_pb2, types_pb2

FIRST_SPECIAL, ENGLISH, GERMAN, SILENCE, NO_STAMPS, STAMP = 190, 191, 192, 201, 202, 203
TRAITS = tokenizer_pb2.TranscriptTraits(
    sampling_rate=1000,
    piece_samples=1000,
    frame_samples=10,
    timestamp_samples=20,
    languages=[
        tokenizer_pb2.TranscriptLanguage(code="en", names=["english"], token_id=ENGLISH),
        tokenizer_pb2.TranscriptLanguage(code="de", names=["german"], token_id=GERMAN),
    ],
    first_timestamp_id=STAMP,
    no_timestamps_id=NO_STAMPS,
    max_initial_timestamp=50,
    no_speech_id=SILENCE,
    suppressed_ids=[7],
    begin_suppressed_ids=[8],
    first_special_id=FIRST_SPECIAL,
)
MODEL = {"model": "fake"}


def sound(num_samples: int) -> dict[str, tuple[str, bytes]]:
    """Return the file of a form."""
    return {"file": ("a.wav", b"sound %d of tones" % num_samples)}


def tokens(text: str, *stamps: int) -> list[int]:
    """Return a token for each byte, with the timestamps in the places of the bars, and the end."""
    at = iter(stamps)
    return [STAMP + next(at) if byte == ord("|") else byte for byte in text.encode()] + [EOS]


def hear(request: FakeRequest, ids: Sequence[int], logprob: float = -0.5, silence: float = 0.125) -> None:
    """Send output with log probabilities, and end it."""
    say(request, ids, logprob, silence)
    request.finish()


def say(request: FakeRequest, ids: Sequence[int], logprob: float = -0.5, silence: float = 0.125) -> None:
    """Send output with log probabilities."""
    texts = [bytes([each]) if each < FIRST_SPECIAL else b"<|special|>" for each in ids]
    columns = types_pb2.Logprobs(sampled=[logprob] * len(ids), rank=[1] * len(ids))
    if SILENCE in request.submit.sampling_params.logprob_token_ids:
        columns.top = 1
        columns.token_id.extend([SILENCE] * len(ids))
        columns.logprob.extend([math.log(silence)] * len(ids))
    send(request, ids, texts, columns)


def send(request: FakeRequest, ids: Sequence[int], texts: Sequence[bytes], columns: types_pb2.Logprobs) -> None:
    """Send a frame with output and its log probabilities."""
    part = output_processor_pb2.SlotTextLogprobs(
        slot=request.submit.slot,
        token_index=request._num_tokens[0],
        logprobs=columns,
        sampled_text=texts,
        token_text=[b""] * len(columns.token_id),
    )
    frame = output_processor_pb2.ProcessFrame(
        slot=[request.submit.slot],
        text=[""],
        token_index=[request._num_tokens[0]],
        num_tokens=[len(ids)],
        token_ids=ids,
        sample_index=[0],
        logprobs=[part],
    )
    request._num_tokens[0] += len(ids)
    request._session.frames.put_nowait(frame)


def prompt_of(request: FakeRequest) -> str:
    return bytes(request.submit.prompt.token_ids).decode()


def piece_of(request: FakeRequest) -> tuple[int, int]:
    """Return the first sample of a request's piece, and how many there are."""
    (item,) = request.submit.prompt.media
    start, samples = item.options_json.split(b"+")
    return int(start), int(samples)


@dataclass
class Ear:
    """Attributes:
    heard: What is heard of the piece that begins at a sample: its tokens.
    language: That of all sounds.
    requests: Those that have arrived.
    """

    mesh: FakeMesh
    encoders: Sequence[FakeEncoder]
    http: httpx.AsyncClient
    heard: Mapping[int, Sequence[int]] = field(default_factory=dict)
    language: int = GERMAN
    requests: list[FakeRequest] = field(default_factory=list)

    async def listen(self) -> None:
        """Answer requests until cancelled."""
        while True:
            request = await self.mesh.outputs.requests.get()
            self.requests.append(request)
            self.answer(request)

    def answer(self, request: FakeRequest) -> None:
        submit = request.submit
        if submit.HasField("pooling_params"):
            num_tokens, skipped = len(submit.prompt.token_ids), submit.pooling_params.skipped_tokens
            request.pool([max(index - skipped + 1, 0) for index in range(num_tokens)], [num_tokens])
            request.finish()
        elif submit.sampling_params.max_tokens == 1:
            hear(request, [self.language])
        else:
            hear(request, self.heard.get(piece_of(request)[0], [EOS]))

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """The pieces that were heard."""
        return [piece_of(each) for each in self.requests if each.submit.sampling_params.max_tokens > 1]

    async def post(self, num_samples: int = 800, *, route: str = "transcriptions", **fields: Any) -> httpx.Response:
        """Send a form with a sound."""
        return await self.http.post(f"/v1/audio/{route}", data={**MODEL, **fields}, files=sound(num_samples))


@asynccontextmanager
async def listening(
    directory: Path,
    traits: tokenizer_pb2.TranscriptTraits = TRAITS,
    *,
    vocab_size: int = 256,
    end: int = EOS,
    seconds: float | None = 60.0,
    **settings: Any,
) -> AsyncIterator[Ear]:
    """Run a gateway whose model hears what the test says. ``seconds``: after which the test hangs; None: never."""
    mesh = FakeMesh(directory)
    mesh.seconds = seconds
    async with with_encoders(mesh, 2) as encoders:
        for tokenizer in (mesh.tokenizer, mesh.second_tokenizer):
            tokenizer.media_kinds, tokenizer.transcript, tokenizer.vocab_size = (), traits, vocab_size
            tokenizer.eos_token_ids = [end]
        mesh.coordinator.limits = types_pb2.ModelLimits(
            max_model_len=448,
            vocab_size=vocab_size,
            media_kinds=[types_pb2.MEDIA_KIND_AUDIO],
            max_sounds_per_prompt=1,
            cross_media_rows=1500,
            pooling_tasks=[types_pb2.POOLING_TASK_ALIGN],
        )
        async with mesh.gateway(**settings), mesh.http(timeout=seconds) as http:
            ear = Ear(mesh, encoders, http)
            listens = asyncio.create_task(ear.listen())
            try:
                yield ear
            finally:
                listens.cancel()
