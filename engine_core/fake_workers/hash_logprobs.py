"""Computes log probabilities for the hash worker: as exact as its tokens, so that tests find any lost or moved one."""

from collections.abc import Sequence

from ..data.messages import Logprobs


def hash_logprobs(
    best: Sequence[int], taken: Sequence[int], top: int, extra: Sequence[int], vocab_size: int
) -> Logprobs:
    """Return the log probabilities of n positions.

    The token that the hash gives is the best; the token ``d`` ids after it, modulo the vocabulary, has rank ``d + 1``
    and the log probability ``-(d + 1) / 8``.

    Args:
        best: [n] the tokens that the hash gives.
        taken: [n] the tokens that were drawn, or those of the prompt.
        top: How many of the best tokens to list for each position.
        extra: Tokens to list after them.
    """
    token_ids: list[int] = []
    logprobs: list[float] = []
    for token_id in best:
        listed = [(token_id + distance) % vocab_size for distance in range(top)] + list(extra)
        token_ids += listed
        logprobs += [-_rank(token_id, each, vocab_size) / 8 for each in listed]
    ranks = [_rank(*pair, vocab_size) for pair in zip(best, taken, strict=True)]
    return Logprobs([-rank / 8 for rank in ranks], ranks, top + len(extra), token_ids, logprobs)


def _rank(best: int, token_id: int, vocab_size: int) -> int:
    return (token_id - best) % vocab_size + 1
