"""What "identical tokens" means.

Floating point forbids the naive promise: a token decoded at batch 1 and the same token prefilled in a chunk differ in
the last bits. So, in float32: where a continuation first differs from the reference, the reference's own logits of the
two tokens must be less than 1e-4 apart; the comparison goes on behind that position with the reference's token forced;
such positions are at most 0.1 % of all, and are printed. Any other difference fails.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAX_GAP = 1e-4
"""Between the reference's logits of the two tokens."""
MAX_SHARE = 1e-3
"""Of all positions, that may differ in this way."""


@dataclass(frozen=True)
class Case:
    """What the reference makes of one prompt."""

    prompt: list[int]
    tokens: list[int]
    logits: npt.NDArray[np.float32]
    """[len(tokens), vocab] that each token was chosen from."""


Generate = Callable[[Sequence[list[int]], Sequence[int]], list[list[int]]]
"""Prompts and how many tokens of each at most, to the tokens: what is under test."""


def assert_identical(
    cases: Sequence[Case], generate: Generate, max_gap: float = MAX_GAP, max_share: float = MAX_SHARE
) -> None:
    """Fails unless ``generate`` gives the reference's tokens in the sense above, or with wider limits."""
    starts = [0] * len(cases)  # tokens of each case that are compared already, or forced
    pending = list(range(len(cases)))
    ties: list[str] = []
    while pending:
        prompts = [cases[i].prompt + cases[i].tokens[: starts[i]] for i in pending]
        results = generate(prompts, [len(cases[i].tokens) - starts[i] for i in pending])
        assert len(results) == len(pending)
        again = []
        for i, tokens in zip(pending, results, strict=True):
            position = _first_difference(cases[i].tokens[starts[i] :], tokens)
            if position is not None:
                starts[i] += position
                ties.append(_near_tie(cases[i], starts[i], tokens[position:], max_gap))
                starts[i] += 1
                if starts[i] < len(cases[i].tokens):
                    again.append(i)
        pending = again
    for tie in ties:
        print(tie)
    total = sum(len(case.tokens) for case in cases)
    assert len(ties) <= max_share * total, f"{len(ties)} near ties in {total} positions"


def _first_difference(expected: list[int], tokens: list[int]) -> int | None:
    """None when both are the same, their lengths included."""
    for position, (a, b) in enumerate(zip(expected, tokens, strict=False)):
        if a != b:
            return position
    return None if len(expected) == len(tokens) else min(len(expected), len(tokens))


def _near_tie(case: Case, position: int, tokens: list[int], max_gap: float) -> str:
    """Describes a difference that is allowed; fails on any other."""
    where = f"prompt of {len(case.prompt)} tokens, output position {position}"
    assert position < len(case.tokens), f"{where}: the reference ended here, not {tokens}"
    assert tokens, f"{where}: ended here, the reference goes on with {case.tokens[position:]}"
    expected, logits = case.tokens[position], case.logits[position]
    gap = float(logits[expected] - logits[tokens[0]])
    assert abs(gap) < max_gap, f"{where}: {tokens[0]}, not the reference's {expected}, {gap} above it"
    return f"near tie: {where}: {tokens[0]} and the reference's {expected} are {gap:.1e} apart"
