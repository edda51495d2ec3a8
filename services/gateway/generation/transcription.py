"""Transcribes a sound piece by piece: each piece begins where the last timestamp of the one before it ends."""

import asyncio
import math
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from tokenloom.request import errors
from tokenloom.services.runtime.telemetry.tracing import Headers
from tokenloom.v1 import output_processor_pb2, types_pb2
from tokenloom.v1.tokenizer_pb2 import (
    TRANSCRIPT_TASK_UNSPECIFIED,
    EncodeTranscriptRequest,
    MediaSize,
    TokenizedPrompt,
    TranscriptTask,
    TranscriptTraits,
)

from ..mesh.collector import Delta
from ..mesh.tokenizer_client import TokenizerClient
from ..records.generate_request import GenerateRequest, SoundPrompt
from ..records.pooling_input import PoolingInput
from ..records.transcript import (
    HeardSegment,
    HeardToken,
    PieceFigures,
    Word,
    compression_ratio,
    cut,
    segments_of,
    text_of,
    words_of,
)
from .generator import Generator
from .preparation import cache_salt
from .running_generation import RunningGeneration

if TYPE_CHECKING:
    from ..mesh.encoder_client import RequestMedia

_TOGETHER: Final = 64
"""Tokens that an output processor sends at once where no client waits for each."""
T = TypeVar("T")
_Begun: TypeAlias = tuple[RunningGeneration, list[Delta]]
"""A generation and its first output."""


