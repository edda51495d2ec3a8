"""Decodes token ids incrementally into complete characters. No I/O.

The text of a stream, ``finish()`` included, is the decoded prompt and output without the complete text of the prompt.
With byte fallback it differs in one point from decoding everything at once: a malformed byte becomes U+FFFD alone (as
in SentencePiece), and characters next to it, which may have been sent already, stay.
"""

import codecs
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from .vocabulary import Vocabulary

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
        self._pending = self._open_character(prompt_ids)
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

    def _open_character(self, prompt_ids: Sequence[int]) -> bytes:
        """Return the bytes at the end of the prompt that begin a character but do not complete it."""
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
        return tail[consumed:]


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
