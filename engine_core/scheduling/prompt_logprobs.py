"""Puts together what a prompt's chunks tell of its log probabilities."""

from collections.abc import Mapping

from ..wire.messages import Logprobs
from ..wire.scheduler_output import ModelRunnerOutput, SchedulerOutput
from .request import Request


def collect_prompt_logprobs(
    requests: Mapping[str, Request], scheduled: SchedulerOutput, result: ModelRunnerOutput
) -> dict[str, Logprobs]:
    """Takes in a step's parts, before its tokens; returns what is whole now, by request id.

    A part is the next one, or the first: a request that was preempted begins anew. Any other belongs to a life that
    a preemption ended while the step was computed.
    """
    starts = _num_computed_tokens(scheduled)
    whole: dict[str, Logprobs] = {}
    for req_id, part in result.prompt_logprobs.items():
        request = requests.get(req_id)
        if request is None or request.prompt_logprobs is None:
            continue
        start = starts[req_id]
        if start == 0:
            request.prompt_logprobs = part
        elif start == len(request.prompt_logprobs.sampled):
            request.prompt_logprobs.extend(part)
        if start + scheduled.num_scheduled_tokens[req_id] == request.num_prompt_tokens:
            whole[req_id] = request.prompt_logprobs
            request.prompt_logprobs = None
            request.skip_reading_prefix_cache = request.sampling_params.skip_reading_prefix_cache
    return whole


def _num_computed_tokens(scheduled: SchedulerOutput) -> dict[str, int]:
    """Of each request, before the step."""
    cached = scheduled.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return starts | {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
