"""Makes synthetic prompts of token ids, so that lengths are exact and every server gets the same prompts."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

_EDGE = 10
"""How many ids at both ends of a vocabulary are left out, because special tokens are there."""

_MOST_IDS = 1 << 26
"""Token ids of all prompts: half a gigabyte, and a minute to draw them."""


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


_Count = Annotated[int, Meta(ge=1)]
_Share = Annotated[float, Meta(ge=0, le=1)]


class DatasetOptions(Struct, frozen=True):
    """Holds the options of a dataset, under the names that ``vllm bench serve`` has; lengths are in tokens."""

    name: Annotated[
        DatasetName,
        "random; shared-prefix: prompts with a common beginning; mixed: long prompts among short chats.",
        Meta(extra={"name": "dataset_name"}),
    ] = DatasetName.RANDOM
    num_prompts: Annotated[_Count, "Total requests."] = 100
    input_len: Annotated[
        _Count, "Tokens of a prompt, without a shared prefix.", Meta(extra={"aliases": ("random_input_len",)})
    ] = 128
    output_len: Annotated[_Count, "Tokens of an answer.", Meta(extra={"aliases": ("random_output_len",)})] = 128
    range_ratio: Annotated[
        _Share, "Lengths vary by ± this share.", Meta(extra={"aliases": ("random_range_ratio",)})
    ] = 0.0
    prefix_len: Annotated[_Count, "shared-prefix: tokens of the shared prefix."] = 512
    num_prefixes: Annotated[_Count, "shared-prefix: number of different prefixes."] = 1
    long_share: Annotated[_Share, "mixed: share of long prompts; the others are chats."] = 0.2
    long_input_len: Annotated[_Count, "mixed: tokens of a long prompt."] = 1500
    long_output_len: Annotated[_Count, "mixed: tokens of the answer to a long prompt."] = 16
    seed: Annotated[int, "Seed of prompts, lengths and arrivals."] = 0


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
    longest = max(options.input_len, options.prefix_len, options.long_input_len)
    if (num_ids := max(options.num_prompts, options.num_prefixes) * longest) > _MOST_IDS:
        raise ValueError(f"the prompts would have {num_ids:,} tokens, at most {_MOST_IDS:,} are made: ask for less")
