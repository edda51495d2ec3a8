"""Makes the text of one output as its tokens arrive: decodes, finds stop strings, holds text back. No I/O.

The text of a stream, ``finish()`` included, is the decoded prompt and output without the complete text of the prompt.
With byte fallback it differs in one point from decoding everything at once: a malformed byte becomes U+FFFD alone (as
in SentencePiece), and characters next to it, which may have been sent already, stay.
"""

import codecs
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from .vocabulary import Vocabulary

__all__ = ["Detokenizer", "OutputText", "StopMatch", "Vocabulary"]


_EACH_BYTE = "tokenloom.replace_each_byte"


_LONGEST_CHARACTER = 4  # bytes of UTF-8


_WINDOW = 8  # tokens of context: more than any decoder considers


_LONGEST_WINDOW = 32  # tokens, after which a broken character is shown as it is


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _replace_each_byte)


class TextStream(Protocol):
    """Makes the text of a growing sequence of tokens."""

    def push(self, token_id: int) -> str:
        """Return the characters that this token completes."""

    def finish(self) -> str:
        """Return what is left: U+FFFD for a character that was never completed."""


def open_text_stream(
    vocabulary: Vocabulary,
    prompt_ids: Sequence[int],
    skip_special_tokens: bool,
    *,
    spaces_between_special_tokens: bool = True,
) -> TextStream:
    """Return a stream that continues after ``prompt_ids``."""
    if vocabulary.is_tabulated:  # then the text of a token does not depend on its neighbours
        return TableStream(vocabulary, prompt_ids, skip_special_tokens)
    spaces = skip_special_tokens or spaces_between_special_tokens
    return WindowStream(vocabulary, prompt_ids, skip_special_tokens, spaces_between_special_tokens=spaces)


