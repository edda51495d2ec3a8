"""Which faults a request must survive, and in which errors the others may end it."""

from collections.abc import Sequence

from tokenloom.request.errors import Code, EngineKiller, Internal, RequestLost, ResourceExhausted, TokenloomError
from tokenloom.services.tokenizer.renderer import MAX_DEATHS

from .load import Answer
from .plan import Fault, Plan
from .tokenizers import NUM_HELPERS

ENDS_REQUESTS = {("crash", "gateway")}
"""Kinds of faults, and the services that they may happen to, that end the requests of the part. Every other fault must
have no effect on any answer."""
PATIENT_SECONDS = 15.0
"""A request with at least so much time is judged: others may end because their time has run out."""
_ENGINE_DEATHS = ("crash", "core_crash", "hang", "lie")
"""Kinds of faults that an engine's core does not survive."""
_HELPER_DEATHS = {"helper_crash": 2, "helper_stop": NUM_HELPERS, "no_helper": 1}
"""How many processes that one conversation is rendered in can end by a fault."""
_WRONG = {
    "Output processors sent again and again": "output_processor",
    "Tokenizers gave again and again": "tokenizer",
    "The engines sent again and again": "engine",
}
"""How errors begin that say that only processes of a service were left that lie."""
_RETRYABLE = (Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED, Code.DEADLINE_EXCEEDED)


def must_complete(plan: Plan, happened: Sequence[Fault], answer: Answer) -> bool:
    """Return whether nothing that happened may have ended this request."""
    if answer.ask.timeout < PATIENT_SECONDS or answer.was_cancelled or not plan.spares or not answer.gateways:
        return False
    if isinstance(answer.error, ResourceExhausted) and not any(answer.tokens):
        return False  # refused at its arrival, because few blocks make a long queue
    if isinstance(answer.error, EngineKiller | Internal) and is_allowed(answer.error, happened, answer):
        return False  # both engines happened to run no other request, or the tokenizer's processes to render no other
    if plan.num_gateways == 1 and any(_has_gateway(fault) for fault in happened):
        return False  # no other gateway takes what the only one refuses
    if plan.copies_journals and answer.ask.resumes:
        return True  # a second output processor has what the client needs
    if answer.was_cut and any(_loses_requests(fault) for fault in happened):
        return False  # what its output processor had may be gone when it is sought
    return not any(_ends_requests(fault) and fault.target in answer.gateways for fault in happened)


def is_allowed(error: TokenloomError, happened: Sequence[Fault], answer: Answer) -> bool:
    """Return whether a client may get this error of a fault: it says that another try may succeed. An answer whose
    gateway and output processor were both lost is lost, and so is one whose deadline passed while its client was away,
    or whose gateway died while a cut link, or a frozen host, kept it from its output processor; a request may be
    blamed for two deaths of engines, and for three of the processes that render it; it ends where only a process that
    lies was left to run it."""
    if isinstance(error, EngineKiller):
        return sum(fault.kind in _ENGINE_DEATHS and _concerns(fault, "engine") for fault in happened) > 1
    if isinstance(error, RequestLost):
        if answer.was_cut and answer.seconds >= answer.ask.timeout:
            return True
        was_only_there = any(map(_ends_requests, happened)) and any(map(_keeps_from_output_processor, happened))
        return len(answer.gateways) > 1 and (was_only_there or any(map(_loses_requests, happened)))
    if isinstance(error, Internal):
        for begin, service in _WRONG.items():
            if error.message.startswith(begin):
                return _leaves_liars_alone(service, happened)
        deaths = sum(_HELPER_DEATHS.get(fault.kind, 0) for fault in happened)
        return "while they rendered" in error.message and deaths >= MAX_DEATHS
    return error.code in _RETRYABLE


def _concerns(fault: Fault, service: str) -> bool:
    return fault.target.startswith(service) or fault.other.startswith(service)


def _loses_requests(fault: Fault) -> bool:
    """Return whether a fault makes output processors forget requests: one that is only cut off, slow or stopped still
    has them, and a client that resumes waits for it."""
    return fault.kind in ("crash", "drain", "lie") and _concerns(fault, "output_processor")


def _leaves_liars_alone(service: str, happened: Sequence[Fault]) -> bool:
    """Return whether a process of a service lied, and another fault may have taken what did its work."""
    of_service = [fault for fault in happened if _concerns(fault, service)]
    return len(of_service) > 1 and any(fault.kind == "lie" for fault in of_service)


def _keeps_from_output_processor(fault: Fault) -> bool:
    """Return whether requests that a gateway has sent may not have been read."""
    is_cut = fault.kind in ("cut", "one_way_cut") and _concerns(fault, "gateway")
    return (is_cut or fault.kind == "freeze") and _concerns(fault, "output_processor")


def _ends_requests(fault: Fault) -> bool:
    return (fault.kind, fault.target.rpartition("-")[0]) in ENDS_REQUESTS


def _has_gateway(fault: Fault) -> bool:
    return fault.kind in ("crash", "drain") and fault.target.startswith("gateway")
