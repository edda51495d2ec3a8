"""The kinds of logits processors: each applies one or a few sampling parameters to the rows that ask for them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.data.core_params import CoreSamplingParams

from .logits_processor import LogitsProcessors, RowEdit, SeenTokens, Words, pack_bits


class AllowedTokens:
    """Fulfils :class:`~.logits_processor.LogitsProcessor`."""

    parameters: tuple[str, ...] = ("allowed_token_ids",)

    def __init__(self) -> None:
        self._token_ids: dict[int, npt.NDArray[np.int64]] = {}
        self._bitmasks: dict[int, Words] = {}

    def add(
        self, row: int, params: CoreSamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        self._token_ids[row] = np.array(params.allowed_token_ids, dtype=np.int64)

    def remove(self, row: int) -> None:
        del self._token_ids[row]
        self._bitmasks.pop(row, None)

    def append(self, row: int, token_id: int) -> None:
        pass

    def apply(self, logits: npt.NDArray[np.float32], index_of: Mapping[int, int]) -> None:
        for row, token_ids in self._token_ids.items():
            if (index := index_of.get(row)) is not None:
                allowed = logits[index, token_ids]
                logits[index] = -np.inf
                logits[index, token_ids] = allowed

    def describe(self, row: int, output_index: int, edit: RowEdit) -> None:
        if row not in self._bitmasks:
            self._bitmasks[row] = pack_bits(self._token_ids[row])
        edit.allowed.append(self._bitmasks[row])

    def follows_output(self, row: int) -> bool:
        return False


class BadWords:
    """Fulfils :class:`~.logits_processor.LogitsProcessor`."""

    parameters: tuple[str, ...] = ("bad_words",)

    def __init__(self) -> None:
        self._requests: dict[int, _Request] = {}

    def add(
        self, row: int, params: CoreSamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
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


class MinTokens:
    """Fulfils :class:`~.logits_processor.LogitsProcessor`."""

    parameters: tuple[str, ...] = ("min_tokens",)

    def __init__(self) -> None:
        self._stop_token_ids: dict[int, npt.NDArray[np.int64]] = {}
        self._num_missing: dict[int, int] = {}
        self._min_tokens: dict[int, int] = {}

    def add(
        self, row: int, params: CoreSamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        self._stop_token_ids[row] = np.array(params.stop_token_ids or (), dtype=np.int64)
        self._min_tokens[row] = params.min_tokens
        self._num_missing[row] = params.min_tokens - len(output_token_ids)

    def remove(self, row: int) -> None:
        del self._stop_token_ids[row], self._num_missing[row], self._min_tokens[row]

    def append(self, row: int, token_id: int) -> None:
        self._num_missing[row] -= 1

    def apply(self, logits: npt.NDArray[np.float32], index_of: Mapping[int, int]) -> None:
        for row, num_missing in self._num_missing.items():
            if num_missing > 0 and (index := index_of.get(row)) is not None:
                logits[index, self._stop_token_ids[row]] = -np.inf

    def describe(self, row: int, output_index: int, edit: RowEdit) -> None:
        if output_index < self._min_tokens[row]:
            edit.masked.append(self._stop_token_ids[row])

    def follows_output(self, row: int) -> bool:
        return False


class LogitBias:
    """Fulfils :class:`~.logits_processor.LogitsProcessor`."""

    parameters: tuple[str, ...] = ("logit_bias",)

    def __init__(self) -> None:
        self._biases: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]] = {}

    def add(
        self, row: int, params: CoreSamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        bias = params.logit_bias or {}
        self._biases[row] = (
            np.fromiter(bias.keys(), dtype=np.int64, count=len(bias)),
            np.fromiter(bias.values(), dtype=np.float32, count=len(bias)),
        )

    def remove(self, row: int) -> None:
        del self._biases[row]

    def append(self, row: int, token_id: int) -> None:
        pass

    def apply(self, logits: npt.NDArray[np.float32], index_of: Mapping[int, int]) -> None:
        for row, (token_ids, biases) in self._biases.items():
            if (index := index_of.get(row)) is not None:
                logits[index, token_ids] += biases

    def describe(self, row: int, output_index: int, edit: RowEdit) -> None:
        edit.bias = self._biases[row]

    def follows_output(self, row: int) -> bool:
        return False


class Penalties:
    """Fulfils :class:`~.logits_processor.LogitsProcessor`."""

    parameters: tuple[str, ...] = ("presence_penalty", "frequency_penalty", "repetition_penalty")

    def __init__(self) -> None:
        self._seen: dict[int, tuple[SeenTokens, CoreSamplingParams]] = {}

    def add(
        self, row: int, params: CoreSamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        self._seen[row] = SeenTokens(prompt_token_ids, output_token_ids), params

    def remove(self, row: int) -> None:
        del self._seen[row]

    def append(self, row: int, token_id: int) -> None:
        self._seen[row][0].append(token_id)

    def apply(self, logits: npt.NDArray[np.float32], index_of: Mapping[int, int]) -> None:
        for row, (seen, params) in self._seen.items():
            if (index := index_of.get(row)) is not None:
                seen.penalize(logits[index], params)

    def describe(self, row: int, output_index: int, edit: RowEdit) -> None:
        edit.penalties = self._seen[row]

    def follows_output(self, row: int) -> bool:
        return False


def make_logits_processors() -> LogitsProcessors:
    """Return all kinds of processors, in vLLM V1's order."""
    return LogitsProcessors([AllowedTokens(), BadWords(), MinTokens(), LogitBias(), Penalties()])