class NoText:
    """Makes no text, for outputs that are wanted as token ids."""

    def push(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


class TableStream:
    """Decodes with a tabulated vocabulary: exactly, with one list access per token."""

    __slots__ = ("_at_start", "_errors", "_pending", "_pieces", "_skip", "_vocabulary")

    def __init__(self, vocabulary: Vocabulary, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        self._pieces = vocabulary.pieces_without_special if skip_special_tokens else vocabulary.pieces
        self._errors = _EACH_BYTE if vocabulary.replaces_each_byte else "replace"
        # The prompt may end with bytes that begin a character but do not complete it.
        tail = b""
        for token_id in reversed(prompt_ids):
            piece = self._pieces[token_id] if token_id < len(self._pieces) else ""
            if isinstance(piece, bytes):
                tail = piece + tail
            elif piece:
                break
            if len(tail) >= _LONGEST_CHARACTER:
                break
        _, consumed = codecs.utf_8_decode(tail, self._errors, False)
        self._pending = tail[consumed:]
        self._at_start = vocabulary.strips_start
        if self._at_start:
            for token_id in reversed(prompt_ids):
                if token_id < len(self._pieces) and self._pieces[token_id]:
                    self._at_start = False
                    break

    def push(self, token_id: int) -> str:
        pieces = self._pieces
        piece = pieces[token_id] if token_id < len(pieces) else ""
        if not piece:
            return ""  # a token without text does not separate the bytes of a character
        if isinstance(piece, bytes):
            return self._push_bytes(piece)
        if self._at_start:
            self._at_start = False
            piece = self._vocabulary.decode([token_id], self._skip)
        return self.finish() + piece if self._pending else piece

    def finish(self) -> str:
        text, _ = codecs.utf_8_decode(self._pending, self._errors, True)
        self._pending = b""
        return text

    def _push_bytes(self, piece: bytes) -> str:
        self._at_start = False
        data = self._pending + piece
        text, consumed = codecs.utf_8_decode(data, self._errors, False)
        self._pending = data[consumed:]
        return text


class WindowStream:
    """Serves all other decoders: decodes the last tokens again with each new one and returns the added text."""

    __slots__ = ("_given", "_ids", "_skip", "_spaces", "_vocabulary")

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool,
        *,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._vocabulary = vocabulary
        self._spaces = spaces_between_special_tokens
        self._skip = skip_special_tokens
        seen = (i for i in reversed(prompt_ids) if not vocabulary.is_blank(i, skip_special_tokens))
        self._ids = list(islice(seen, _WINDOW))[::-1]
        self._given = self._decode().rstrip("\ufffd")

    def push(self, token_id: int) -> str:
        if self._vocabulary.is_blank(token_id, self._skip):
            return ""
        joins = not self._spaces and self._is_special(token_id) and self._ids and self._is_special(self._ids[-1])
        self._ids.append(token_id)
        text = self._decode()
        # A character that is still incomplete decodes to U+FFFD, and so does broken output. After 32 tokens it is taken
        # for the second, or text would be held back to the end.
        if text.endswith("\ufffd") and len(self._ids) < _LONGEST_WINDOW:
            return ""
        added = self._added(text)
        if len(self._ids) >= 2 * _WINDOW:
            del self._ids[:-_WINDOW]
            text = self._decode()
        self._given = text
        return added.removeprefix(" ") if joins else added

    def finish(self) -> str:
        text = self._decode()
        added = self._added(text)
        self._given = text
        return added

    def _is_special(self, token_id: int) -> bool:
        return self._vocabulary.is_special(token_id)

    def _added(self, text: str) -> str:
        return text[len(self._given) :]

    def _decode(self) -> str:
        return self._vocabulary.decode(self._ids, self._skip)


@dataclass(frozen=True, slots=True)
class StopMatch:
    """Names the stop string that ended an output."""

    stop_string: str
    num_tokens: int
    """Output tokens that remain, the one that completed the stop string included."""


class Match(NamedTuple):
    """Holds the stop string that was completed."""

    stop_string: str
    text: str
    """Text that was not shown before: up to the stop string, or through it if stop strings are included."""


class StopStrings:
    """Searches one output. It must not be fed again after a match."""

    __slots__ = ("_held", "_include", "_starts", "_stop")

    def __init__(self, stop: Sequence[str], include_stop_str: bool = False, held: str = "") -> None:
        """``stop`` must not contain an empty string. ``held``: text that another search held back."""
        assert all(stop), "an empty stop string would match everywhere"
        self._stop = tuple(stop)
        self._include = include_stop_str
        self._held = held
        self._starts = [0] * len(self._stop)
        """Where in the held text each stop string may begin: no earlier beginning can become one any more. So each
        character is tried once as a beginning, whatever the strings and the text are."""

    def feed(self, text: str) -> str | Match:
        """Return text that can be shown now, or the match that ends first; of equal ones the first in the list."""
        text = self._held + text
        ends = []
        for i, stop in enumerate(self._stop):
            start = text.find(stop, self._starts[i])
            if start >= 0:
                ends.append((start + len(stop), i))
        if ends:
            end, i = min(ends)
            stop = self._stop[i]
            self._held = ""
            return Match(stop, text[: end if self._include else end - len(stop)])
        return self._hold(text)

    def pass_over(self, text: str) -> str:
        """Do the same as :meth:`feed` for text that may begin a stop string but not complete one."""
        return self._hold(self._held + text)

    def finish(self) -> str:
        """Return the text that was held back, at the end of the output."""
        held, self._held = self._held, ""
        return held

    @property
    def held(self) -> str:
        """Return the text that is held back."""
        return self._held

    def _hold(self, text: str) -> str:
        starts = [_partial_match(text, stop, start) for stop, start in zip(self._stop, self._starts, strict=True)]
        keep = min(starts, default=len(text))
        self._starts = [start - keep for start in starts]
        self._held = text[keep:]
        return text[:keep]


class Detokenizer:
    """Turns one request's output tokens into text.

    The deltas of ``step`` and the rest from ``finish`` joined are the output's text: complete characters only, none of
    it beyond a stop string. Tokens of earlier attempts are stepped like new ones.
    """

    __slots__ = ("_include_stop", "_min_tokens", "_stop", "_stopped", "_stream", "num_tokens")

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop_str: bool = False,
        skip_special: bool = True,
        spaces_between_special: bool = True,
        detokenize: bool = True,
    ) -> None:
        """Begin after the prompt.

        Args:
            prompt_ids: [n] the prompt; only its last tokens matter.
            stop: Stop strings, none of them empty.
            min_tokens: A stop string within so many tokens does not end the output.
            detokenize: False: tokens are counted, but make no text.
        """
        self._stream: TextStream = NoText()
        if detokenize:
            self._stream = open_text_stream(
                vocabulary, prompt_ids, skip_special, spaces_between_special_tokens=spaces_between_special
            )
        self._stop = StopStrings(stop, include_stop_str) if stop else None
        self._min_tokens = min_tokens
        self._include_stop = include_stop_str
        self._stopped = False
        self.num_tokens = 0
        """Output tokens seen, those of earlier attempts included; after a stop match, those that remain."""

    @property
    def may_stop(self) -> bool:
        """Return whether a stop string can end the output."""
        return self._stop is not None

    def step(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> tuple[str, StopMatch | None]:
        """Return text that can be shown now, and the stop string if one was completed; later tokens are ignored.

        ``ends_with_stop_token``: the engine ended the output with the last token (end of sequence or a stop token id);
        it is counted, and shown only when stop strings are.
        """
        if self._stop is None and not ends_with_stop_token:  # nearly every call
            self.num_tokens += len(token_ids)
            if len(token_ids) == 1:
                return self._stream.push(token_ids[0]), None
            return "".join(map(self._stream.push, token_ids)), None
        shown = len(token_ids) - (ends_with_stop_token and not self._include_stop)
        texts: list[str] = []
        for i, token_id in enumerate(token_ids):
            if self._stopped:
                break
            self.num_tokens += 1
            if i < shown and (text := self._stream.push(token_id)) and (match := self._show(text, texts)):
                return "".join(texts), StopMatch(match.stop_string, self.num_tokens)
        return "".join(texts), None

    def finish(self) -> str:
        """Return the rest of the text when the output ends for another reason than a stop string; "" after one."""
        if self._stopped:
            return ""
        rest = self._stream.finish()
        if self._stop is None:
            return rest
        texts: list[str] = []
        # A stop string may contain U+FFFD. The text then ends there, but the reason for the end does not change.
        match = self._show(rest, texts)
        return "".join(texts) if match else "".join(texts) + self._stop.finish()

    def _show(self, text: str, texts: list[str]) -> Match | None:
        if self._stop is None:
            texts.append(text)
            return None
        # Text within min_tokens may still be the beginning of a stop string that a later token completes, so it is
        # passed over and not forgotten.
        if 0 < self._min_tokens >= self.num_tokens:
            texts.append(self._stop.pass_over(text))
            return None
        found = self._stop.feed(text)
        if isinstance(found, Match):
            self._stopped = True
            texts.append(found.text)
            return found
        texts.append(found)
        return None


class OutputText:
    """Collects the tokens of one output and makes their text, up to its end: by the same rules in the mesh and in the
    offline API.

    Attributes:
        token_ids: The output tokens, up to the stop string if one was found.
        finish: Returns the rest of the text when the output ends; "" after a stop string.
    """

    __slots__ = ("_detokenizer", "_eos_token_ids", "_stop_token_ids", "finish", "token_ids")

    def __init__(
        self, detokenizer: Detokenizer, stop_token_ids: Container[int], eos_token_ids: Container[int] = ()
    ) -> None:
        """``stop_token_ids``: the tokens that end the output, those of the model included. ``eos_token_ids``: the
        model's own, which are no stop reason."""
        self._detokenizer = detokenizer
        self._stop_token_ids = stop_token_ids
        self._eos_token_ids = eos_token_ids
        self.token_ids: list[int] = []
        self.finish = detokenizer.finish

    @property
    def may_stop(self) -> bool:
        """Return whether a stop string can end the output."""
        return self._detokenizer.may_stop

    def add(self, token_ids: Sequence[int]) -> tuple[str, StopMatch | None]:
        """Take new tokens; return the text that can be shown now, and the stop string that they completed."""
        # The last token decides, and not the reason of the end: an output that ends by its grammar ends with text.
        ends = bool(token_ids) and token_ids[-1] in self._stop_token_ids
        text, match = self._detokenizer.step(token_ids, ends_with_stop_token=ends)
        self.token_ids.extend(token_ids)
        if match is not None:
            del self.token_ids[match.num_tokens :]
        return text, match

    def stop_reason(self, stop_token_id: int | None) -> int | None:
        """Return the token to report as the stop reason of an output that ended with ``stop_token_id``, if any."""
        return None if stop_token_id in self._eos_token_ids else stop_token_id


def _partial_match(text: str, stop: str, start: int) -> int:
    """Return where, from ``start`` on, the longest suffix of ``text`` begins that is a proper prefix of ``stop``;
    ``len(text)`` if none."""
    start = text.find(stop[0], max(start, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return start
        start = text.find(stop[0], start + 1)
    return len(text)
