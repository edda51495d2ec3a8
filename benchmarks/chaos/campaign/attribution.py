"""Finds the fault that a request met, and the requests that no mesh could have saved."""

from collections.abc import Sequence

from ..clients.record import Record
from ..faults.fault import Action, Injection

_AFTER = 1.0
"""Seconds after the end of a request in which a fault may be the cause of its failure: clients notice some later than
the table of processes does."""

_EXPIRED = ("DeadlineExceeded", "Unavailable")
"""Errors of requests that no engine could complete in time."""
_EARLY, _LATE = 1.0, 0.5
"""Seconds before and after its deadline within which such a request must have ended."""


def met(record: Record, injections: Sequence[Injection]) -> Injection | None:
    """Return the last fault that began, or was not over, during the request; None: it met none.

    A fault is over when it was taken back and its part serves again.
    """
    found = [each for each in injections if met_by(record, each)]
    return max(found, key=lambda each: each.began, default=None)


def is_excused(record: Record, injections: Sequence[Injection]) -> bool:
    """Return whether the request's own gateway met a fault and its client cannot resume: its connection is lost with
    the gateway, and it waits as long as the gateway does. A gateway that is asked to stop is no excuse."""
    name = f"gateway-{record.gateway}"
    return not record.resumes and any(
        each.part == name
        and each.fault.action is not Action.TERM
        and each.began - _AFTER < record.ended
        and record.sent < each.ended + _AFTER
        for each in injections
    )


def outlived_gateway(record: Record, injections: Sequence[Injection]) -> bool:
    """Return whether a client that knows one gateway only has its whole answer although that one was killed while it
    made it."""
    name = f"gateway-{record.gateway}"
    return (
        record.failure is None
        and not record.moves
        and any(
            each.part == name and each.fault.action is Action.KILL and record.sent < each.began < record.ended
            for each in injections
        )
    )


def is_failed(record: Record, injections: Sequence[Injection]) -> bool:
    """Return whether a mesh that keeps its promise would have completed the request."""
    if record.failure is None or is_expired(record, injections):
        return False
    return bool(record.refused) or not is_excused(record, injections)


def is_pause_excused(record: Record, injections: Sequence[Injection]) -> bool:
    """Return whether the request waited for its own gateway: the client calls no other, and the gateway met a fault
    that lasts, or one that the client does not survive."""
    name = f"gateway-{record.gateway}"
    return not record.moves and any(
        each.part == name and met_by(record, each) and (each.fault.seconds > 0 or not record.resumes)
        for each in injections
    )


def met_by(record: Record, injection: Injection) -> bool:
    """Return whether the fault began, or was not over, during the request."""
    return injection.began < record.ended and _over(injection) > record.sent


def is_expired(record: Record, injections: Sequence[Injection]) -> bool:
    """Return whether the request ended, with a typed error and at its deadline, because no engine returned early enough
    to complete it."""
    deadline = record.sent + record.seconds
    needed = record.reference.latency + _AFTER
    return (
        record.failure in _EXPIRED
        and -_EARLY < record.ended - deadline <= _LATE
        and any(
            each.part == "all engines" and met_by(record, each) and deadline < _over(each) + needed
            for each in injections
        )
    )


def _over(injection: Injection) -> float:
    return max(injection.ended, injection.began + (injection.served_again or 0.0))
