"""``bad_words`` as token ids."""

from collections.abc import Callable, Iterable


def encode_bad_words(words: Iterable[str], encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Each word as it is written at the beginning of a text and after a space, where that ends in other tokens.

    vLLM leaves the second out when it has more tokens or fewer, and so lets some words pass. ``encode`` adds no special
    tokens. Raises ``ValueError`` for a word without tokens.
    """
    sequences: list[list[int]] = []
    for word in words:
        text = word.lstrip()
        first, spaced = encode(text), encode(f" {text}")
        if not first:
            raise ValueError(f"bad_words holds {word!r}, which has no tokens")
        sequences.append(first)
        if spaced[-len(first) :] != first:
            sequences.append(spaced)
    return sequences
