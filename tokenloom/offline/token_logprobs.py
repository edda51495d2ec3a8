"""An engine's log probabilities, columns, as the dicts of vLLM's offline API."""

from collections.abc import Sequence

from tokenloom.engine_core.wire.messages import Logprobs
from tokenloom.services.output_processor.text.vocabulary import Vocabulary

from .outputs import Logprob


def token_logprobs(
    columns: Logprobs, token_ids: Sequence[int], num_also: int, vocabulary: Vocabulary | None
) -> list[dict[int, Logprob]]:
    """Of each of ``token_ids``, [n], first itself, then the best, best first, then ``num_also`` that were asked for.

    ``vocabulary``: what tokens are decoded with; None: they are not.
    """
    top = columns.top

    def logprob(token_id: int, value: float, rank: int | None) -> Logprob:
        if vocabulary is None:
            return Logprob(value, rank)
        return Logprob(value, rank, vocabulary.token_bytes(token_id).decode(errors="replace"))

    positions = []
    for index, token_id in enumerate(token_ids):
        told = {token_id: logprob(token_id, columns.sampled[index], columns.rank[index])}
        for place in range(top):
            other = columns.token_ids[index * top + place]
            if other not in told:
                rank = place + 1 if place < top - num_also else None
                told[other] = logprob(other, columns.logprobs[index * top + place], rank)
        positions.append(told)
    return positions
