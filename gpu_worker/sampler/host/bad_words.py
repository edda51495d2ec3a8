"""Applies ``bad_words``: the last token of a word is masked once all tokens before it are in the output."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.data.core_sampling_params import SamplingParams

from .row_edit import RowEdit


class BadWords:
    """Fulfils :class:`~.logits_processor.LogitsProcessor`."""

    parameters: tuple[str, ...] = ("bad_words",)

    def __init__(self) -> None:
        self._requests: dict[int, _Request] = {}

    def add(
        self, row: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        self._requests[row] = _Request(params.bad_words, output_token_ids)

    def remove(self, row: int) -> None:
        del self._requests[row]

    def append(self, row: int, token_id: int) -> None:
        self._requests[row].append(token_id)

    def apply(self, logits: npt.NDArray[np.float32], index_of: Mapping[int, int]) -> None:
        for row, request in self._requests.items():
            if (index := index_of.get(row)) is not None:
                logits[index, request.masked()] = -np.inf

    def describe(self, row: int, output_index: int, edit: RowEdit) -> None:
        edit.masked.append(np.array(self._requests[row].masked(), dtype=np.int64))

    def follows_output(self, row: int) -> bool:
        return self._requests[row].has_prefixes


class _Request:
    """Indexes one request's words by the token before the last, so that a step looks only at words that may end now."""

    def __init__(self, words: Sequence[Sequence[int]], output_token_ids: Sequence[int]) -> None:
        self._always = sorted({word[0] for word in words if len(word) == 1})
        self._after: defaultdict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for word in words:
            if len(word) > 1:
                self._after[word[-2]].append((list(word[:-1]), word[-1]))
        self._longest = max((len(word) - 1 for word in words), default=0)
        self._tail = list(output_token_ids[-self._longest :]) if self._longest else []

    def append(self, token_id: int) -> None:
        if self._longest:
            self._tail.append(token_id)
            del self._tail[: -self._longest]

    @property
    def has_prefixes(self) -> bool:
        """Return whether any word has more than one token."""
        return self._longest > 0

    def masked(self) -> list[int]:
        """Return the tokens that would complete a word."""
        if not self._tail:
            return self._always
        begun = self._after.get(self._tail[-1], ())
        return self._always + [last for prefix, last in begun if self._tail[-len(prefix) :] == prefix]
