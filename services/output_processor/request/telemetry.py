"""What is observed of the requests of an output processor: metrics, the span of one in traces, what records hold."""

import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge

from tokenloom.request.limits import AdmissionLimit
from tokenloom.services.runtime.telemetry import fast_metrics
from tokenloom.services.runtime.telemetry.process_metrics import LATENCY_SECONDS, show_token_cost
from tokenloom.services.runtime.telemetry.tracing import Span, Tracer, pick_headers
from tokenloom.v1.coordinator_pb2 import EngineIdentity
from tokenloom.v1.output_processor_pb2 import RequestFinished, SlotTextLogprobs, Submit
from tokenloom.v1.types_pb2 import Fingerprint, FinishReason

from .kept_requests import CopiedRequests

Outcome: TypeAlias = Literal["equal", "different", "dropped", "unfit"]
"""What has become of a request that was to be computed again. ``unfit``: no other engine is sure to compute the same
tokens; ``dropped``: none had time."""


class OutputProcessorMetrics:
    """Counts requests, their tokens and where time went. Engines and gateways measure latencies and token rates."""

    def __init__(self, registry: CollectorRegistry, num_live: Callable[[], int], num_links: Callable[[], int]) -> None:
        name = "tokenloom_output_processor_"
        self._registry = registry
        live = Gauge(name + "requests_live", "Requests that have not ended.", registry=registry)
        live.set_function(num_live)
        engines = Gauge(name + "engine_streams", "Open streams to engines.", registry=registry)
        engines.set_function(num_links)
        ended = Counter(name + "requests", "Requests that ended.", ["finished_reason"], registry=registry)
        self._ended = {
            reason: ended.labels(name.removeprefix("FINISH_REASON_").lower()) for name, reason in FinishReason.items()
        }
        self._unknown = self._ended[FinishReason.FINISH_REASON_UNSPECIFIED]
        self._tokens = fast_metrics.Counter(registry, name + "tokens", "Output tokens of requests that ended.", {})
        show_token_cost(registry, lambda: self._tokens.value)
        self._retries = Counter(
            name + "retries", "Legs placed again after their engine died, drained or was full.", registry=registry
        )
        self._mixed = Counter(
            name + "mixed_numerics", "Outputs that engines of different numerics generated.", registry=registry
        )
        records = Counter(
            name + "request_records",
            "Requests that ended and were recorded, or dropped (--request-record-dir).",
            ["outcome"],
            registry=registry,
        )
        self._records = {True: records.labels("written"), False: records.labels("dropped")}
        verified = Counter(
            name + "verified_requests",
            "Requests that ended and were sampled to be computed again (--verify), by what came of it.",
            ["outcome"],
            registry=registry,
        )
        self._verified = {each: verified.labels(each) for each in get_args(Outcome)}
        self._moves = Counter(
            name + "moves", "How often outputs went on at another engine, with their KV.", registry=registry
        )
        self._placement = fast_metrics.Histogram(
            registry,
            name + "placement_seconds",
            "Seconds that a request waited for engines.",
            {},
            LATENCY_SECONDS,
        )
        self._detokenize = Counter(
            name + "detokenize_seconds", "Seconds spent on turning tokens into text.", registry=registry
        )

    def show_copies(self, copies: CopiedRequests) -> None:
        """Show the copies of requests that other output processors run, and what becomes of them."""
        held = Gauge(
            "tokenloom_output_processor_journal_copies",
            "Copies of requests that other output processors run (--journal-copies).",
            registry=self._registry,
        )
        held.set_function(lambda: copies.num_copies)
        num_bytes = Gauge(
            "tokenloom_output_processor_journal_copy_bytes", "Memory of these copies.", registry=self._registry
        )
        num_bytes.set_function(lambda: copies.num_bytes)
        ended = Counter(
            "tokenloom_output_processor_journal_copies_used",
            "Copies that outlived their gateway and were resumed or expired, and copies that were dropped for lack of "
            "room (--max-copied-bytes), by what became of them.",
            ["outcome"],
            registry=self._registry,
        )
        of_outcomes = {outcome: ended.labels(outcome) for outcome in ("resumed", "expired", "dropped")}
        copies.count = lambda outcome: of_outcomes[outcome].inc()

    def recorded(self, is_written: bool) -> None:
        """Count a request that ended where requests are recorded; from any thread."""
        self._records[is_written].inc()

    def verified(self, outcome: Outcome) -> None:
        """Count a request that was to be computed again."""
        self._verified[outcome].inc()

    def ended(self, finished: RequestFinished) -> None:
        """Count a sample that ended."""
        self._ended.get(finished.reason, self._unknown).inc()  # an engine of a newer release may know more reasons
        self._tokens.inc(finished.completion_tokens)
        self._retries.inc(max(finished.attempts - 1, 0))
        if finished.timeline.mixed_numerics:
            self._mixed.inc()
        self._moves.inc(finished.timeline.moves)
        self._placement.observe(finished.timeline.placement_ns / 1e9)
        self._detokenize.inc(finished.timeline.detokenize_ns / 1e9)


