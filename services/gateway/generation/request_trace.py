"""Makes a request's span at the gateway: the root of its trace, unless the client has begun one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from tokenloom.request.wire_errors import of_exception
from tokenloom.services.runtime.telemetry.tracing import CURRENT, Attributes, Headers, Tracer
from tokenloom.v1 import inference_pb2, output_processor_pb2

from ..metrics.gateway_metrics import FINISH_REASONS
from ..records.generate_request import Chat, GenerateRequest


class TracedOutcome(Protocol):
    """What a running request knows at a request's end."""

    @property
    def request_id(self) -> str: ...
    @property
    def finished(self) -> Mapping[int, output_processor_pb2.RequestFinished]: ...
    @property
    def usage(self) -> inference_pb2.Usage: ...


@dataclass(slots=True)
class GatewayTrace:
    """Passes a traced request's outcome to its span."""

    outcome: TracedOutcome | None = None
    """Set once the request is prepared."""


@contextmanager
def traced(
    tracer: Tracer, request: GenerateRequest, headers: Headers, model: str, operation: str = ""
) -> Iterator[GatewayTrace | None]:
    """Make the span of a request. ``headers``: of the client's trace. ``operation``: its name; empty: it generates.
    Gives None when the request is not sampled."""
    operation = operation or ("chat" if isinstance(request.prompts, Chat) else "text_completion")
    attributes = _request_attributes(operation, request, model)
    del request  # its texts may be large, and this block lasts as long as the answer
    span = tracer.start(f"{operation} {model}", headers, kind="server", attributes=attributes)
    if span is None:
        yield None
        return
    trace, error, ending = GatewayTrace(), "the client left", {"error.type": "CANCELLED"}
    token = CURRENT.set(span.headers)
    try:
        yield trace
        error, ending = "", {}
    except Exception as raised:
        seen = of_exception(raised)
        error, ending = seen.message, {"error.type": seen.reason}
        raise
    finally:
        CURRENT.reset(token)
        outcome = {} if trace.outcome is None else _outcome_attributes(trace.outcome, model)
        span.end({**outcome, **ending}, error)


_IF_SET = ("max_tokens", "temperature", "top_p", "top_k")
_IF_NOT_ZERO = ("frequency_penalty", "presence_penalty")
_MAX_INTEGER = 2**63 - 1
"""The largest integer of an attribute; seeds may be larger."""


def _request_attributes(operation: str, request: GenerateRequest, model: str) -> Attributes:
    """Return what the client set, under the names of https://github.com/open-telemetry/semantic-conventions-genai."""
    attributes: dict[str, str | int | float] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "tokenloom",
        "gen_ai.request.model": model,
    }
    sampling = request.sampling
    for name in _IF_SET:
        if sampling.HasField(name):  # zero is a value too: a temperature of 0 is the most common one
            attributes[f"gen_ai.request.{name}"] = getattr(sampling, name)
    for name in _IF_NOT_ZERO:
        if value := getattr(sampling, name):
            attributes[f"gen_ai.request.{name}"] = value
    if sampling.HasField("seed"):
        attributes["gen_ai.request.seed"] = sampling.seed if sampling.seed <= _MAX_INTEGER else str(sampling.seed)
    if request.num_samples > 1:
        attributes["gen_ai.request.choice.count"] = request.num_samples
    return attributes


def _outcome_attributes(outcome: TracedOutcome, model: str) -> Attributes:
    usage = outcome.usage
    reasoning: dict[str, int] = {}
    if usage.HasField("reasoning_tokens"):
        reasoning["gen_ai.usage.reasoning.output_tokens"] = usage.reasoning_tokens
    return {
        "gen_ai.response.model": model,
        "gen_ai.response.id": outcome.request_id,
        "gen_ai.response.finish_reasons": [FINISH_REASONS[each.reason] for each in outcome.finished.values()],
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        **reasoning,
    }
