"""Finds the token sequences of forbidden words: a word has other tokens at the start of a text than within it."""

from collections.abc import Sequence

from tokenloom.v1 import types_pb2

from .errors import InvalidArgument
from .validation import MAX_BAD_WORDS

MAX_BAD_WORD_CHARS = 1024


def spellings(words: Sequence[str]) -> list[str]:
    """Return the two texts of each word to encode, without special tokens. Raises ``InvalidArgument``."""
    if len(words) > MAX_BAD_WORDS // 2:
        raise InvalidArgument(f"bad_words may hold at most {MAX_BAD_WORDS // 2} words, not {len(words)}", "bad_words")
    for word in words:
        if not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
            raise InvalidArgument(f"bad_words may hold words of 1 to {MAX_BAD_WORD_CHARS} characters", "bad_words")
        if not word.isprintable() and any("\ud800" <= character <= "\udfff" for character in word):
            raise InvalidArgument("bad_words holds half of a surrogate pair, not a character", "bad_words")
    return [spelling for word in words for spelling in (word.lstrip(), " " + word.lstrip())]


def forbid(params: types_pb2.SamplingParams, encoded: Sequence[Sequence[int]]) -> None:
    """Add the sequences to forbid to ``params``; ``encoded`` holds the token ids of :func:`spellings`.

    A sequence that ends with the tokens of the plain word is forbidden by them. vLLM also leaves out the spaced word if
    the lengths differ, and so lets some words pass.
    """
    for plain, spaced in zip(encoded[::2], encoded[1::2], strict=True):
        params.bad_words.add(ids=plain)
        if list(spaced[-len(plain) :]) != list(plain):
            params.bad_words.add(ids=spaced)
