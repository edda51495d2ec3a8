"""Extends and cuts ``Logprobs`` columns by whole positions."""

from tokenloom.v1.types_pb2 import Logprobs


def num_positions(columns: Logprobs) -> int:
    """Return the number of tokens in the columns."""
    return len(columns.sampled)


def fit_together(columns: Logprobs) -> bool:
    """Return whether every column has the length that the contract requires."""
    n = len(columns.sampled)
    return n == len(columns.rank) and n * columns.top == len(columns.token_id) == len(columns.logprob)


def are_probable(columns: Logprobs, vocab_size: int) -> bool:
    """Return whether the columns name tokens below ``vocab_size``, and the numbers may be log probabilities."""
    # Sums and not loops: a NaN or a positive infinity makes the comparison false. Rounding may exceed 0 a little.
    return (
        max(columns.token_id, default=0) < vocab_size
        and sum(columns.sampled) <= len(columns.sampled)
        and sum(columns.logprob) <= len(columns.logprob)
    )


def extend(columns: Logprobs, more: Logprobs) -> None:
    """Append the positions of ``more``, which has as many alternatives per position."""
    assert columns.top == more.top, "a request's columns are all of one kind"
    columns.sampled.extend(more.sampled)
    columns.rank.extend(more.rank)
    columns.token_id.extend(more.token_id)
    columns.logprob.extend(more.logprob)


def part(columns: Logprobs, start: int, stop: int) -> Logprobs:
    """Return the positions from ``start`` up to ``stop``: a copy, or the columns themselves if these are all."""
    if start == 0 and stop >= num_positions(columns):
        return columns
    top = columns.top
    return Logprobs(
        sampled=columns.sampled[start:stop],
        rank=columns.rank[start:stop],
        top=top,
        token_id=columns.token_id[start * top : stop * top],
        logprob=columns.logprob[start * top : stop * top],
    )
