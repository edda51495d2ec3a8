"""What grammars allow, as a mask on logits."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.wire.scheduler_output import GrammarOutput


def allow_only(grammar: GrammarOutput, req_ids: Sequence[str], logits: npt.NDArray[np.float32]) -> None:
    """Sets to -inf, in place, what a grammar forbids. ``logits`` is [S, vocab], its rows those of ``req_ids``; a row
    without a grammar stays as it is."""
    row_of = {req_id: row for row, req_id in enumerate(req_ids)}
    for req_id, allowed in zip(grammar.req_ids, grammar.allowed(logits.shape[1]), strict=True):
        logits[row_of[req_id], ~allowed] = -np.inf
