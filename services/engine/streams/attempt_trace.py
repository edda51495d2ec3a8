"""The spans of one attempt, made at its end from the times that the core told."""

from tokenloom.services.runtime.telemetry.tracing import Headers, Tracer

from .attempts import Attempt


def trace_attempt(tracer: Tracer, attempt: Attempt, headers: Headers, ended: float) -> None:
    """``headers``: of the output processor's span. ``ended``: monotonic seconds."""
    arrival, end = round(attempt.arrival * 1e9), round(ended * 1e9)
    assert attempt.finish_reason is not None
    attributes: dict[str, str | int] = {
        "gen_ai.request.id": attempt.request_id,
        "gen_ai.usage.input_tokens": attempt.num_prompt_tokens,
        "gen_ai.usage.output_tokens": attempt.num_output_tokens - attempt.num_accepted_tokens,
        "tokenloom.finish_reason": attempt.finish_reason.name.lower(),
        "tokenloom.leg": _leg(attempt),
    }
    span = tracer.start("engine", headers, started_ns=arrival, attributes=attributes)
    if span is None:
        return
    stats, first = attempt.prefill_stats, round(attempt.first_token_at * 1e9)
    if attempt.kv_wait_ns:
        span.child("kv_transfer", arrival, arrival + attempt.kv_wait_ns)
    if stats is not None and first:
        # Backwards from the first token: what happened before it ends where the next begins.
        scheduled = first - stats.prefill_ns
        span.child("queue", scheduled - stats.queued_ns, scheduled)
        cached = {"tokenloom.cached_tokens": stats.num_cached_tokens}
        span.child("prefill", scheduled, first, cached)
    if first and attempt.last_token_at > attempt.first_token_at:
        span.child("decode", first, round(attempt.last_token_at * 1e9))
    error = "the attempt failed" if attempt.finish_reason.name == "ERROR" else ""
    span.end(error=error, ended_ns=end)


def _leg(attempt: Attempt) -> str:
    if attempt.lease_id:
        return "prefill"
    return "decode" if attempt.kv_wait_ns else "whole"
