"""Counts the tokens that one request has seen, for penalties."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.data.core_sampling_params import SamplingParams


class SeenTokens:
    """Holds the distinct tokens of one request with their counts in the output, in growing columns.

    It is sparse, because a request sees hundreds of tokens of a vocabulary of a hundred thousand.
    """

    def __init__(self, prompt_token_ids: Iterable[int], output_token_ids: Iterable[int] = ()) -> None:
        self._slot_of = {token_id: slot for slot, token_id in enumerate(dict.fromkeys(prompt_token_ids))}
        self._token_ids = np.fromiter(self._slot_of, dtype=np.int64, count=len(self._slot_of))
        self._counts = np.zeros(len(self._slot_of), dtype=np.int32)
        self.num_outputs = 0
        """Output tokens that were counted."""
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
        self.num_outputs += 1

    def columns(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Return the distinct tokens of prompt and output [n], and how often each is in the output [n]."""
        return self._token_ids[: len(self._slot_of)], self._counts[: len(self._slot_of)]

    def penalize(self, logits: npt.NDArray[np.float32], params: SamplingParams) -> None:
        """Change one row of logits, [vocab], in place.

        Repetition looks at prompt and output, presence and frequency at the output, in this order (as in vLLM).
        """
        token_ids, counts = self.columns()
        seen = logits[token_ids].astype(np.float64)
        with np.errstate(over="ignore"):
            seen = np.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
            seen -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
            logits[token_ids] = seen
