"""Forms and answers of ``/v1/audio/transcriptions`` and ``/v1/audio/translations``, for the OpenAPI document."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from .response_schemas import MIXED_NUMERICS, WEIGHTS_VERSION


class TranslationForm(msgspec.Struct, kw_only=True):
    """Asks for what is said in a sound, in English."""

    file: Annotated[str, Meta(description="The sound: flac, mp3, mp4, mpeg, mpga, m4a, ogg, wav or webm.")]
    model: Annotated[str | None, Meta(description="Name of the served model; null: that model.")] = None
    language: Annotated[
        str | None, Meta(description="The sound's language: its code or its English name; null: it is found out.")
    ] = None
    prompt: Annotated[
        str | None, Meta(description="What was said before, or words as they are written; its last 223 tokens count.")
    ] = None
    response_format: Annotated[
        Literal["json", "text", "srt", "verbose_json", "vtt"], Meta(description="Form of the answer.")
    ] = "json"
    temperature: Annotated[float, Meta(ge=0, le=2, description="0: the likeliest words.")] = 0.0
    seed: Annotated[int | None, Meta(description="With a temperature: draw the same words again.")] = None
    stream: Annotated[bool, Meta(description="Answer with server-sent events; with json or text.")] = False


class TranscriptionForm(TranslationForm, kw_only=True):
    """Asks for what is said in a sound."""

    timestamp_granularities: Annotated[
        list[Literal["segment", "word"]] | None,
        Meta(description="What verbose_json has the times of; null: segments. Also timestamp_granularities[]."),
    ] = None
    include: Annotated[
        list[Literal["logprobs"]] | None, Meta(description="With json: log probabilities of tokens. Also include[].")
    ] = None


class SoundUsage(msgspec.Struct, kw_only=True):
    """What is counted of a sound."""

    type: Annotated[Literal["duration"], Meta(description="What is counted.")]
    seconds: Annotated[int, Meta(description="Seconds of the sound, rounded up.")]


class TranscriptLogprob(msgspec.Struct, kw_only=True):
    """A token and its log probability."""

    token: Annotated[str, Meta(description="Its text.")]
    bytes: Annotated[list[int], Meta(description="The bytes of its text, which need not be whole characters.")]
    logprob: Annotated[float, Meta(description="Natural logarithm of its probability.")]


class TranscriptSegment(msgspec.Struct, kw_only=True):
    """A part of a transcript between two timestamps."""

    id: Annotated[int, Meta(description="Its place, from 0.")]
    seek: Annotated[int, Meta(description="Where the piece begins in which it was heard, in hundredths of a second.")]
    start: Annotated[float, Meta(description="Seconds of the sound.")]
    end: Annotated[float, Meta(description="Seconds of the sound.")]
    text: Annotated[str, Meta(description="What is said.")]
    tokens: Annotated[list[int], Meta(description="Its token ids, timestamps included.")]
    temperature: Annotated[float, Meta(description="That of the request.")]
    avg_logprob: Annotated[float, Meta(description="Mean log probability of the piece's tokens.")]
    compression_ratio: Annotated[float, Meta(description="Of the piece's text; above 2.4 it repeats itself.")]
    no_speech_prob: Annotated[float, Meta(description="Probability that nothing is said in the piece.")]


class TranscriptWord(msgspec.Struct, kw_only=True):
    """A word and when it is spoken."""

    word: Annotated[str, Meta(description="The word, with its punctuation.")]
    start: Annotated[float, Meta(description="Seconds of the sound.")]
    end: Annotated[float, Meta(description="Seconds of the sound.")]


class Transcript(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is said in a sound; json has only the text, the usage and, if asked for, log probabilities."""

    text: Annotated[str, Meta(description="All that is said.")]
    task: Annotated[Literal["transcribe", "translate"] | None, Meta(description="With verbose_json.")] = None
    language: Annotated[str | None, Meta(description="English name of the language, with verbose_json.")] = None
    duration: Annotated[float | None, Meta(description="Seconds of the sound, with verbose_json.")] = None
    segments: Annotated[list[TranscriptSegment] | None, Meta(description="With verbose_json.")] = None
    words: Annotated[list[TranscriptWord] | None, Meta(description="With verbose_json, if asked for.")] = None
    logprobs: Annotated[list[TranscriptLogprob] | None, Meta(description="With json, if asked for.")] = None
    usage: Annotated[SoundUsage, Meta(description="How much was heard.")]
    weights_version: Annotated[str | None, Meta(description=WEIGHTS_VERSION)] = None
    mixed_numerics: Annotated[bool | None, Meta(description=MIXED_NUMERICS)] = None
