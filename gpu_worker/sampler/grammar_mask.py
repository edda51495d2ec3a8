"""Masks the tokens that a grammar forbids."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.wire.scheduler_output import GrammarOutput


def allow_only(grammar: GrammarOutput, req_ids: Sequence[str], logits: npt.NDArray[np.float32]) -> None:
    """Set the logits that a grammar forbids to -inf, in place. ``logits`` is [S, vocab] with the rows of ``req_ids``; a
    row without a grammar is not changed."""
    row_of = {req_id: row for row, req_id in enumerate(req_ids)}
    for req_id, allowed in zip(grammar.req_ids, grammar.allowed(logits.shape[1]), strict=True):
        logits[row_of[req_id], ~allowed] = -np.inf
