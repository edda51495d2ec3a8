"""Log probabilities with the text of each token, as gateways are told them. No I/O."""

from collections.abc import Sequence

from tokenloom.request import errors, logprob_columns
from tokenloom.v1.output_processor_pb2 import SlotTextLogprobs
from tokenloom.v1.types_pb2 import Logprobs

from .vocabulary import Vocabulary


def with_texts(vocabulary: Vocabulary, token_ids: Sequence[int], logprobs: Logprobs) -> SlotTextLogprobs:
    """``token_ids``: [n] the tokens that were taken. Slot, sample and position are left open."""
    text = vocabulary.token_bytes
    return SlotTextLogprobs(
        logprobs=logprobs, sampled_text=map(text, token_ids), token_text=map(text, logprobs.token_id)
    )


class PromptLogprobs:
    """What an engine tells of one prompt, from its second token on: passed on once, whichever attempt tells it."""

    def __init__(self, vocabulary: Vocabulary, prompt_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._prompt_ids = prompt_ids
        self._next = 1

    def take(self, token_index: int, logprobs: Logprobs) -> SlotTextLogprobs | None:
        """The positions that are news; None when all were told by an attempt that failed."""
        end = token_index + len(logprobs.sampled)
        if token_index > self._next or end > len(self._prompt_ids):
            raise errors.Internal("the engine's log probabilities are not those of the prompt")
        start, self._next = self._next, max(self._next, end)
        if start >= end:
            return None
        news = logprob_columns.part(logprobs, start - token_index, end - token_index)
        told = with_texts(self._vocabulary, self._prompt_ids[start:end], news)
        told.prompt, told.token_index = True, start
        if start == 1:
            told.first_text = self._vocabulary.token_bytes(self._prompt_ids[0])
        return told
