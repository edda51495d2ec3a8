"""The output of a step, completed once its tokens are on the host."""

import threading
from collections.abc import Iterable

from tokenloom.engine_core.data.messages import Logprobs
from tokenloom.engine_core.data.scheduler_output import ModelRunnerOutput

from ..device.device_link import Event
from .device.device_sampler import NO_CHOICE
from .device.sampled_rows import SampledRows


class PendingStep:
    """Fulfils :class:`tokenloom.engine_core.data.scheduler_output.PendingOutput`. Any thread may wait for it."""

    def __init__(self, output: ModelRunnerOutput, drawn: SampledRows, indices: list[int], *, has_masks: bool) -> None:
        """``output``: without tokens yet. ``indices`` [S]: the requests of the step that drew. ``has_masks``: whether
        masks of requests can be why a row has no choice."""
        self._output = output
        self._drawn = drawn
        self._indices = indices
        self._has_masks = has_masks
        self._is_complete = False
        self._lock = threading.Lock()

    def result(self) -> ModelRunnerOutput:
        """Return the output with its tokens, once they are there. Nothing else of the device is waited for."""
        token_ids, logprobs = self._drawn.tokens.wait(), self._drawn.wait_for_logprobs()
        with self._lock:
            if not self._is_complete:
                self._is_complete = True
                self._complete(token_ids, logprobs)
        return self._output

    def _complete(self, token_ids: list[int], logprobs: dict[int, Logprobs]) -> None:
        output, indices = self._output, self._indices
        output.sampled_token_ids = by_request(token_ids, indices, len(output.req_ids))
        output.logprobs = {output.req_ids[indices[row]]: found for row, found in logprobs.items()}
        if min(token_ids) < 0:
            if self._has_masks:
                without = [
                    output.req_ids[at] for at, drawn in zip(indices, token_ids, strict=True) if drawn == NO_CHOICE
                ]
                output.without_choice += without
            drop_undrawn(output, token_ids, indices)


class EndingStep:
    """Fulfils the same for a step that draws no token: the device may still write keys and values, which the blocks of
    an output that is there must hold."""

    def __init__(self, output: ModelRunnerOutput, ended: Event) -> None:
        self._output = output
        self._ended = ended

    def result(self) -> ModelRunnerOutput:
        """Return the output, once the device has computed the step."""
        if not self._ended.query():
            self._ended.synchronize()
        return self._output


def by_request(tokens: list[int], indices: Iterable[int], num_requests: int) -> list[list[int]]:
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
        if token_id < 0:
            output.sampled_token_ids[indices[row]] = []
            req_id = output.req_ids[indices[row]]
            if req_id not in output.without_choice:
                output.without_finite_logit.append(req_id)
    return [max(token_id, 0) for token_id in tokens]
