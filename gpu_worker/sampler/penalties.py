"""Applies repetition, presence and frequency penalties to the tokens that a request has seen."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.wire.core_sampling_params import SamplingParams


class Penalties:
    """Fulfils :class:`~.logits_processor.LogitsProcessor`."""

    parameters: tuple[str, ...] = ("presence_penalty", "frequency_penalty", "repetition_penalty")

    def __init__(self) -> None:
        self._seen: dict[int, tuple[SeenTokens, SamplingParams]] = {}

    def add(
        self, row: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
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


class SeenTokens:
    """Holds the distinct tokens of one request with their counts in the output, in growing columns.

    It is sparse, because a request sees hundreds of tokens of a vocabulary of a hundred thousand.
    """

    def __init__(self, prompt_token_ids: Iterable[int], output_token_ids: Iterable[int] = ()) -> None:
        self._slot_of = {token_id: slot for slot, token_id in enumerate(dict.fromkeys(prompt_token_ids))}
        self._token_ids = np.fromiter(self._slot_of, dtype=np.int64, count=len(self._slot_of))
        self._counts = np.zeros(len(self._slot_of), dtype=np.int32)
        for token_id in output_token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Count one output token."""
        slot = self._slot_of.setdefault(token_id, len(self._slot_of))
        if slot == len(self._token_ids):
            room = max(64, slot)
            self._token_ids = np.concatenate([self._token_ids, np.zeros(room, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.int32)])
        self._token_ids[slot] = token_id
        self._counts[slot] += 1

    def penalize(self, logits: npt.NDArray[np.float32], params: SamplingParams) -> None:
        """Change one row of logits, [vocab], in place.

        Repetition looks at prompt and output, presence and frequency at the output, in this order (as in vLLM).
        """
        token_ids, counts = self._token_ids[: len(self._slot_of)], self._counts[: len(self._slot_of)]
        seen = logits[token_ids].astype(np.float64)
        with np.errstate(over="ignore"):
            seen = np.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
            seen -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
            logits[token_ids] = seen
