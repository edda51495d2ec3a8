"""What a model has heard in a sound: cut into segments at its timestamps, with their figures, and into words.

The rules are those of transformers' long-form ``generate`` of Whisper and of its tokenizer.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from tokenloom.request.errors import InvalidArgument
from tokenloom.v1.tokenizer_pb2 import TRANSCRIPT_TASK_TRANSLATE, TranscriptTask, TranscriptTraits

_UNSPACED: Final = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages that put no blanks between words."""
_PUNCTUATION: Final = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_BEFORE_WORDS: Final = "\"'“¡¿([{-"
_AFTER_WORDS: Final = "\"'.\u3002,\uff0c!\uff01?\uff1f:\uff1a”)]}\u3001"
_BROKEN: Final = "\ufffd"
MAX_TEMPERATURE: Final = 2.0


def read_language(value: str, task: TranscriptTask, traits: TranscriptTraits) -> str:
    """Return the code of a language; empty: the client names none. Raises ``InvalidArgument`` naming the field."""
    name = value.strip().lower()
    if not traits.languages:
        if task == TRANSCRIPT_TASK_TRANSLATE:
            raise InvalidArgument("the model knows English only: it does not translate", "model")
        if name not in ("", "en", "english"):
            raise InvalidArgument("the model knows English only", "language")
        return "en"
    if not name:
        return ""
    found = next((each.code for each in traits.languages if name == each.code or name in each.names), None)
    if found is None:
        codes = ", ".join(each.code for each in traits.languages)
        raise InvalidArgument(f"language {value[:32]!r} is not known; there are: {codes}", "language")
    return found


class HeardToken(NamedTuple):
    """A token of a transcript."""

    id: int
    text: bytes
    """It need not be whole characters."""
    logprob: float
    """From the model's distribution before any token is forbidden."""


class Word(NamedTuple):
    """A word and when it is spoken, in seconds of the sound."""

    text: str
    start: float
    end: float


class PieceFigures(NamedTuple):
    """What holds for all segments of a piece."""

    seek: int
    """The frame at which the piece begins."""
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


@dataclass(frozen=True, slots=True)
class HeardSegment:
    """A part of a transcript between two timestamps."""

    start: float
    """Seconds of the sound."""
    end: float
    tokens: Sequence[HeardToken]
    """Its timestamps included."""
    text: str
    figures: PieceFigures
    first: int
    """Where its tokens begin in the piece."""


class Slice(NamedTuple):
    """Some tokens of a piece, and their timestamps, counted from the begin of the piece."""

    first: int
    end: int
    begins_at: int
    ends_at: int


def cut(ids: Sequence[int], num_frames: int, traits: TranscriptTraits) -> tuple[list[Slice], int]:
    """Return where the segments of a piece are, and the frames after which the next piece begins.

    ``ids``: without the token that ends the output. ``num_frames``: of the piece.
    """
    first = traits.first_timestamp_id
    stamps = [each - first if each >= first else None for each in ids]
    frames_per_stamp = traits.timestamp_samples // traits.frame_samples
    borders = [index + 1 for index in range(len(ids) - 1) if None not in stamps[index : index + 2]]
    if not borders:
        last = next((each for each in reversed(stamps) if each is not None), 0)
        return [Slice(0, len(ids), 0, last or num_frames // frames_per_stamp)], num_frames
    # A single timestamp at the end: nothing is spoken after it. Otherwise the last words may be cut off in the middle,
    # and the next piece hears them again.
    is_over = len(stamps) > 1 and stamps[-2] is None and stamps[-1] is not None
    advance = num_frames if is_over else (stamps[borders[-1] - 1] or 0) * frames_per_stamp
    slices, begin = [], 0
    for border in [*borders, len(ids)] if is_over else borders:
        # As in transformers, the last segment has the timestamp behind its own too, if more would follow.
        end = border if is_over else border + (border == borders[-1])
        slices.append(Slice(begin, end, stamps[begin] or 0, stamps[border - 1] or 0))
        begin = border
    return slices, advance or num_frames  # a model that does not advance would be asked for ever


def text_of(tokens: Sequence[HeardToken], traits: TranscriptTraits) -> str:
    """Return the text of tokens, without what is no text."""
    return b"".join(each.text for each in tokens if each.id < traits.first_special_id).decode(errors="replace")


def segments_of(
    tokens: Sequence[HeardToken], slices: Sequence[Slice], figures: PieceFigures, traits: TranscriptTraits
) -> list[HeardSegment]:
    """Return the segments of a piece that have a text."""
    begin = figures.seek * traits.frame_samples
    found = []
    for each in slices:
        part = tokens[each.first : each.end]
        if not (text := text_of(part, traits)).strip():
            continue
        start, end = (
            (begin + at * traits.timestamp_samples) / traits.sampling_rate for at in (each.begins_at, each.ends_at)
        )
        found.append(HeardSegment(start, end, part, text, figures, each.first))
    return found


def compression_ratio(text: str) -> float:
    """Return how well a text can be compressed: one that repeats itself is above 2.4."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


def words_of(
    tokens: Sequence[HeardToken], times: Sequence[float], language: str, traits: TranscriptTraits
) -> list[Word]:
    """Return the words of tokens. ``times``: when the first token begins, and when each one ends, in seconds of the
    sound."""
    heard = [index for index, each in enumerate(tokens) if each.id < traits.first_special_id]
    words: list[tuple[str, int, int]] = []  # its text, its first token, and its last one
    for text, first, last in _characters([tokens[index].text for index in heard]):
        is_part = language not in _UNSPACED and not text.startswith(" ") and text.strip() not in _PUNCTUATION
        if words and is_part:
            words[-1] = (words[-1][0] + text, words[-1][1], last)
        else:
            words.append((text, first, last))
    return [
        Word(text.strip(), round(times[heard[first]], 2), round(times[heard[last] + 1], 2))
        for text, first, last in _with_punctuation(words)
        if text.strip()
    ]


def _characters(texts: Sequence[bytes]) -> Iterator[tuple[str, int, int]]:
    """Yield the smallest parts that are whole characters, each with its first and its last token."""
    whole, held, first, offset = b"".join(texts).decode(errors="replace"), b"", 0, 0
    for index, each in enumerate(texts):
        held += each
        text = held.decode(errors="replace")
        broken = text.find(_BROKEN)
        if broken < 0 or offset + broken >= len(whole) or whole[offset + broken] == _BROKEN:
            yield text, first, index
            held, first, offset = b"", index + 1, offset + len(text)


def _with_punctuation(words: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Return words with the punctuation that belongs to them."""
    joined: list[tuple[str, int, int]] = []  # from the last word on
    for text, first, last in reversed(words):
        if joined and text.startswith(" ") and text.strip() in _BEFORE_WORDS:
            joined[-1] = (text + joined[-1][0], first, joined[-1][2])
        else:
            joined.append((text, first, last))
    found: list[tuple[str, int, int]] = []
    for text, first, last in reversed(joined):
        if found and text in _AFTER_WORDS and not found[-1][0].endswith(" "):
            found[-1] = (found[-1][0] + text, found[-1][1], last)
        else:
            found.append((text, first, last))
    return found
