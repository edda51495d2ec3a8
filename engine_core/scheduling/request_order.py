"""The order in which requests run: by arrival, by priority, or by the rank that a plugin gives each."""

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tokenloom.process.fall_backs import OF_PROCESS
from tokenloom.process.plugins import load

from ..data.request import Request

_RANKS = range(-(2**63), 2**63)


class SchedulingPolicy(enum.StrEnum):
    """Names the order in which requests run (names as in vLLM)."""

    FCFS = "fcfs"
    """First come, first served; preempted requests before all others."""
    PRIORITY = "priority"
    """The lowest ``priority`` first; among equals first come, first served."""


class QueuedRequest(NamedTuple):
    """What a plugin of the kind ``schedulers`` knows of a request.

    Attributes:
        tenant: Whose request it is.
        priority: The request's own value; 0 unless the client set one.
        num_prompt_tokens: Tokens of the prompt.
        num_output_tokens: Tokens of the output that another engine has generated before.
        max_output_tokens: Most tokens of the output.
        arrival_ns: When it arrived, in nanoseconds of a clock that only grows.
        deadline_ns: When it may not begin any more, on that clock; 0: never.
        is_pooled: Whether it only pools its prompt.
        has_adapter: Whether it uses a LoRA adapter.
    """

    tenant: str
    priority: int
    num_prompt_tokens: int
    num_output_tokens: int
    max_output_tokens: int
    arrival_ns: int
    deadline_ns: int
    is_pooled: bool
    has_adapter: bool


Rank = Callable[[QueuedRequest], int]
"""What a plugin of the kind ``schedulers`` is. The request of the lowest rank begins first and is preempted last; among
equals the earliest. Each request is ranked once, when it is queued."""


class RequestOrder:
    """Says which of two requests is the more urgent one.

    Attributes:
        policy: What the engine's options name.
        by_priority: Whether ``Request.priority`` orders requests, instead of their arrival.
        has_rank: Whether a plugin ranks requests. Otherwise only one with a priority needs :meth:`place`.
    """

    def __init__(self, policy: str, rank: Rank | None = None) -> None:
        """``rank``: that of a plugin; None: the policy is built in."""
        self.policy = policy
        self.by_priority = policy != SchedulingPolicy.FCFS
        self.has_rank = rank is not None
        self._rank = rank

    def place(self, request: Request) -> str:
        """Give a request that is about to be queued its place in the order. Returns why it has none; empty: it has."""
        if self._rank is None:
            if request.priority and not self.by_priority:
                return f"priority is {request.priority}, but the engine's scheduling policy is {self.policy}"
            return ""
        try:
            rank = self._rank(_record(request))
            if type(rank) is not int or rank not in _RANKS:
                raise ValueError(f"it returned {rank!r:.80}, not an integer of 64 bits")
            # In the place of the request's own value, so that a step costs what it costs by priority.
            request.priority = rank
        except Exception as error:  # whatever the code of others does: the client's own value decides then
            OF_PROCESS.add("failed_plugin", f"{self.policy}: {type(error).__name__}: {error!s:.200}")
        return ""


def make_order(policy: str, plugins: Sequence[str] = ()) -> RequestOrder:
    """Return the order that a policy names; ``PACKAGE:NAME`` is a plugin of one of the packages ``plugins``.

    Raises ``ValueError`` for a policy that is unknown, and for a plugin that cannot be loaded.
    """
    if ":" in policy:
        return RequestOrder(policy, load("schedulers", policy, plugins))
    if policy not in list(SchedulingPolicy):
        raise ValueError(f"policy {policy!r} is unknown; use one of {', '.join(SchedulingPolicy)}, or a plugin")
    return RequestOrder(policy)


def _record(request: Request) -> QueuedRequest:
    return QueuedRequest(
        request.tenant,
        request.priority,
        request.num_prompt_tokens,
        request.num_output_tokens,
        request.max_num_tokens - request.num_prompt_tokens,
        request.times.arrival_ns,
        request.times.deadline_ns,
        request.pooling_params is not None,
        bool(request.adapter),
    )
