"""Describes one attempt at a request, as the engine's front sees it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from tokenloom.engine_core.data.core_pooling_params import PoolingTask
from tokenloom.engine_core.data.messages import EngineCoreRequest, FinishReason, PrefillStats
from tokenloom.request.routed_rows import RoutedRows
from tokenloom.services.runtime.telemetry.tracing import Headers


@dataclass(slots=True)
class TokenCounts:
    """Counts the tokens of an attempt."""

    prompt: int
    accepted: int
    """Output tokens that earlier attempts or the prefill leg produced."""
    output: int
    """Output tokens so far, accepted ones included."""


@dataclass(slots=True)
class AttemptTimes:
    """Records when an attempt arrived and produced tokens: monotonic seconds, 0.0 for what has not happened yet."""

    arrival: float
    first_token: float = 0.0
    last_token: float = 0.0
    prefill: PrefillStats | None = None


@dataclass(slots=True)
class AttemptKV:
    """Holds the state of an attempt whose KV is passed between engines.

    Attributes:
        lease_id: Prefill leg: names the lease that will hold the KV. Empty for other attempts.
        awaits_tokens: Decode leg: the tokens of the prefill leg have not arrived yet.
        wait_ns: Decode leg: time spent waiting for KV of another engine.
        on_end: Called once, when the attempt has ended.
    """

    lease_id: bytes
    awaits_tokens: bool
    wait_ns: int = 0
    on_end: Callable[[], None] | None = None


@dataclass(slots=True, eq=False)
class Attempt:
    """Describes one attempt at a request.

    Attributes:
        slot: Names the attempt on its stream.
        key: Names the attempt in the core.
        request_id: The request's id in the mesh; only logs use it.
        trace_headers: Headers of the trace that the attempt belongs to; None without one.
        request: The request for the core, until the core has it.
        deadline: The timer that ends the attempt when its time has run out.
        routed: The experts of the tokens that were computed so far; None until some arrive.
        pooling_task: What a pooling request asks for; None for one that generates.
        saw_nans: Whether a token was drawn from logits that contained NaN.
        finish_reason: None while the attempt is live.
    """

    slot: int
    key: str
    request_id: str
    trace_headers: Headers | None
    request: EngineCoreRequest | None
    tokens: TokenCounts
    times: AttemptTimes
    kv: AttemptKV
    deadline: asyncio.TimerHandle | None = None
    routed: RoutedRows | None = None
    pooling_task: PoolingTask | None = None
    saw_nans: bool = False
    finish_reason: FinishReason | None = None

    def ended(self) -> None:
        """Cancel the deadline and call ``on_end``, when the attempt has ended."""
        if self.deadline is not None:
            self.deadline.cancel()
        if self.kv.on_end is not None:
            self.kv.on_end()
