"""Masks the tokens that a grammar forbids, and forces those that must come next."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.data.scheduler_output import GrammarOutput


def allow_only(grammar: GrammarOutput, req_ids: Sequence[str], logits: npt.NDArray[np.float32]) -> None:
    """Set the logits that a grammar forbids to -inf, in place. ``logits`` is [S, vocab] with the rows of ``req_ids``,
    all of the step or some: a row without a grammar is not changed, and a grammar without a row is passed over."""
    row_of = {req_id: row for row, req_id in enumerate(req_ids)}
    for req_id, allowed in zip(grammar.req_ids, grammar.allowed(logits.shape[1]), strict=True):
        if (row := row_of.get(req_id)) is not None:
            logits[row, ~allowed] = -np.inf


def force(grammar: GrammarOutput, req_ids: Sequence[str], logits: npt.NDArray[np.float32]) -> None:
    """Leave only the forced token of each row that has one, in place, whatever was masked or added before.

    ``logits`` is [S, vocab] with the rows of ``req_ids``.
    """
    if grammar.forced:
        for row, req_id in enumerate(req_ids):
            if (token_id := grammar.forced.get(req_id)) is not None:
                logits[row] = -np.inf
                logits[row, token_id] = 0.0
