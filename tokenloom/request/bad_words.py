"""Words that must not appear, as token sequences: where a text begins and within it, a word may be other tokens."""

from collections.abc import Sequence

from .errors import InvalidArgument
from .validation import MAX_BAD_WORDS

MAX_BAD_WORD_CHARS = 1024


def spellings(words: Sequence[str]) -> list[str]:
    """The two texts of each word that are to be encoded, without special tokens. Raises ``InvalidArgument``."""
    if len(words) > MAX_BAD_WORDS // 2:
        raise InvalidArgument(f"bad_words may hold at most {MAX_BAD_WORDS // 2} words, not {len(words)}", "bad_words")
    for word in words:
        if not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
            raise InvalidArgument(f"bad_words may hold words of 1 to {MAX_BAD_WORD_CHARS} characters", "bad_words")
    return [spelling for word in words for spelling in (word.lstrip(), " " + word.lstrip())]


def sequences(encoded: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """The sequences to forbid; ``encoded``: what :func:`spellings` gave, as token ids.

    What ends with the tokens of the plain word is forbidden by them. vLLM leaves the spaced one out when it has more
    tokens or fewer, too, and so lets some words pass.
    """
    forbidden: list[Sequence[int]] = []
    for plain, spaced in zip(encoded[::2], encoded[1::2], strict=True):
        forbidden.append(plain)
        if list(spaced[-len(plain) :]) != list(plain):
            forbidden.append(spaced)
    return forbidden
