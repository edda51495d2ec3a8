"""Measures requests, under vLLM's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Histogram

from tokenloom.services.runtime.telemetry import process_metrics
from tokenloom.services.runtime.telemetry.fast_metrics import TracedHistogram
from tokenloom.v1 import inference_pb2, output_processor_pb2, types_pb2

from ..encoding.sse import cause_name
from ..tenants.tenant import Tenant
from .usage_counts import AdapterUsage, KeyUsage, Used

MAX_LINKS = 256
"""Limits the pairs of engines that are remembered; the one that was used least recently is dropped."""


@dataclass(slots=True)
class KvLink:
    """Sums up what one engine sent to another.

    Attributes:
        num_prompts: Prompts that one engine computed and the other one continued.
        num_tokens: The tokens of these prompts.
        wait_ns: Nanoseconds for which the requests waited for the KV blocks.
    """

    num_prompts: int = 0
    num_tokens: int = 0
    wait_ns: int = 0


class KvFlow:
    """Records finished requests of this gateway.

    Attributes:
        num_prompt_tokens: Tokens of the prompts of finished requests.
        num_cached_tokens: Those that were in a prefix cache.
        links: By the engine that computed the prompts and the engine that continued them, in the order of last use.
    """

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.links: dict[tuple[str, str], KvLink] = {}

    def add(self, finished: output_processor_pb2.RequestFinished) -> None:
        """Count a prompt. Its further samples share what the first one computed, and are not counted."""
        if finished.sample_index:
            return
        self.num_prompt_tokens += finished.prompt_tokens
        self.num_cached_tokens += finished.cached_tokens
        source, target = finished.timeline.prefill_engine, finished.timeline.decode_engine
        if source and target and source != target:
            self._add_link(source, target, finished)

    def _add_link(self, source: str, target: str, finished: output_processor_pb2.RequestFinished) -> None:
        link = self.links.pop((source, target), None) or KvLink()
        self.links[source, target] = link
        if len(self.links) > MAX_LINKS:
            del self.links[next(iter(self.links))]
        link.num_prompts += 1
        link.num_tokens += finished.prompt_tokens
        link.wait_ns += finished.timeline.kv_transfer_ns


_SAMPLES = (1, 2, 5, 10, 20)
PromiseOutcome: TypeAlias = Literal["kept", "broken", "refused"]
"""What became of a request with a deadline for its first token."""
PROMISE_OUTCOMES: Final[tuple[PromiseOutcome, ...]] = ("kept", "broken", "refused")


class Sized(Protocol):
    """Describes what is read of a generation at its end."""

    num_samples: int
    prompts: list[Sequence[int]]
    completion_tokens: list[int]

    @property
    def finished(self) -> Mapping[int, object]:
        """The outputs that have ended, by index."""

    def max_tokens_of(self, index: int) -> int:
        """Return the limit of an output's tokens."""


