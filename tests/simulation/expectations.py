"""Which faults a request must survive. What is not listed may end a request in an error that says to retry."""

from collections.abc import Sequence

import grpc

from tokenloom.request.errors import TokenloomError

from .load import Answer
from .plan import Fault, Plan

SURVIVED = {
    ("crash", "coordinator"),
    ("drain", "coordinator"),
    ("freeze", "coordinator"),
    ("slow", "coordinator"),
    ("crash", "output_processor"),
    ("drain", "output_processor"),
    ("freeze", "output_processor"),
    ("slow", "output_processor"),
    ("cut", "gateway-output_processor"),
    ("one_way_cut", "gateway-output_processor"),
    ("reset", "gateway-output_processor"),
    ("cut", "coordinator-output_processor"),
    ("one_way_cut", "coordinator-output_processor"),
    ("reset", "coordinator-output_processor"),
    ("cut", "coordinator-gateway"),
    ("one_way_cut", "coordinator-gateway"),
    ("reset", "coordinator-gateway"),
    ("cut", "coordinator-engine"),
    ("one_way_cut", "coordinator-engine"),
    ("reset", "coordinator-engine"),
    ("cut", "engine-engine"),
    ("one_way_cut", "engine-engine"),
    ("reset", "engine-engine"),
    ("slow", "engine"),
}
"""Kinds of faults, and the services that they may happen to without an effect on any answer."""
PATIENT_SECONDS = 15.0
"""A request with at least so much time is judged: others may end because their time has run out."""
_RETRYABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED)


def must_complete(plan: Plan, happened: Sequence[Fault], answer: Answer) -> bool:
    """Return whether nothing that happened may have ended this request."""
    if answer.ask.timeout < PATIENT_SECONDS or answer.was_cancelled or not plan.spares:
        return False
    return all((fault.kind, service) in SURVIVED for fault in happened for service in _services(fault))


def is_allowed(error: TokenloomError) -> bool:
    """Return whether a client may get this error of a fault: it says that another try may succeed."""
    return error.code in _RETRYABLE


def _services(fault: Fault) -> list[str]:
    """Return the services that a fault concerns; both ends of a link as one."""
    names = sorted(name.rpartition("-")[0] for name in (fault.target, fault.other) if name)
    return ["-".join(names)]
