"""Describes one attempt at a request, as the engine's front sees it; records its spans and logs its events."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tokenloom.engine_core.data.core_params import PoolingTask
from tokenloom.engine_core.data.embedding_rows import RowsKey
from tokenloom.engine_core.data.messages import (
    EngineCoreEvent,
    EngineCoreRequest,
    FinishReason,
    PrefillStats,
    StepSpan,
)
from tokenloom.request.routed_rows import RoutedRows
from tokenloom.services.runtime.telemetry.logs import RequestLog
from tokenloom.services.runtime.telemetry.tracing import Headers, Span, Tracer
from tokenloom.v1 import types_pb2

if TYPE_CHECKING:
    from tokenloom.process.cpu_bill import CpuAccount

log = logging.getLogger(__name__)

ATTEMPT_TOKENS: Final = 20
"""So many tokens cost the front as much as the begin and the end of an attempt: 0.2 ms, and 8 µs for each token."""


@dataclass(slots=True)
class TokenCounts:
    """Counts the tokens of an attempt."""

    prompt: int
    accepted: int
    """Output tokens that earlier attempts or the prefill leg produced."""
    output: int
    """Output tokens so far, accepted ones included."""

    @property
    def num_given(self) -> int:
        """Tokens that the attempt began with."""
        return self.prompt + self.accepted


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
        lease_id: Prefill leg, and an attempt that moves: names the lease that will hold the KV. Empty for others.
        awaits_tokens: Decode leg: the tokens of the prefill leg have not arrived yet.
        wait_ns: Decode leg: time spent waiting for KV of another engine.
        on_end: Called once, when the attempt has ended.
        target: Where an attempt that moves is to go on, empty for any engine; None: it does not move.
        on_settled: Called when it has ended or stays.
    """

    lease_id: bytes
    awaits_tokens: bool
    wait_ns: int = 0
    on_end: Callable[[], None] | None = None
    target: str | None = None
    on_settled: Callable[[], None] | None = None

    def move(self, lease_id: bytes, target: str) -> None:
        """Note that the attempt is about to move."""
        self.lease_id, self.target = lease_id, target

    def stay(self) -> None:
        """Note that the attempt does not move any more."""
        self.lease_id, self.target = b"", None
        if self.on_settled is not None:
            self.on_settled()


@dataclass(slots=True)
class AttemptMedia:
    """Holds the images and sounds of an attempt, for the encoders that compute their rows.

    Attributes:
        items: By what they are named in the core.
        tenant: Whose turn the computation takes.
        cache_salt: That of the prompt.
        on_end: Called once, when the attempt has ended.
    """

    items: Mapping[RowsKey, types_pb2.MediaItem]
    tenant: str
    cache_salt: bytes
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
        saw_nans: Whether a token was sampled from logits that contained NaN.
        finish_reason: None while the attempt is live.
        media: Its images and sounds; None if it has none.
        steps: Steps that computed it, if it is traced and has ended.
        account: Bills what it costs this process; None without ``--bill``.
        core_cpu_ns: What it has cost the core's processes so far, if that is billed.
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
    media: AttemptMedia | None = None
    steps: Sequence[StepSpan] = ()
    account: "CpuAccount | None" = None
    core_cpu_ns: int = 0

    def work(self) -> int:
        """Return what the front has done for it, in tokens that it passed on."""
        return ATTEMPT_TOKENS + self.tokens.output - self.tokens.accepted

    def settle(self) -> int:
        """Return the CPU time that it took of all processes of the engine, in nanoseconds. It is charged for nothing
        that follows."""
        assert self.account is not None, "it is billed"
        return self.account.close() + self.core_cpu_ns

    def ended(self) -> None:
        """Cancel the deadline and call ``on_end``, when the attempt has ended."""
        if self.account is not None:
            self.account.close()
        if self.deadline is not None:
            self.deadline.cancel()
        if self.kv.on_end is not None:
            self.kv.on_end()
        if self.kv.on_settled is not None:
            self.kv.on_settled()
        if self.media is not None and self.media.on_end is not None:
            self.media.on_end()


def log_events(attempt: Attempt, events: Iterable[EngineCoreEvent]) -> None:
    """Log one line per event, in milliseconds since the attempt arrived: front and core read the same clock."""
    arrival_ms = attempt.times.arrival * 1e3
    for event in events:
        request_log = RequestLog(log, attempt.request_id, attempt.trace_headers)
        request_log.info("%s after %.1f ms", event.type.name.lower(), event.timestamp_ns / 1e6 - arrival_ms)


def trace_attempt(tracer: Tracer, attempt: Attempt, headers: Headers, ended: float) -> None:
    """Record the spans of an attempt that has ended, from the times that the core measured.

    ``headers``: of the output processor's span. ``ended``: monotonic seconds.
    """
    times, tokens = attempt.times, attempt.tokens
    arrival, first = round(times.arrival * 1e9), round(times.first_token * 1e9)
    assert attempt.finish_reason is not None
    attributes: dict[str, str | int] = {
        "gen_ai.response.id": attempt.request_id,
        "gen_ai.usage.input_tokens": tokens.prompt,
        "gen_ai.usage.output_tokens": tokens.output - tokens.accepted,
        "tokenloom.finish_reason": attempt.finish_reason.name.lower(),
        "tokenloom.leg": "prefill" if attempt.kv.lease_id else "decode" if attempt.kv.wait_ns else "whole",
    }
    # Made at the end, from times that the core reports: it and its workers load no OpenTelemetry, and have no thread
    # that sends. A request that dies with its engine leaves no span of that engine.
    span = tracer.start("engine", headers, started_ns=arrival, attributes=attributes)
    if span is None:
        return
    if attempt.kv.wait_ns:
        span.child("kv_transfer", arrival, arrival + attempt.kv.wait_ns)
    if (stats := times.prefill) is not None and first:
        # Computed backwards from the first token: each phase ends where the next one begins.
        scheduled = first - stats.prefill_ns
        span.child("queue", scheduled - stats.queued_ns, scheduled)
        span.child("prefill", scheduled, first, {"gen_ai.usage.cache_read.input_tokens": stats.num_cached_tokens})
    if first and times.last_token > times.first_token:
        span.child("decode", first, round(times.last_token * 1e9))
    for step in attempt.steps:
        _add_step(span, step)
    failed = attempt.finish_reason is FinishReason.ERROR
    span.end(error="the attempt failed" if failed else "", ended_ns=round(ended * 1e9))


def _add_step(span: Span, step: StepSpan) -> None:
    """Add the span of one step, with planning and the worker's forward pass as parts. All steps of a short request are
    there; of a long one, samples of them."""
    attributes: dict[str, int | float] = {
        "tokenloom.step.tokens": step.num_tokens,
        "tokenloom.batch.requests": step.batch_requests,
        "tokenloom.batch.tokens": step.batch_tokens,
    }
    if step.sample_ns:
        attributes["tokenloom.step.sample_seconds"] = step.sample_ns / 1e9
    planned = step.began_ns - step.schedule_ns
    place = span.child("prefill chunk" if step.is_prefill else "decode step", planned, step.ended_ns, attributes)
    span.child("schedule", planned, step.began_ns, below=place)
    if step.forward_ns:
        span.child("forward", step.began_ns, step.began_ns + step.forward_ns, below=place)