class RequestSizes:
    """Holds the histograms. As in vLLM, a request here is one prompt; each of its samples has an output of its own."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._prompt, self._generation, self._limit, self._longest = (
            process_metrics.histogram(registry, name, text, labels, process_metrics.TOKENS)
            for name, text in (
                ("request_prompt_tokens", "Prompt tokens of each output that has ended."),
                ("request_generation_tokens", "Tokens of each output that has ended."),
                ("request_params_max_tokens", "Limit of the tokens of each output that has ended."),
                ("request_max_num_generation_tokens", "Tokens of the longest output of each prompt that has ended."),
            )
        )
        text = "Samples of each prompt that has ended."
        self._samples = process_metrics.histogram(registry, "request_params_n", text, labels, _SAMPLES)

    def observe(self, generation: Sized) -> None:
        """Observe the outputs that have ended, and the prompts whose outputs all have ended."""
        num_samples = generation.num_samples
        for index in generation.finished:
            self._prompt.observe(len(generation.prompts[index // num_samples]))
            self._generation.observe(generation.completion_tokens[index])
            self._limit.observe(generation.max_tokens_of(index))
        for first in range(0, len(generation.completion_tokens), num_samples):
            samples = range(first, first + num_samples)
            if all(index in generation.finished for index in samples):
                self._longest.observe(max(generation.completion_tokens[index] for index in samples))
                self._samples.observe(num_samples)


FINISH_REASONS = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_ABORT: "abort",
    types_pb2.FINISH_REASON_ERROR: "error",
    types_pb2.FINISH_REASON_REPETITION: "repetition",
}
"""Their names for clients and dashboards."""


class GatewayMetrics:
    """Holds the gateway's counters and histograms, and what its page shows besides."""

    def __init__(
        self, registry: CollectorRegistry, model_name: str, key_usage: KeyUsage, adapter_usage: AdapterUsage
    ) -> None:
        """``key_usage``, ``adapter_usage``: count what is generated with each key and each adapter, for all models."""
        labels = {"model_name": model_name}

        def traced(name: str, text: str, buckets: Sequence[float]) -> TracedHistogram:
            return TracedHistogram(registry, process_metrics.VLLM + name, text, labels, buckets)

        self.prompt_tokens = process_metrics.fast_counter(
            registry, "prompt_tokens", "Prompt tokens of accepted requests.", labels
        )
        self.generation_tokens = process_metrics.fast_counter(
            registry, "generation_tokens", "Output tokens sent to clients.", labels
        )
        self.time_to_first_token = traced(
            "time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            process_metrics.LATENCY_SECONDS,
        )
        self.inter_token_latency = process_metrics.histogram(
            registry, "inter_token_latency_seconds", "Time between two outputs of one prompt.", labels
        )
        self.e2e_latency = traced(
            "e2e_request_latency_seconds",
            "Time from a request's arrival to the end of one prompt's output.",
            process_metrics.REQUEST_SECONDS,
        )
        success = process_metrics.counter(
            registry, "request_success", "Prompts whose output has ended.", ["model_name", "finished_reason"]
        )
        self.kv_flow = KvFlow()
        self.success = {reason: success.labels(model_name, name) for reason, name in FINISH_REASONS.items()}
        self._model_name = model_name
        self._pooled_prompts = Counter(
            "tokenloom_gateway_pooled_prompts",
            "Prompts from which a vector, classes or a score were computed.",
            ["model_name", "task"],
            registry=registry,
        )
        self._pooling_seconds = Histogram(
            "tokenloom_gateway_pooling_seconds",
            "Time from the arrival of a pooling call to its last result.",
            ["model_name", "task"],
            buckets=process_metrics.REQUEST_SECONDS,
            registry=registry,
        )
        self.sound_seconds = Counter(
            "tokenloom_gateway_sound_seconds",
            "Seconds of the sounds that were transcribed or translated.",
            ["model_name"],
            registry=registry,
        ).labels(model_name)
        self.missed_tokens: dict[str, int] = {}  # by cause, for the page
        self._misses, self._missed_tokens = (
            Counter(f"tokenloom_gateway_cache_{name}", text, ["model_name", "cause"], registry=registry)
            for name, text in (
                ("misses", "Turns of conversations that did not find what an earlier turn had left in the cache."),
                ("missed_tokens", "Prompt tokens of these turns that the earlier turn would have spared."),
            )
        )
        promises = Counter(
            "tokenloom_gateway_promises",
            "Requests with a deadline for their first token (ttft_deadline): refused, or admitted and kept or broken.",
            ["model_name", "outcome"],
            registry=registry,
        )
        self._promises = {outcome: promises.labels(model_name, outcome) for outcome in PROMISE_OUTCOMES}
        self._sizes = RequestSizes(registry, labels)
        self._key_usage = key_usage
        self._adapter_usage = adapter_usage

    def count_promise(self, outcome: PromiseOutcome) -> None:
        """Count a request that had a deadline for its first token."""
        self._promises[outcome].inc()

    def observe_miss(self, miss: inference_pb2.CacheMiss) -> None:
        """Observe what a turn of a conversation missed in the cache; without a cause it missed nothing."""
        if miss.cause:
            cause = cause_name(miss.cause)
            self.missed_tokens[cause] = self.missed_tokens.get(cause, 0) + miss.missed_tokens
            self._misses.labels(self._model_name, cause).inc()
            self._missed_tokens.labels(self._model_name, cause).inc(miss.missed_tokens)

    def observe_pooled(
        self, task: str, usage: inference_pb2.Usage, tenant: Tenant, num_prompts: int, seconds: float
    ) -> None:
        """Observe a pooling call that has ended. ``num_prompts``: those that have a result; ``seconds``: it took."""
        self.prompt_tokens.inc(usage.prompt_tokens)
        self._pooled_prompts.labels(self._model_name, task).inc(num_prompts)
        self._pooling_seconds.labels(self._model_name, task).observe(seconds)
        used = Used(1, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
        self._key_usage.add(tenant, used)

    def observe_end(self, generation: "EndedGeneration", tenant: Tenant, used: Used) -> None:
        """Observe a call that has ended, whatever ended it. ``used``: what no other call of its request has counted."""
        self._sizes.observe(generation)
        self._key_usage.add(tenant, used)
        if generation.model != self._model_name:
            self._adapter_usage.add(generation.model, used)


class EndedGeneration(Sized, Protocol):
    """Describes what is read of a generation at its end."""

    @property
    def model(self) -> str:
        """The name of the model or adapter."""


def count_taken(registry: CollectorRegistry) -> Counter:
    """Return the counter of the responses whose connections this gateway has taken from killed ones, by state."""
    return Counter(
        "tokenloom_gateway_taken_responses",
        "HTTP responses of killed gateways that this one has taken over with their connections, by how much was "
        "written: nothing (not_begun), a part (begun) or all but what the kernel lacks (complete); or it could not be "
        "continued (refused), or no request was in work (idle).",
        ["state"],
        registry=registry,
    )


def count_moved(registry: CollectorRegistry) -> Counter:
    """Add the counter of requests that were sent again."""
    return Counter(
        "tokenloom_gateway_requests_moved",
        "Requests that were sent again because their output processor was lost, full or leaving.",
        registry=registry,
    )
