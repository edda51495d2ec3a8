"""One attempt at a request, as the engine's front knows it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from tokenloom.engine_core.wire.messages import EngineCoreRequest, FinishReason, PrefillStats
from tokenloom.services.runtime.telemetry.tracing import Headers


@dataclass(slots=True)
class TokenCounts:
    """Tokens of an attempt."""

    prompt: int
    accepted: int
    """Of earlier attempts, or of the prefill leg."""
    output: int
    """So far, accepted ones included."""


@dataclass(slots=True)
class AttemptTimes:
    """When it came, and when it produced tokens: monotonic seconds, 0.0 for what did not happen yet."""

    arrival: float
    first_token: float = 0.0
    last_token: float = 0.0
    prefill: PrefillStats | None = None


@dataclass(slots=True)
class AttemptKV:
    """What KV of another engine, or held for another, means to an attempt.

    Attributes:
        lease_id: Prefill leg: under which its KV will be held; else empty.
        awaits_tokens: Decode leg: tokens of the prefill leg are still to come.
        wait_ns: Decode leg: time spent waiting for KV of another engine.
        on_end: Called once, when the attempt has ended.
    """

    lease_id: bytes
    awaits_tokens: bool
    wait_ns: int = 0
    on_end: Callable[[], None] | None = None


@dataclass(slots=True, eq=False)
class Attempt:
    """One live attempt at a request.

    Attributes:
        slot: Its name on the stream.
        key: Its name in the core.
        request_id: The mesh's, for logs only.
        trace_headers: Of the trace that it is a part of, if of any.
        request: What the core is to get, until it has it.
        deadline: Ends it when its time runs out.
        saw_nans: A token of it was drawn from logits that were not all numbers.
        finish_reason: None while it is live.
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
    saw_nans: bool = False
    finish_reason: FinishReason | None = None

    def ended(self) -> None:
        """Nobody waits for it any more."""
        if self.deadline is not None:
            self.deadline.cancel()
        if self.kv.on_end is not None:
            self.kv.on_end()