@dataclass(frozen=True, slots=True)
class TranscriptRequest:
    """What a client asks of a sound, checked as far as it does not depend on the sound."""

    common: GenerateRequest
    """What all requests of its pieces have in common; it has no prompts."""
    task: TranscriptTask
    language: str = ""
    """Code; empty: that of the sound is found out, or the model knows one only."""
    previous: str = ""
    """Text before the transcript."""
    temperature: float = 0.0
    seed: int | None = None
    has_timestamps: bool = False
    """Whether the transcript is cut into segments; that of a sound of several pieces is in any case."""
    has_words: bool = False
    has_figures: bool = False
    """Whether the probability of silence is wanted of each piece."""
    streams: bool = False


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a piece is in its sound."""

    sound: MediaSize
    seek: int
    """The frame with which it begins."""
    num_frames: int
    has_stamps: bool
    """Whether its transcript has timestamps."""


@dataclass(frozen=True, slots=True)
class SoundCalls:
    """Makes the requests of one sound."""

    generator: Generator
    tokenizers: TokenizerClient
    traits: TranscriptTraits
    request: TranscriptRequest
    sound: "RequestMedia"
    """Held by the caller."""
    headers: Headers
    """Of the trace that the client has begun."""

    async def prompt(self, place: _Place, task: TranscriptTask, language: str, previous: str) -> TokenizedPrompt:
        """Return the prompt of a piece. Raises ``InvalidArgument``."""
        traits, common = self.traits, self.request.common
        start = place.seek * traits.frame_samples
        encoding = self.tokenizers.encode_transcript(
            EncodeTranscriptRequest(
                language=language,
                task=task,
                with_timestamps=place.has_stamps,
                previous_text=previous,
                sound=place.sound,
                start=start,
                samples=min(place.sound.samples - start, traits.piece_samples),
                cache_salt=cache_salt(common),
                tenant=common.tenant.name,
            )
        )
        return (await encoding).prompt

    def transcribes(self, place: _Place, prompt: TokenizedPrompt) -> AbstractAsyncContextManager[_Begun]:
        """Run the request that transcribes a piece; it has begun."""
        request = self.request
        sampling = types_pb2.SamplingParams(
            temperature=request.temperature,
            logprobs=0,
            transcript=_rules(self.traits, has_stamps=place.has_stamps),
        )
        if request.seed is not None:
            sampling.seed = request.seed
        return self._generates(place, prompt, sampling)

    async def first_token(self, place: _Place, previous: str) -> tuple[str, float]:
        """Return the likeliest language of a piece, and the probability that nothing is spoken in it."""
        traits = self.traits
        prompt = await self.prompt(place, TRANSCRIPT_TASK_UNSPECIFIED, "", previous)
        sampling = types_pb2.SamplingParams(
            temperature=0.0,
            max_tokens=1,
            logprobs=0,
            logprob_token_ids=[traits.no_speech_id],
            allowed_token_ids=[each.token_id for each in traits.languages],
        )
        language, silence = "", 0.0
        async with self._generates(place, prompt, sampling) as (generation, deltas):
            while deltas:
                for delta in deltas:
                    named = (each.code for each in traits.languages if each.token_id in delta.token_ids)
                    language = next(named, language)
                    for columns in (part.logprobs for part in delta.logprobs):
                        found = dict(zip(columns.token_id, columns.logprob, strict=True))
                        silence = math.exp(found.get(traits.no_speech_id, -math.inf))
                deltas = [] if generation.done else await generation.take()
            _check_end(generation)
        return language, silence

    async def times(self, place: _Place, prompt: TokenizedPrompt, tokens: Sequence[HeardToken]) -> list[float]:
        """Return the seconds of the sound at which the first token of a piece begins, and at which each one ends."""
        traits, num_skipped = self.traits, len(prompt.token_ids)
        spoken = TokenizedPrompt(
            token_ids=[*prompt.token_ids, *(each.id for each in tokens)], media=prompt.media, skipped_tokens=num_skipped
        )
        params = types_pb2.PoolingParams(
            task=types_pb2.POOLING_TASK_ALIGN,
            aligned_rows=place.num_frames * traits.frame_samples // traits.timestamp_samples,
        )
        pooling = PoolingInput(self._of(spoken), params)
        async with self._opened(place, lambda: self.generator.pool(pooling, self.headers)) as running:
            rows = array("f")
            rows.frombytes(running.results[0].data)
        begin, row_seconds = place.seek * traits.frame_samples, traits.timestamp_samples
        samples = (begin, *(begin + row * row_seconds for row in rows[num_skipped:]))
        return [each / traits.sampling_rate for each in samples]

    def _generates(
        self, place: _Place, prompt: TokenizedPrompt, sampling: types_pb2.SamplingParams
    ) -> AbstractAsyncContextManager[_Begun]:
        text = output_processor_pb2.TextOptions(stream_interval=1 if self.request.streams else _TOGETHER)
        # Not a limit of the client's: a tenant whose tokens are limited takes as many as it may.
        most = 0 if sampling.HasField("max_tokens") else self.generator.limits().max_model_len
        request = replace(self._of(prompt), sampling=sampling, text=text, most_tokens=most)
        return self._opened(place, lambda: self._begun(request))

    @asynccontextmanager
    async def _begun(self, request: GenerateRequest) -> AsyncIterator[_Begun]:
        """Run a request for the length of the ``async with``, which begins with its first output: engines that are full
        refuse a request only after it was sent."""
        async with self.generator.open(request, self.headers, outlives_call=False) as generation:
            yield generation, await generation.take()

    def _of(self, prompt: TokenizedPrompt) -> GenerateRequest:
        return replace(self.request.common, prompts=[SoundPrompt(prompt, self.sound)])

    @asynccontextmanager
    async def _opened(self, place: _Place, opens: Callable[[], AbstractAsyncContextManager[T]]) -> AsyncIterator[T]:
        """Open a request. One that is not of the first piece waits while the mesh or the tenant has no room: otherwise
        a client would lose all that was heard of a long sound."""
        loop = asyncio.get_running_loop()
        until = loop.time() + (self.generator.default_timeout if place.seek else 0.0)
        async with AsyncExitStack() as held:
            while True:
                try:
                    opened = await held.enter_async_context(opens())
                    break
                except errors.ResourceExhausted as refusal:
                    seconds = refusal.retry_after or 1.0
                    if loop.time() + seconds > until:
                        raise
                await asyncio.sleep(seconds)
            yield opened


class Transcription:
    """Hears one sound.

    Attributes:
        seconds: Of the sound; known once it runs.
        language: Code of the language; empty: it is not known.
        segments, words: Those that have been heard.
        weights_version: Of the weights that have computed it; joined by + if they were replaced meanwhile.
        has_mixed_numerics: Engines of different numerics have computed one piece.
    """

    def __init__(self, calls: SoundCalls) -> None:
        self._calls = calls
        self.seconds = 0.0
        self.language = calls.request.language
        self.segments: list[HeardSegment] = []
        self.words: list[Word] = []
        self.weights_version = ""
        self.has_mixed_numerics = False
        self._silence: float | None = None  # the probability in the first piece, if the language was found there

    async def run(self) -> AsyncGenerator[Sequence[HeardToken], None]:
        """Yield tokens as soon as they stay: in a transcript with timestamps, once their segment has ended. Raises any
        of :mod:`errors`."""
        calls, traits, seek = self._calls, self._calls.traits, 0
        (sound,) = await calls.sound.put()
        self.seconds = sound.samples / traits.sampling_rate
        num_frames, most = sound.samples // traits.frame_samples, traits.piece_samples // traits.frame_samples
        has_stamps = calls.request.has_timestamps or sound.samples > traits.piece_samples
        while seek < num_frames:
            if seek:  # the file's lease begins again, and a file that was lost is put again
                (sound,) = await calls.sound.put()
            place = _Place(sound, seek, min(num_frames - seek, most), has_stamps)
            if not seek and traits.languages and not self.language:
                self.language, silence = await calls.first_token(place, "")
                self._silence = None if calls.request.previous else silence
            async with aclosing(self._hear(place)) as heard:
                async for tokens, advance in heard:
                    yield tokens
                    seek += advance

    async def _hear(self, place: _Place) -> AsyncGenerator[tuple[Sequence[HeardToken], int], None]:
        """Yield the tokens of a piece, the last ones with the frames after which the next piece begins."""
        calls, traits, request = self._calls, self._calls.traits, self._calls.request
        silence, self._silence = self._silence, None
        if silence is None:
            silence = (await calls.first_token(place, request.previous))[1] if request.has_figures else 0.0
        prompt = await calls.prompt(place, request.task, self.language, request.previous)
        tokens: list[HeardToken] = []
        num_settled = 0
        async with calls.transcribes(place, prompt) as (generation, deltas):
            while deltas:
                for delta in deltas:
                    tokens += _heard(delta.token_ids, delta.logprobs)
                if place.has_stamps:
                    end = _end_of_segments(tokens, num_settled, traits)
                else:
                    end = len(tokens)
                if end > num_settled:
                    yield tokens[num_settled:end], 0
                    num_settled = end
                deltas = [] if generation.done else await generation.take()
            ends, finished = generation.stop_token_ids, _check_end(generation)
        self.weights_version = _joined(self.weights_version, finished.weights_version)
        self.has_mixed_numerics |= finished.timeline.mixed_numerics
        avg_logprob = math.fsum(each.logprob for each in tokens) / max(len(tokens), 1)  # with what ends the output
        if tokens and tokens[-1].id in ends:
            tokens.pop()
        slices, advance = cut([each.id for each in tokens], place.num_frames, traits)
        ratio = compression_ratio(text_of(tokens, traits).strip())
        figures = PieceFigures(place.seek, request.temperature, avg_logprob, ratio, silence)
        segments = segments_of(tokens, slices, figures, traits)
        if request.has_words and segments:
            times = await calls.times(place, prompt, tokens)
            for each in segments:
                part = times[each.first : each.first + len(each.tokens) + 1]
                self.words += words_of(each.tokens, part, self.language, traits)
        self.segments += segments
        yield tokens[num_settled : slices[-1].end], advance


def _check_end(generation: RunningGeneration) -> output_processor_pb2.RequestFinished:
    """Return how a request ended. Raises ``Unavailable`` if engines ended it early, as in a pause: a transcript has no
    place to say that words are missing in its midst."""
    finished = generation.finished[0]
    if finished.reason == types_pb2.FINISH_REASON_ABORT:
        raise errors.Unavailable("The engines ended the request before the sound was heard; retry.")
    return finished


def _joined(versions: str, more: str) -> str:
    """Return the versions of the weights of two pieces in order, none twice in a row."""
    found = [each for each in f"{versions}+{more}".split("+") if each]
    return "+".join(each for each, before in zip(found, ["", *found], strict=False) if each != before)


def _rules(traits: TranscriptTraits, *, has_stamps: bool) -> types_pb2.TranscriptRules:
    """Return what may stand in a transcript."""
    rules = types_pb2.TranscriptRules(
        suppressed_token_ids=traits.suppressed_ids, begin_suppressed_token_ids=traits.begin_suppressed_ids
    )
    if has_stamps:
        stamps = rules.timestamps
        stamps.first_token_id, stamps.no_timestamps_token_id = traits.first_timestamp_id, traits.no_timestamps_id
        stamps.num_text_ids, stamps.max_initial_index = traits.first_special_id, traits.max_initial_timestamp
    return rules


def _heard(token_ids: Sequence[int], parts: Sequence[output_processor_pb2.SlotTextLogprobs]) -> Iterator[HeardToken]:
    texts = [text for part in parts for text in part.sampled_text]
    logprobs = [value for part in parts for value in part.logprobs.sampled]
    return map(HeardToken, token_ids, texts, logprobs)


def _end_of_segments(tokens: Sequence[HeardToken], start: int, traits: TranscriptTraits) -> int:
    """Return the end of the last segment that has ended, ``start`` if none has since then."""
    first = traits.first_timestamp_id
    for index in range(len(tokens) - 1, start, -1):
        if tokens[index].id >= first and tokens[index - 1].id >= first:
            return index
    return start
