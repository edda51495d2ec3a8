"""Makes the message that sends a leg of a sample, or a pooling request, to its engine. No I/O."""

from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration

from tokenloom.v1.engine_pb2 import AddRequest, KVSource, PickId
from tokenloom.v1.output_processor_pb2 import Submit
from tokenloom.v1.types_pb2 import SamplingParams


def make_add(
    submit: Submit,
    params: SamplingParams,
    accepted: Sequence[int],
    *,
    pick: PickId | None,
    seconds_left: float | None,
    hold_kv: bool,
    kv_source: KVSource | None,
    awaits_tokens: bool,
    routed_start: int = 0,
) -> AddRequest:
    """Return the message; the link fills in the slot.

    Args:
        params: Those of this sample.
        accepted: Its output tokens so far.
        seconds_left: Until the request's deadline; None: it has none.
        hold_kv, kv_source, awaits_tokens: As in ``AddRequest``.
        routed_start: The position from which on the experts of tokens are missing, for a request that asks for them.
    """
    request = AddRequest(
        request_id=submit.request_id,
        accepted_token_ids=accepted,
        sampling_params=params,
        priority=submit.priority,
        timeout=None if seconds_left is None else _duration(seconds_left),
        hold_kv=hold_kv,
        kv_source=kv_source,
        awaits_tokens=awaits_tokens,
        pick=pick,
        trace_headers=submit.trace_headers,
        tenant=submit.tenant,
    )
    request.prompt.CopyFrom(submit.prompt)  # as an argument it would take twice the memory
    if routed_start:
        request.sampling_params.routed_experts_prompt_start = routed_start
    return request


def make_pooling_add(submit: Submit, *, pick: PickId | None, seconds_left: float | None) -> AddRequest:
    """Return the message of a pooling request; the arguments are as in :func:`make_add`."""
    request = AddRequest(
        request_id=submit.request_id,
        pooling_params=submit.pooling_params,
        priority=submit.priority,
        timeout=None if seconds_left is None else _duration(seconds_left),
        pick=pick,
        trace_headers=submit.trace_headers,
        tenant=submit.tenant,
    )
    request.prompt.CopyFrom(submit.prompt)  # as an argument it would take twice the memory
    return request


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(max(0, int(seconds * 1e9)))
    return duration
