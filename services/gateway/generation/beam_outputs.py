"""Makes text and log probabilities of the sequences that a beam search found."""

from collections.abc import Sequence

from tokenloom.v1 import output_processor_pb2

from ..mesh.tokenizer_client import TokenizerClient

_TAIL = 8
"""Tokens of the prompt that are decoded with an output, because they decide how its text begins."""


class BeamTexts:
    """Decodes sequences with a tokenizer's help."""

    def __init__(self, tokenizers: TokenizerClient) -> None:
        self._tokenizers = tokenizers

    async def text_of(self, submit: output_processor_pb2.Submit, token_ids: Sequence[int]) -> str:
        """Return the text of an output; empty if the client wants none. Raises ``Unavailable``."""
        if not token_ids or (submit.text.HasField("detokenize") and not submit.text.detokenize):
            return ""
        skip = submit.text.skip_special_tokens if submit.text.HasField("skip_special_tokens") else True
        tail = submit.prompt.token_ids[-_TAIL:]
        head = await self._decode(tail, skip)
        whole = await self._decode([*tail, *token_ids], skip)
        # A prompt that ends within a character does not begin the text of both.
        return whole[len(head) :] if whole.startswith(head) else await self._decode(token_ids, skip)

    async def _decode(self, token_ids: Sequence[int], skip: bool) -> str:
        text: str = (await self._tokenizers.decode(token_ids, skip_special_tokens=skip)).text
        return text


def logprobs_of(
    token_ids: Sequence[int], rows: Sequence[output_processor_pb2.SlotTextLogprobs], num_best: int
) -> output_processor_pb2.SlotTextLogprobs:
    """Return the log probabilities of a sequence, with at most ``num_best`` alternatives for each token.

    ``rows``: what was computed at each position, for the token that is the likeliest there.
    """
    joined = output_processor_pb2.SlotTextLogprobs()
    columns = joined.logprobs
    for token_id, row in zip(token_ids, rows, strict=True):
        place = list(row.logprobs.token_id).index(token_id)
        columns.top = min(num_best, row.logprobs.top)
        columns.sampled.append(row.logprobs.logprob[place])
        columns.rank.append(place + 1)
        columns.token_id.extend(row.logprobs.token_id[: columns.top])
        columns.logprob.extend(row.logprobs.logprob[: columns.top])
        joined.sampled_text.append(row.token_text[place])
        joined.token_text.extend(row.token_text[: columns.top])
    return joined
