"""Holds the prompt embeddings of the batch's rows, and selects those that one step computes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.data.embedding_rows import EmbedsSpan

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


def only_tokens(token_ids: Sequence[int], spans: Sequence[EmbedsSpan]) -> list[int]:
    """Return a request's tokens without those that have embeddings in place of an id."""
    tokens, start = list[int](), 0
    for span in spans:
        tokens += token_ids[start : span.position]
        start = span.position + len(span.rows)
    return tokens + list(token_ids[start:])


class TokenRows(NamedTuple):
    """Holds the embeddings of consecutive tokens of a step."""

    start: int
    """The first token, in [0, T)."""
    rows: npt.NDArray[np.float32]
    """[n, hidden_size]"""


class PromptEmbeds:
    """Maps rows of the input batch to their embeddings. It is false while no row has any."""

    def __init__(self) -> None:
        self._spans: dict[int, list[EmbedsSpan]] = {}

    def __bool__(self) -> bool:
        return bool(self._spans)

    def add(self, row: int, spans: list[EmbedsSpan]) -> None:
        self._spans[row] = spans

    def remove(self, row: int) -> None:
        """Drop the embeddings of a row, if it has any."""
        self._spans.pop(row, None)

    def mark(self, row: int, token_ids: Int32s) -> Int32s:
        """Return the first tokens [n] of a row, with a negative number of its own for each that has an embedding in
        place of an id: such a token equals no other one."""
        if not (spans := self._spans.get(row)):
            return token_ids
        marked = token_ids.copy()
        for span in spans:
            places = slice(span.position, span.position + len(span.rows))
            marked[places] = -1 - np.arange(span.position, span.position + len(span.rows))[: len(marked[places])]
        return marked

    def gather(
        self, rows: Ints, starts: Ints, lengths: Ints, cu_query_lens: npt.NDArray[np.int32]
    ) -> Sequence[TokenRows]:
        """Select the embeddings that fall into a step. The step computes ``lengths`` tokens from position ``starts`` on
        of each of these rows, which begin at ``cu_query_lens`` in the step."""
        found = []
        columns = zip(rows.tolist(), starts.tolist(), lengths.tolist(), cu_query_lens.tolist(), strict=False)
        for row, start, length, offset in columns:
            for span in self._spans.get(row, ()):
                first, last = max(span.position, start), min(span.position + len(span.rows), start + length)
                if first < last:
                    part = span.rows[first - span.position : last - span.position]
                    found.append(TokenRows(offset + first - start, part))
        return found
