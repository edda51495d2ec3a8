"""Adds the text of each token to log probabilities, as gateways receive them. No I/O."""

from collections.abc import Sequence

from tokenloom.request import logprob_columns
from tokenloom.services.runtime.streams.slotted_stream import WrongFrame
from tokenloom.v1.output_processor_pb2 import SlotTextLogprobs
from tokenloom.v1.types_pb2 import Logprobs

from .vocabulary import Vocabulary


def with_texts(vocabulary: Vocabulary, token_ids: Sequence[int], logprobs: Logprobs) -> SlotTextLogprobs:
    """Return the log probabilities with texts; the caller fills in slot, sample and position.

    ``token_ids``: [n] the tokens that were sampled.
    """
    # Bytes and not text: a token may end inside a character. vLLM then gives the bytes of its replacement character;
    # here `bytes` in an answer are the token's own.
    text = vocabulary.token_bytes
    return SlotTextLogprobs(
        logprobs=logprobs, sampled_text=map(text, token_ids), token_text=map(text, logprobs.token_id)
    )


def part_with_texts(columns: SlotTextLogprobs, start: int) -> SlotTextLogprobs | None:
    """Return a copy of the positions from token ``start`` of the output on; None if it would be empty."""
    skipped, top = max(start - columns.token_index, 0), columns.logprobs.top
    num_positions = logprob_columns.num_positions(columns.logprobs)
    if skipped >= num_positions:
        return None
    rest = SlotTextLogprobs()
    if not skipped:
        rest.CopyFrom(columns)
        return rest
    rest.token_index = columns.token_index + skipped
    rest.logprobs.CopyFrom(logprob_columns.part(columns.logprobs, skipped, num_positions))
    rest.sampled_text.extend(columns.sampled_text[skipped:])
    rest.token_text.extend(columns.token_text[skipped * top :])
    return rest


class PromptLogprobTexts:
    """Passes on the log probabilities of one prompt, from its second token on: each once, though attempts repeat."""

    def __init__(self, vocabulary: Vocabulary, prompt_ids: Sequence[int], num_given: int = 0) -> None:
        """``num_given``: positions, from the second token on, that the client has already."""
        self._vocabulary = vocabulary
        self._prompt_ids = prompt_ids
        self._next = 1 + num_given

    def take(self, token_index: int, logprobs: Logprobs) -> SlotTextLogprobs | None:
        """Return the positions that were not passed on yet; None if an earlier attempt brought all of them.

        Raises ``WrongFrame`` when they cannot be those of the prompt.
        """
        end = token_index + len(logprobs.sampled)
        if token_index > self._next or end > len(self._prompt_ids):
            raise WrongFrame("the engine's log probabilities are not those of the prompt")
        start, self._next = self._next, max(self._next, end)
        if start >= end:
            return None
        columns = logprob_columns.part(logprobs, start - token_index, end - token_index)
        texts = with_texts(self._vocabulary, self._prompt_ids[start:end], columns)
        texts.prompt, texts.token_index = True, start
        if start == 1:
            texts.first_text = self._vocabulary.token_bytes(self._prompt_ids[0])
        return texts