class RequestSpan:
    """Holds the output processor's span of one request. The span takes the place of the gateway's in the request's
    headers, so that placements and engines make their spans under it."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._error = ""

    @classmethod
    def open(cls, tracer: Tracer | None, submit: Submit) -> "RequestSpan | None":
        """Begin the span. Without a tracer, or for a request that is not sampled, return None and drop the headers."""
        headers = pick_headers(submit.trace_headers.items())
        submit.trace_headers.clear()
        if tracer is None or not headers:
            return None
        span = tracer.start("process", headers, attributes={"gen_ai.response.id": submit.request_id})
        if span is None:
            return None
        submit.trace_headers.update(span.headers)
        return cls(span)

    def sample_ended(self, finished: RequestFinished) -> None:
        """Add a span from the sample's first token to its last; an attribute says how long making its text took."""
        now, timeline = time.monotonic_ns(), finished.timeline
        attributes = {
            "tokenloom.sample_index": finished.sample_index,
            "tokenloom.attempts": finished.attempts,
            "tokenloom.detokenize.busy_seconds": timeline.detokenize_ns / 1e9,
        }
        self._span.child("detokenize", now - timeline.decode_ns, now, attributes)
        self._error = self._error or finished.error.message

    def end(self) -> None:
        """End the span, with the first error of the samples if there was one."""
        self._span.end(error=self._error)


class Leg(NamedTuple):
    """What one engine was given to compute of a sample.

    Attributes:
        engine: As it was registered then.
        slot: Of the attempt, on the stream to the engine.
        kind: ``whole``, ``prefill`` or ``decode``.
        start: Output tokens that there were.
        serves: What the engine serves.
        preempted_at: Output tokens at each preemption.
    """

    engine: EngineIdentity
    slot: int
    kind: str
    start: int
    serves: Fingerprint
    preempted_at: Sequence[int] = ()

    @property
    def engine_id(self) -> str:
        return self.engine.engine_id


class OutputTrail:
    """What is recorded of one sample while it runs.

    Attributes:
        legs: Where its tokens were computed, in order.
        logprobs: All log probabilities that were sent; None: there was no room for them.
    """

    def __init__(self, room: AdmissionLimit) -> None:
        """``room``: bytes for the log probabilities of all samples that run."""
        self.legs: list[Leg] = []
        self.logprobs: list[SlotTextLogprobs] | None = []
        self._room = room
        self._held = room.empty()

    def note_preemptions(self, engine_id: str, slot: int, preempted_at: Sequence[int]) -> None:
        """Note at how many output tokens an attempt was preempted."""
        if (place := self._find(engine_id, slot)) is not None:
            self.legs[place] = self.legs[place]._replace(preempted_at=tuple(preempted_at))

    def note_start(self, engine_id: str, slot: int, start: int | None) -> None:
        """Note at how many output tokens an attempt took over that waited for another one; None: it never did."""
        if (place := self._find(engine_id, slot)) is None:
            return
        if start is None:
            del self.legs[place]
        else:
            self.legs[place] = self.legs[place]._replace(start=start)

    def _find(self, engine_id: str, slot: int) -> int | None:
        # From the last one on: an earlier stream to the engine may have had the same slot.
        places = reversed(range(len(self.legs)))
        return next((i for i in places if (self.legs[i].engine_id, self.legs[i].slot) == (engine_id, slot)), None)

    def keep(self, columns: SlotTextLogprobs) -> None:
        """Keep log probabilities, or give all of the sample up if there is no room for them."""
        if self.logprobs is None:
            return
        if self._room.grow(self._held, columns.ByteSize()):
            self.logprobs.append(columns)
        else:
            self.logprobs = None
            self._held.release()

    def close(self) -> None:
        """Forget the log probabilities and give their room back, when the record is written or dropped. Idempotent."""
        self.logprobs = None
        self._held.release()
