"""Serves ``/v1/audio/transcriptions`` and ``/v1/audio/translations``, with the forms and answers of OpenAI's API."""

import math
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from tokenloom.request.errors import InvalidArgument
from tokenloom.v1 import types_pb2
from tokenloom.v1.tokenizer_pb2 import (
    TRANSCRIPT_TASK_TRANSCRIBE,
    TRANSCRIPT_TASK_TRANSLATE,
    TranscriptTask,
    TranscriptTraits,
)

from ..encoding import sse
from ..files.multipart import Upload
from ..files.sound_uploads import SoundForm, SoundUploads
from ..generation.transcription import SoundCalls, Transcription, TranscriptRequest
from ..http.client_flow import Headers as HeaderPairs
from ..http.http_exchange import IGNORED_HEADER, JSON, HttpExchange, listed, trace_headers
from ..openapi.transcription_schemas import (
    SoundUsage,
    Transcript,
    TranscriptionForm,
    TranscriptLogprob,
    TranscriptSegment,
    TranscriptWord,
)
from ..records.generate_request import GenerateRequest
from ..records.media import MediaPart
from ..records.transcript import MAX_TEMPERATURE, HeardSegment, HeardToken, read_language
from ..serving.served_mesh import ServedMesh
from ..tenants.tenant_shares import TenantShares

