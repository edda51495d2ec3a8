"""Reads recorded loads from their published files, and keeps the shapes of two for machines without the files."""

import csv
import json
import random
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TextIO

Encode = Callable[[str], list[int]]
"""Returns the token ids of a text."""


@dataclass(frozen=True)
class Recorded:
    """Describes one request of a record."""

    input_len: int
    output_len: int
    arrival: float | None = None
    """Seconds after the first request of the record; None: it has no times."""
    token_ids: tuple[int, ...] = ()
    """Of the prompt, where the record holds texts."""


_AT = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


@dataclass(frozen=True)
class Shape:
    """Holds the quantiles of a record's lengths, in tokens, at the shares ``_AT``."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def draw(self, generator: random.Random) -> Recorded:
        return Recorded(_between(self.inputs, generator.random()), _between(self.outputs, generator.random()))


def _between(quantiles: tuple[int, ...], share: float) -> int:
    index = bisect(_AT, share) - 1
    low, high = quantiles[index : index + 2]
    return round(low + (high - low) * (share - _AT[index]) / (_AT[index + 1] - _AT[index]))


# An hour of two services of Azure, 2023-11-16: 19,366 and 8,819 requests (github.com/Azure/AzurePublicDataset, CC-BY;
# Patel et al., "Splitwise", ISCA 2024). The lengths of a prompt and of its answer hardly depend on each other there
# (correlation -0.11 and 0.00), so each is drawn alone.
AZURE_CONVERSATIONS = Shape(
    (2, 181, 207, 396, 1020, 1189, 2735, 4083, 4142, 14050), (7, 41, 54, 85, 129, 395, 424, 451, 601, 1000)
)
AZURE_CODE = Shape((3, 75, 147, 578, 1469, 2745, 5194, 7315, 7436, 7437), (6, 6, 7, 9, 13, 24, 55, 90, 252, 1899))

_TRACES = (
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),  # Azure's
    ("Timestamp", "Request tokens", "Response tokens"),  # BurstGPT's (github.com/HPMLL/BurstGPT)
)
"""The columns of time, prompt tokens and answer tokens of published traces."""


def read_trace(path: Path, count: int, most_tokens: int) -> list[Recorded]:
    """Read the first ``count`` requests of a trace in Azure's or BurstGPT's columns that have an answer and no more
    than so many tokens; 0: any number.

    Raises ``ValueError`` if the file cannot be read so, or has fewer requests.
    """
    with _opened(path, "a trace") as file:
        rows = csv.DictReader(file)
        columns = next((each for each in _TRACES if set(each) <= set(rows.fieldnames or ())), None)
        if columns is None:
            wanted = " or ".join(", ".join(each) for each in _TRACES)
            raise ValueError(f"{path} is no trace: its first line must name the columns {wanted}")
        return _first(_requests(path, rows, columns, most_tokens), count, path)


def _requests(
    path: Path, rows: "csv.DictReader[str]", columns: tuple[str, str, str], most_tokens: int
) -> Iterator[Recorded]:
    begin = None
    for row in rows:
        try:
            at, context, answer = (row[name] for name in columns)
            when, context_len, answer_len = _seconds(at), int(context), int(answer)
        except (TypeError, ValueError):
            raise ValueError(f"{path}, line {rows.line_num}: a time and two numbers of tokens are expected") from None
        # A request without an answer failed when it was recorded.
        if answer_len > 0 and context_len > 0 and (not most_tokens or context_len + answer_len <= most_tokens):
            begin = when if begin is None else begin
            yield Recorded(context_len, answer_len, max(0.0, when - begin))


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        # Azure's times have seven decimals, of which datetime reads six.
        return datetime.fromisoformat(text[:26]).timestamp()


def read_conversations(path: Path, count: int, most_tokens: int, encode: Encode, seed: int) -> list[Recorded]:
    """Read the first question and answer of ``count`` conversations of a file in ShareGPT's format, in a random order:
    the prompt's text, and as many answer tokens as the answer had.

    As ``vllm bench serve`` does, those are left out of which either has fewer than 4 tokens, the prompt more than
    1,024, or both together more than 2,048 (``most_tokens``, where that is less). Raises ``ValueError`` as
    :func:`read_trace` does.
    """
    with _opened(path, "a file of conversations") as file:
        try:
            read = json.load(file)
            turns = [entry["conversations"][:2] for entry in read if len(entry["conversations"]) >= 2]
            texts = [(str(question["value"]), str(answer["value"])) for question, answer in turns]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} has no conversations in ShareGPT's format: {error!r}") from None
    random.Random(seed).shuffle(texts)
    most = min(most_tokens or 2048, 2048)

    def fitting() -> Iterator[Recorded]:
        for question, answer in texts:
            ids, num_answered = tuple(encode(question)), len(encode(answer))
            if min(len(ids), num_answered) >= 4 and len(ids) <= 1024 and len(ids) + num_answered <= most:
                yield Recorded(len(ids), num_answered, token_ids=ids)

    return _first(fitting(), count, path)


def _opened(path: Path, kind: str) -> TextIO:
    try:
        return path.open(encoding="utf-8", newline="")
    except OSError as error:
        raise ValueError(f"{path} cannot be read as {kind}: {error.strerror}") from None


def _first(requests: Iterator[Recorded], count: int, path: Path) -> list[Recorded]:
    found = list(islice(requests, count))
    if len(found) < count:
        raise ValueError(f"{path} has only {len(found)} requests that fit, not {count}: ask for fewer, or longer ones")
    return found
