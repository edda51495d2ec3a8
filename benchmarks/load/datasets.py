"""Makes prompts of token ids, so that lengths are exact and every server gets the same prompts."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from .recorded import AZURE_CODE, AZURE_CONVERSATIONS, Encode, Recorded, Shape, read_conversations, read_trace

_EDGE = 10
"""How many ids at both ends of a vocabulary are left out, because special tokens are there."""

_FEWEST_TOKENS = 64
"""Fewer would leave out nearly every recorded request."""

_MOST_IDS = 1 << 26
"""Token ids of all prompts: half a gigabyte, and a minute to draw them."""


class DatasetName(StrEnum):
    """Names the kinds of load."""

    RANDOM = "random"
    SHARED_PREFIX = "shared-prefix"
    MIXED = "mixed"
    AZURE_CONVERSATIONS = "azure-conv"
    AZURE_CODE = "azure-code"
    TRACE = "trace"
    SHAREGPT = "sharegpt"


_OF_FILES = (DatasetName.TRACE, DatasetName.SHAREGPT)


@dataclass(frozen=True)
class Prompt:
    """Describes one request."""

    token_ids: list[int]
    max_tokens: int
    kind: str = ""
    """The part of a mixed load that it belongs to; parts are also reported separately."""
    arrival: float | None = None
    """Seconds after the start at which it is sent; None: by the pace of the run."""


_Count = Annotated[int, Meta(ge=1)]
_Share = Annotated[float, Meta(ge=0, le=1)]


class DatasetOptions(Struct, frozen=True):
    """Holds the options of a dataset, under the names that ``vllm bench serve`` has; lengths are in tokens."""

    name: Annotated[
        DatasetName,
        "random; shared-prefix: prompts with a common beginning; mixed: long prompts among short chats; azure-conv and "
        "azure-code: lengths as two services of Azure had them in an hour of 2023; trace: lengths of a CSV file of "
        "Azure's or BurstGPT's; sharegpt: texts and lengths of a JSON file of conversations.",
        Meta(extra={"name": "dataset_name"}),
    ] = DatasetName.RANDOM
    dataset_path: Annotated[str, "trace, sharegpt: the file."] = ""
    trace_speed: Annotated[
        Annotated[float, Meta(ge=0)],
        "trace: begin requests at the times of the trace, so many times as fast; 0: at --request-rate.",
    ] = 0.0
    most_tokens: Annotated[
        Annotated[int, Meta(ge=0)],
        "azure-…, trace, sharegpt: leave out requests with more tokens than the model's context; 0: none.",
    ] = 0
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


def make_prompts(options: DatasetOptions, vocab_size: int, encode: Encode | None = None) -> list[Prompt]:
    """Make prompts; the same options give the same prompts.

    ``encode``: of the model's tokenizer, for files of texts. Raises ``ValueError`` for lengths and shares that make no
    sense, and for files that do not fit.
    """
    _check(options, vocab_size)
    source = _Source(random.Random(f"{options.name}/{options.seed}"), vocab_size, options.range_ratio, encode)
    return _MAKERS[options.name](options, source)


class _Source:
    """Draws lengths and token ids."""

    def __init__(self, generator: random.Random, vocab_size: int, range_ratio: float, encode: Encode | None) -> None:
        self.random = generator
        self.encode = encode
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


def _shaped(shape: Shape) -> Callable[[DatasetOptions, _Source], list[Prompt]]:
    def make(options: DatasetOptions, source: _Source) -> list[Prompt]:
        drawn = list[Prompt]()
        while len(drawn) < options.num_prompts:
            request = shape.draw(source.random)
            if not options.most_tokens or request.input_len + request.output_len <= options.most_tokens:
                drawn.append(_of_record(request, source))
        return drawn

    return make


def _trace(options: DatasetOptions, source: _Source) -> list[Prompt]:
    requests = read_trace(Path(options.dataset_path), options.num_prompts, options.most_tokens)
    return [_of_record(each, source, options.trace_speed) for each in requests]


def _conversations(options: DatasetOptions, source: _Source) -> list[Prompt]:
    if source.encode is None:
        raise ValueError("sharegpt holds texts: --tokenizer must name the model's tokenizer")
    path, count = Path(options.dataset_path), options.num_prompts
    found = read_conversations(path, count, options.most_tokens, source.encode, options.seed)
    return [_of_record(each, source) for each in found]


def _of_record(request: Recorded, source: _Source, speed: float = 0.0) -> Prompt:
    ids = list(request.token_ids) or source.ids(request.input_len)
    arrival = request.arrival / speed if speed and request.arrival is not None else None
    return Prompt(ids, request.output_len, arrival=arrival)


_MAKERS: dict[DatasetName, Callable[[DatasetOptions, _Source], list[Prompt]]] = {
    DatasetName.RANDOM: _random,
    DatasetName.SHARED_PREFIX: _shared_prefix,
    DatasetName.MIXED: _mixed,
    DatasetName.AZURE_CONVERSATIONS: _shaped(AZURE_CONVERSATIONS),
    DatasetName.AZURE_CODE: _shaped(AZURE_CODE),
    DatasetName.TRACE: _trace,
    DatasetName.SHAREGPT: _conversations,
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
    if (options.name in _OF_FILES) != bool(options.dataset_path):
        raise ValueError(f"dataset_path names the file of {' and '.join(_OF_FILES)}, and of no other dataset")
    if 0 < options.most_tokens < _FEWEST_TOKENS:
        raise ValueError(f"most_tokens is {options.most_tokens}; it must be at least {_FEWEST_TOKENS}, or 0")
    longest = max(options.input_len, options.prefix_len, options.long_input_len)
    if (num_ids := max(options.num_prompts, options.num_prefixes) * longest) > _MOST_IDS:
        raise ValueError(f"the prompts would have {num_ids:,} tokens, at most {_MOST_IDS:,} are made: ask for less")
