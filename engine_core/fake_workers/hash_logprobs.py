"""Log probabilities of the hash worker: as exact as its tokens, so that none can be lost or moved unseen."""

from collections.abc import Sequence

from ..wire.messages import Logprobs


def hash_logprobs(
    best: Sequence[int], taken: Sequence[int], top: int, extra: Sequence[int], vocab_size: int
) -> Logprobs:
    """What is told of n positions.

    The token that the hash gives is the best; the one ``d`` ids after it, around the vocabulary, has rank ``d + 1``
    and the log probability ``-(d + 1) / 8``.

    Args:
        best: [n] what the hash gives.
        taken: [n] what stands there.
        top: Alternatives, the best first.
        extra: Tokens to tell after them.
    """
    token_ids: list[int] = []
    logprobs: list[float] = []
    for token_id in best:
        told = [(token_id + distance) % vocab_size for distance in range(top)] + list(extra)
        token_ids += told
        logprobs += [-_rank(token_id, each, vocab_size) / 8 for each in told]
    ranks = [_rank(*pair, vocab_size) for pair in zip(best, taken, strict=True)]
    return Logprobs([-rank / 8 for rank in ranks], ranks, top + len(extra), token_ids, logprobs)


def _rank(best: int, token_id: int, vocab_size: int) -> int:
    return (token_id - best) % vocab_size + 1
