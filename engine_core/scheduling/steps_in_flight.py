"""Async scheduling, the scheduler's part: a step is planned before the tokens of the one before it are known.

A request that draws a token in a step gets a placeholder for it, so that the next step can compute that token, which by
then the worker has. What the token is, and whether it ends the request, is known one step later: a request that ended
may have been scheduled once more, and what that step draws for it is dropped.
"""

from collections import deque
from collections.abc import Iterable, Mapping

from ..wire.scheduler_output import ModelRunnerOutput, SchedulerOutput
from .request import Request


class StepsInFlight:
    """Which tokens steps that were scheduled are going to bring, and which of them nobody wants any more."""

    def __init__(self) -> None:
        self._steps: deque[tuple[SchedulerOutput, set[str]]] = deque()  # bounded by the core's batch queue

    def __len__(self) -> int:
        return len(self._steps)

    def begin(self, scheduled: SchedulerOutput, running: Iterable[Request]) -> None:
        """A step was planned: of its requests, those whose tokens will all be computed draw one more."""
        for request in running:
            if request.num_computed_tokens == request.num_tokens + request.num_output_placeholders:
                request.num_output_placeholders += 1
        self._steps.append((scheduled, set()))

    def request_ended(self, request_id: str) -> None:
        """Whatever the steps in flight draw for it is not wanted, not even by a request of the same id that comes."""
        for scheduled, unwanted in self._steps:
            if request_id in scheduled.num_scheduled_tokens:
                unwanted.add(request_id)

    def end(self, result: ModelRunnerOutput, requests: Mapping[str, Request]) -> ModelRunnerOutput:
        """The oldest step has ended: what of its result is wanted. The placeholders of its tokens are gone."""
        _, unwanted = self._steps.popleft()
        if unwanted:
            result = _without(result, unwanted)
        for request_id, token_ids in zip(result.req_ids, result.sampled_token_ids, strict=True):
            requests[request_id].num_output_placeholders -= len(token_ids)
        return result

    def abandon(self, requests: Iterable[Request]) -> None:
        """The steps are lost."""
        self._steps.clear()
        for request in requests:
            request.num_output_placeholders = 0


def _without(result: ModelRunnerOutput, unwanted: set[str]) -> ModelRunnerOutput:
    columns = zip(result.req_ids, result.sampled_token_ids, strict=True)
    wanted = [(request_id, token_ids) for request_id, token_ids in columns if request_id not in unwanted]
    return ModelRunnerOutput(
        [request_id for request_id, _ in wanted],
        [token_ids for _, token_ids in wanted],
        {request_id: value for request_id, value in result.logprobs.items() if request_id not in unwanted},
        {request_id: value for request_id, value in result.prompt_logprobs.items() if request_id not in unwanted},
        {request_id: value for request_id, value in result.num_nans_in_logits.items() if request_id not in unwanted},
        [request_id for request_id in result.without_choice if request_id not in unwanted],
    )
