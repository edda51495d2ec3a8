"""Expand a tiny grammar: ``[a|b|c]`` picks one alternative (they nest), ``{slot}`` is replaced by a value."""

import random
import re

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SENTENCE_START = re.compile(r"(^\"?|[.!?] \"?)([a-z])")


def pick(text: str, rng: random.Random) -> str:
    """Replaces every ``[a|b]`` with one of its alternatives, innermost first."""
    while _CHOICE.search(text):
        text = _CHOICE.sub(lambda match: rng.choice(match.group(1).split("|")), text)
    return text


def expand(text: str, rng: random.Random, **slots: str) -> str:
    """A finished text: alternatives picked, slots filled, articles and the first letter of each sentence put right."""
    text = re.sub(r"\s+", " ", pick(text, rng).format(**slots)).strip()
    text = re.sub(r" +([,.])", r"\1", text)
    text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
    return _SENTENCE_START.sub(lambda match: match.group(1) + match.group(2).upper(), text)
