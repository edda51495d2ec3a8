"""The output of a step, completed once its tokens are on the host."""

import threading

from tokenloom.engine_core.wire.scheduler_output import ModelRunnerOutput

from ..cuda.drawn_rows import DrawnRows
from ..cuda.sampler import NO_CHOICE
from .sampler import NO_TOKEN


class PendingStep:
    """Fulfils :class:`tokenloom.engine_core.pending_output.PendingOutput`. Any thread may wait for it."""

    def __init__(
        self, output: ModelRunnerOutput, drawn: DrawnRows, indices: list[int], *, may_be_masked: bool = False
    ) -> None:
        """``output``: without tokens yet. ``indices`` [S]: the requests of the step whose tokens these are.
        ``may_be_masked``: whether masks can be the reason that all logits of a row are -inf."""
        self._output = output
        self._drawn = drawn
        self._indices = indices
        self._may_be_masked = may_be_masked
        self._is_complete = False
        self._lock = threading.Lock()

    def result(self) -> ModelRunnerOutput:
        """Return the output with its tokens, once they are there. Nothing later of the device is waited for."""
        token_ids = self._drawn.tokens.wait()
        with self._lock:
            if not self._is_complete:
                self._is_complete = True
                self._complete(token_ids)
        return self._output

    def _complete(self, tokens: list[int]) -> None:
        output, indices = self._output, self._indices
        output.sampled_token_ids = by_request(tokens, indices, len(output.req_ids))
        if NO_CHOICE in tokens:
            tokens = report_choices(output, tokens, indices, may_be_masked=self._may_be_masked)
        if NO_TOKEN in tokens:
            drop_undrawn(output, tokens, indices)
        by_row = self._drawn.wait_for_logprobs()
        output.logprobs = {output.req_ids[indices[row]]: logprobs for row, logprobs in by_row.items()}


def by_request(tokens: list[int], indices: list[int], num_requests: int) -> list[list[int]]:
    """Return the tokens [S] of the requests ``indices`` [S] in a list for each request of the step."""
    if len(tokens) == num_requests:  # every request decodes
        return [[token_id] for token_id in tokens]
    by_request: list[list[int]] = [[] for _ in range(num_requests)]
    for index, token_id in zip(indices, tokens, strict=True):
        by_request[index] = [token_id]
    return by_request


def drop_undrawn(output: ModelRunnerOutput, tokens: list[int], indices: list[int]) -> list[int]:
    """List the requests of the rows without a token in ``output``, unless they are listed as without choice.

    Returns the tokens with an arbitrary one for these rows, as the requests may be in the next step already.
    """
    for row, token_id in enumerate(tokens):
        if token_id == NO_TOKEN:
            output.sampled_token_ids[indices[row]] = []
            req_id = output.req_ids[indices[row]]
            if req_id not in output.without_choice:
                output.without_finite_logit.append(req_id)
    return [max(token_id, 0) for token_id in tokens]


def report_choices(
    output: ModelRunnerOutput, tokens: list[int], indices: list[int], *, may_be_masked: bool
) -> list[int]:
    """Return ``tokens`` [S] with ``NO_TOKEN`` for ``NO_CHOICE``, and list the requests of such rows in ``output`` as
    without choice if masks can be the reason. ``indices`` [S]: the requests of the step whose tokens these are."""
    if may_be_masked:
        rows = [row for row, token_id in enumerate(tokens) if token_id == NO_CHOICE]
        output.without_choice += [output.req_ids[indices[row]] for row in rows]
    return [max(token_id, NO_TOKEN) for token_id in tokens]
