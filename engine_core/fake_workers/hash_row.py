"""Holds what the hash worker knows of a request."""

import zlib

import numpy as np
import numpy.typing as npt

from ..data.core_sampling_params import SamplingParams
from ..data.embedding_rows import EmbedsSpan
from ..data.scheduler_output import NewRequestData


class HashRow:
    """Holds the state of a request between steps."""

    def __init__(self, token_ids: list[int], num_computed: int, params: SamplingParams, block_size: int) -> None:
        self.token_ids = list(token_ids)
        self.num_prompt_tokens = len(token_ids)
        self.num_computed = num_computed
        self.params = params
        self.mark = 0
        """Changes what is cached of its tokens, and thus the tokens after them, by its adapter."""
        self.slots: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
        self._block_size = block_size

    @classmethod
    def of_new(cls, new: NewRequestData, block_size: int) -> "HashRow":
        token_ids = new.prompt_token_ids + new.output_token_ids
        row = cls(token_ids, new.num_computed_tokens, new.sampling_params, block_size)
        row.add_blocks(new.block_ids)
        return row

    def take_embeds(self, spans: list[EmbedsSpan]) -> None:
        """Replace the ids that prompt embeddings cover by hashes of their rows."""
        for span in spans:
            self.token_ids[span.position : span.position + len(span.rows)] = embeds_ids(span)

    def is_in_prompt(self, num_tokens: int) -> bool:
        """Return whether the step that just computed ``num_tokens`` began within the prompt."""
        return self.num_computed - num_tokens < self.num_prompt_tokens

    def add_blocks(self, block_ids: list[int]) -> None:
        if block_ids:
            first_slots = np.array(block_ids, dtype=np.int32)[:, None] * self._block_size
            added = first_slots + np.arange(self._block_size, dtype=np.int32)
            self.slots = np.concatenate((self.slots, added.ravel()))


def embeds_ids(span: EmbedsSpan) -> list[int]:
    """Return the ids that stand for the rows of a span in the hashed prefix."""
    return [zlib.crc32(row.tobytes()) >> 1 for row in span.rows]
