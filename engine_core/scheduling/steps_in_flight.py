"""Async scheduling, the scheduler's part: a step is planned before the tokens of the one before it are known.

A request that samples a token in a step gets a placeholder for it, so that the next step can compute that token, which
the worker knows by then. The token itself, and whether it ends the request, is known one step later: a request that
ended may have been scheduled once more, and the token of that step is dropped.
"""

from collections import deque
from collections.abc import Iterable, Mapping

from ..data.request import Request
from ..data.scheduler_output import ModelRunnerOutput, SchedulerOutput


class StepsInFlight:
    """Tracks which tokens the scheduled steps will bring, and which of them will be dropped."""

    def __init__(self) -> None:
        self._steps: deque[tuple[SchedulerOutput, set[str]]] = deque()  # bounded by the core's steps in flight

    def __len__(self) -> int:
        return len(self._steps)

    def begin(self, scheduled: SchedulerOutput, running: Iterable[Request]) -> None:
        """Add a planned step, and a placeholder to each request whose tokens will all be computed: it samples one. A
        request with drafts gets one for each of them, too: so many tokens the step brings at most."""
        drafts = scheduled.draft_token_ids
        for request in running:
            if request.kv.num_computed_tokens == request.num_tokens + request.num_output_placeholders:
                request.num_output_placeholders += 1
            elif drafts and request.request_id in drafts:
                request.num_output_placeholders += 1 + len(drafts[request.request_id])
        self._steps.append((scheduled, set()))

    def request_ended(self, request_id: str) -> None:
        """Drop all tokens that the steps in flight sample for a request, even if a new request gets the same id."""
        # By step and not by id alone: a client may reuse an id while a step with the old request of that name still
        # runs.
        for scheduled, unwanted in self._steps:
            if request_id in scheduled.num_scheduled_tokens:
                unwanted.add(request_id)

    def end(
        self, scheduled: SchedulerOutput, result: ModelRunnerOutput, requests: Mapping[str, Request]
    ) -> ModelRunnerOutput:
        """End the oldest step: remove the placeholders of its tokens, and return what is wanted of its result."""
        oldest, unwanted = self._steps.popleft()
        assert oldest is scheduled, "the result is not that of the oldest step"
        if unwanted:
            for request_id in unwanted:
                result.draft_token_ids.pop(request_id, None)  # in place: the core hands them on
            result = _without(result, unwanted)
        columns, drafts = zip(result.req_ids, result.sampled_token_ids, strict=True), scheduled.draft_token_ids
        if not drafts:
            for request_id, token_ids in columns:
                requests[request_id].num_output_placeholders -= len(token_ids)
            return result
        for request_id, token_ids in columns:
            if token_ids:
                requests[request_id].num_output_placeholders -= 1 + len(drafts.get(request_id, ()))
        return result

    def abandon(self, requests: Iterable[Request]) -> None:
        """Forget all steps, which are lost, and the placeholders of ``requests``."""
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
        {request_id: value for request_id, value in result.logits_stats.items() if request_id not in unwanted},
        [request_id for request_id in result.without_finite_logit if request_id not in unwanted],
        routed_experts={
            request_id: value for request_id, value in result.routed_experts.items() if request_id not in unwanted
        },
        expert_loads=result.expert_loads,
        pooled={request_id: value for request_id, value in result.pooled.items() if request_id not in unwanted},
        num_verified=result.num_verified,
        times=result.times,
    )