_FORMATS: Final = ("json", "text", "srt", "verbose_json", "vtt")
_WITH_TIMES: Final = frozenset({"srt", "verbose_json", "vtt"})
_STREAMED: Final = frozenset({"json", "text"})
_GRANULARITIES: Final = frozenset({"segment", "word"})
_KNOWN: Final = frozenset(TranscriptionForm.__struct_fields__)
_TEXT: Final = b"text/plain; charset=utf-8"
_TASKS: Final = {TRANSCRIPT_TASK_TRANSCRIBE: "transcribe", TRANSCRIPT_TASK_TRANSLATE: "translate"}


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How a client wants its answer."""

    name: str
    """One of the formats."""
    streams: bool
    granularities: frozenset[str]
    has_logprobs: bool
    ignored: Sequence[str]
    """Fields that have no effect."""


@dataclass(frozen=True, slots=True)
class TranscriptionsApi:
    """Answers requests of clients."""

    pick: Callable[[str | None], ServedMesh]
    """Returns the mesh that serves a model. Raises ``ModelNotFound``."""
    alone: ServedMesh | None
    """The only mesh, whose model is known before a form is read; None: there are several."""
    uploads: SoundUploads
    shares: TenantShares
    strict: bool
    """Whether unknown fields are refused."""

    async def transcribe(self, exchange: HttpExchange) -> None:
        """Answer with what is said in a sound, in its own language."""
        await self._answer(exchange, TRANSCRIPT_TASK_TRANSCRIBE)

    async def translate(self, exchange: HttpExchange) -> None:
        """Answer with what is said in a sound, in English."""
        await self._answer(exchange, TRANSCRIPT_TASK_TRANSLATE)

    async def _answer(self, exchange: HttpExchange, task: TranscriptTask) -> None:
        if self.alone is not None:
            self.alone.transcript_traits()  # before its client has sent megabytes
        async with self.uploads.receive(exchange, self.shares.of(exchange.tenant)) as form:
            name = form.upload.fields.get("model")
            mesh = self.pick(name)
            traits, adapter = mesh.transcript_traits(), mesh.models.find(name)
            common = GenerateRequest(
                (), "file", types_pb2.SamplingParams(), tenant=exchange.tenant, adapter=adapter, is_continued=True
            )
            request, answer = self._read(form.upload, common, task, traits)
            with exchange.until_disconnected():
                await mesh.generator.wait_limits()
                await self._run(exchange, mesh, form, request, answer)

    async def _run(
        self, exchange: HttpExchange, mesh: ServedMesh, form: SoundForm, request: TranscriptRequest, answer: AnswerForm
    ) -> None:
        part, traits = MediaPart("file", form.file, kind=types_pb2.MEDIA_KIND_AUDIO), mesh.transcript_traits()
        headers: HeaderPairs = ((IGNORED_HEADER, listed(answer.ignored)),) if answer.ignored else ()
        with mesh.generator.hear(part, request.common) as sound:
            calls = SoundCalls(mesh.generator, mesh.tokenizers, traits, request, sound, trace_headers(exchange))
            transcription = Transcription(calls)
            async with aclosing(transcription.run()) as tokens:
                if answer.streams:
                    await _stream(exchange, transcription, tokens, traits, answer, headers)
                else:
                    heard = [each async for some in tokens for each in some if each.id < traits.first_special_id]
        mesh.metrics.sound_seconds.inc(transcription.seconds)
        if answer.streams:
            return
        body, content_type = _body(transcription, heard, request, traits, answer)
        await exchange.respond(200, body, content_type, headers)

    def _read(
        self, upload: Upload, common: GenerateRequest, task: TranscriptTask, traits: TranscriptTraits
    ) -> tuple[TranscriptRequest, AnswerForm]:
        """Return what a form asks for. Raises ``InvalidArgument`` naming the field."""
        fields = upload.fields
        answer = _read_answer(upload, self.strict)
        request = TranscriptRequest(
            common,
            task,
            read_language(fields.get("language", ""), task, traits),
            fields.get("prompt", ""),
            _read_temperature(fields.get("temperature", "")),
            _read_seed(fields.get("seed", "")),
            has_timestamps=answer.name in _WITH_TIMES,
            has_words="word" in answer.granularities,
            has_figures=answer.name == "verbose_json",
            streams=answer.streams,
        )
        return request, answer


def _read_answer(upload: Upload, strict: bool) -> AnswerForm:
    fields, lists = upload.fields, upload.lists
    name = fields.get("response_format") or "json"
    if name not in _FORMATS:
        raise InvalidArgument(f"response_format must be one of {', '.join(_FORMATS)}", "response_format")
    streams = _read_flag("stream", fields.get("stream", ""))
    if streams and name not in _STREAMED:
        raise InvalidArgument("stream is for response_format json or text", "stream")
    wanted = _items("timestamp_granularities", upload)
    if wanted and name != "verbose_json":
        raise InvalidArgument("timestamp_granularities needs response_format verbose_json", "timestamp_granularities")
    if not wanted <= _GRANULARITIES:
        raise InvalidArgument("timestamp_granularities may hold segment and word", "timestamp_granularities")
    included = _items("include", upload)
    if not included <= {"logprobs"} or (included and name != "json"):
        raise InvalidArgument("include may hold logprobs, with response_format json", "include")
    names = dict.fromkeys(each.partition("[")[0] for each in (*fields, *lists))
    ignored = [each for each in names if each not in _KNOWN]
    if ignored and strict:
        raise InvalidArgument(f"{ignored[0][:64]}: unknown field", ignored[0][:64])
    return AnswerForm(name, streams, frozenset(wanted or {"segment"}), bool(included), ignored)


def _items(name: str, upload: Upload) -> set[str]:
    """Return the items of a list, which stand in fields of their own, or alone in a field without brackets."""
    alone = upload.fields.get(name)
    return {*upload.lists.get(name, ()), *([alone] if alone else ())}


def _read_temperature(value: str) -> float:
    try:
        temperature = float(value or 0)
    except ValueError:
        temperature = math.nan
    if not 0 <= temperature <= MAX_TEMPERATURE:
        raise InvalidArgument(f"temperature must be a number from 0 to {MAX_TEMPERATURE:g}", "temperature")
    return temperature


def _read_seed(value: str) -> int | None:
    if not value:
        return None
    if not value.isascii() or not value.isdigit() or int(value[:32]) >= 2**63 or len(value) > 19:
        raise InvalidArgument("seed must be a whole number from 0 on, below 2^63", "seed")
    return int(value)


def _read_flag(name: str, value: str) -> bool:
    if value.lower() not in ("", "true", "false", "1", "0"):
        raise InvalidArgument(f"{name} must be true or false", name)
    return value.lower() in ("true", "1")


async def _stream(
    exchange: HttpExchange,
    transcription: Transcription,
    tokens: AsyncIterator[Sequence[HeardToken]],
    traits: TranscriptTraits,
    answer: AnswerForm,
    headers: HeaderPairs,
) -> None:
    """Write the text as it is heard."""
    decoder, texts, heard = getincrementaldecoder("utf-8")("replace"), list[str](), list[HeardToken]()
    unsent: list[HeardToken] = []  # those of a character that is not whole yet
    async for some in tokens:
        new = [each for each in some if each.id < traits.first_special_id]
        text = decoder.decode(b"".join(each.text for each in new))
        if not texts:
            text = text.lstrip()
        unsent += new if answer.has_logprobs else ()
        if text:
            texts.append(text)
            await _write(exchange, _delta(text) | _logprobs(unsent, answer), headers)
            heard += unsent
            unsent = []
    if rest := decoder.decode(b"", final=True):
        texts.append(rest)
        await _write(exchange, _delta(rest) | _logprobs(unsent, answer), headers)
    heard += unsent
    done = {"type": "transcript.text.done", "text": "".join(texts), "usage": _usage(transcription)}
    origin = {name: value for name, value in _origin(transcription).items() if value is not None}
    await _write(exchange, done | origin | _logprobs(heard, answer), headers)
    await exchange.finish(sse.DONE)


def _delta(text: str) -> dict[str, object]:
    return {"type": "transcript.text.delta", "delta": text}


async def _write(exchange: HttpExchange, event: dict[str, object], headers: HeaderPairs) -> None:
    if not exchange.started:  # an error before the first word has a status of its own
        await exchange.start(200, (*sse.HEADERS, *headers))
    await exchange.write(b"data: %b\n\n" % sse.encode_json(event))


def _usage(transcription: Transcription) -> SoundUsage:
    return SoundUsage(type="duration", seconds=math.ceil(transcription.seconds))


def _origin(transcription: Transcription) -> dict[str, Any]:
    """Return what has computed a transcript, as members; None: nothing to say."""
    version, is_mixed = transcription.weights_version, transcription.has_mixed_numerics
    return {"weights_version": version or None, "mixed_numerics": is_mixed or None}


def _logprobs(tokens: Sequence[HeardToken], answer: AnswerForm) -> dict[str, object]:
    return {"logprobs": list(map(_logprob, tokens))} if answer.has_logprobs else {}


def _logprob(token: HeardToken) -> TranscriptLogprob:
    text = token.text.decode(errors="replace")
    return TranscriptLogprob(token=text, bytes=list(token.text), logprob=token.logprob)


def _body(
    transcription: Transcription,
    heard: Sequence[HeardToken],
    request: TranscriptRequest,
    traits: TranscriptTraits,
    answer: AnswerForm,
) -> tuple[bytes, bytes]:
    """Return an answer and its media type. ``heard``: the tokens of its text."""
    text = b"".join(each.text for each in heard).decode(errors="replace").strip()
    segments, usage, origin = transcription.segments, _usage(transcription), _origin(transcription)
    if answer.name == "text":
        return f"{text}\n".encode(), _TEXT
    if answer.name == "srt":
        return "".join(_srt(segments)).encode(), _TEXT
    if answer.name == "vtt":
        return "".join(_vtt(segments)).encode(), _TEXT
    if answer.name == "json":
        logprobs = list(map(_logprob, heard)) if answer.has_logprobs else None
        return sse.encode_json(Transcript(text=text, logprobs=logprobs, usage=usage, **origin)), JSON
    name = next((each.names[0] for each in traits.languages if each.code == transcription.language), "english")
    whole = Transcript(
        text=text,
        task=_TASKS[request.task],  # type: ignore[arg-type]
        language="english" if request.task == TRANSCRIPT_TASK_TRANSLATE else name,
        duration=round(transcription.seconds, 3),
        segments=[_segment(*each) for each in enumerate(segments)] if "segment" in answer.granularities else None,
        words=[TranscriptWord(word=each.text, start=each.start, end=each.end) for each in transcription.words]
        if "word" in answer.granularities
        else None,
        usage=usage,
        **origin,
    )
    return sse.encode_json(whole), JSON


def _segment(index: int, segment: HeardSegment) -> TranscriptSegment:
    figures = segment.figures
    return TranscriptSegment(
        id=index,
        seek=figures.seek,
        start=round(segment.start, 3),
        end=round(segment.end, 3),
        text=segment.text,
        tokens=[each.id for each in segment.tokens],
        temperature=figures.temperature,
        avg_logprob=figures.avg_logprob,
        compression_ratio=figures.compression_ratio,
        no_speech_prob=figures.no_speech_prob,
    )


def _srt(segments: Sequence[HeardSegment]) -> Iterator[str]:
    for number, each in enumerate(segments, 1):
        yield f"{number}\n{_clock(each.start, ',')} --> {_clock(each.end, ',')}\n{_cue(each)}\n\n"


def _vtt(segments: Sequence[HeardSegment]) -> Iterator[str]:
    yield "WEBVTT\n\n"
    for each in segments:
        text = _cue(each).replace("&", "&amp;").replace("<", "&lt;")  # otherwise players read them as marks
        yield f"{_clock(each.start, '.')} --> {_clock(each.end, '.')}\n{text}\n\n"


def _cue(segment: HeardSegment) -> str:
    """Return the text of a subtitle, in which an arrow would begin another one, and an empty line would end it."""
    return " ".join(filter(None, map(str.strip, segment.text.splitlines()))).replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
