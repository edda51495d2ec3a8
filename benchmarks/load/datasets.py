"""Makes synthetic prompts of token ids, so that lengths are exact and every server gets the same prompts."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

_EDGE = 10
"""How many ids at both ends of a vocabulary are left out, because special tokens are there."""


class DatasetName(StrEnum):
    """Names the kinds of load."""

    RANDOM = "random"
    SHARED_PREFIX = "shared-prefix"
    MIXED = "mixed"


@dataclass(frozen=True)
class Prompt:
    """Describes one request."""

    token_ids: list[int]
    max_tokens: int
    kind: str = ""
    """The part of a mixed load that it belongs to; parts are also reported separately."""


@dataclass(frozen=True)
class DatasetOptions:
    """Holds lengths in tokens."""

    name: DatasetName = DatasetName.RANDOM
    num_prompts: int = 100
    input_len: int = 128
    output_len: int = 128
    range_ratio: float = 0.0
    """Lengths are drawn from [(1 - ratio) · length, (1 + ratio) · length]."""
    prefix_len: int = 512
    """Shared-prefix: how many tokens prompts have in common, before their own `input_len`."""
    num_prefixes: int = 1
    long_share: float = 0.2
    """Mixed: the share of the long prompts; the others are chats of `input_len` and `output_len`."""
    long_input_len: int = 1500
    long_output_len: int = 16
    seed: int = 0


def make_prompts(options: DatasetOptions, vocab_size: int) -> list[Prompt]:
    """Make prompts; the same options give the same prompts. Raises ``ValueError`` for lengths and shares that make no
    sense."""
    _check(options, vocab_size)
    source = _Source(random.Random(f"{options.name}/{options.seed}"), vocab_size, options.range_ratio)
    return _MAKERS[options.name](options, source)


class _Source:
    """Draws lengths and token ids."""

    def __init__(self, generator: random.Random, vocab_size: int, range_ratio: float) -> None:
        self.random = generator
        edge = min(_EDGE, (vocab_size - 1) // 2)
        self._low, self._high = edge, vocab_size - edge
        self._ratio = range_ratio

    def length(self, mean: int) -> int:
        if not self._ratio:
            return mean
        return max(1, self.random.randint(int(mean * (1 - self._ratio)), int(mean * (1 + self._ratio))))

    def ids(self, count: int) -> list[int]:
        return [self.random.randrange(self._low, self._high) for _ in range(count)]


def _random(options: DatasetOptions, source: _Source) -> list[Prompt]:
    return [
        Prompt(source.ids(source.length(options.input_len)), source.length(options.output_len))
        for _ in range(options.num_prompts)
    ]


def _shared_prefix(options: DatasetOptions, source: _Source) -> list[Prompt]:
    prefixes = [source.ids(options.prefix_len) for _ in range(options.num_prefixes)]
    return [
        Prompt(
            prefixes[i % len(prefixes)] + source.ids(source.length(options.input_len)),
            source.length(options.output_len),
        )
        for i in range(options.num_prompts)
    ]


def _mixed(options: DatasetOptions, source: _Source) -> list[Prompt]:
    num_long = round(options.num_prompts * options.long_share)
    kinds = ["long"] * num_long + ["chat"] * (options.num_prompts - num_long)
    source.random.shuffle(kinds)
    lengths = {
        "long": (options.long_input_len, options.long_output_len),
        "chat": (options.input_len, options.output_len),
    }
    return [
        Prompt(source.ids(source.length(lengths[kind][0])), source.length(lengths[kind][1]), kind) for kind in kinds
    ]


_MAKERS: dict[DatasetName, Callable[[DatasetOptions, _Source], list[Prompt]]] = {
    DatasetName.RANDOM: _random,
    DatasetName.SHARED_PREFIX: _shared_prefix,
    DatasetName.MIXED: _mixed,
}


def _check(options: DatasetOptions, vocab_size: int) -> None:
    if vocab_size < 2:
        raise ValueError(f"a vocabulary of {vocab_size} has no ordinary tokens to draw from")
    for name in ("num_prompts", "input_len", "output_len", "num_prefixes", "long_input_len", "long_output_len"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} is {getattr(options, name)}; it must be at least 1")
    for name in ("range_ratio", "long_share"):
        if not 0 <= getattr(options, name) <= 1:
            raise ValueError(f"{name} is {getattr(options, name)}; it must be between 0 and 1")
