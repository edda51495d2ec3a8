"""Defines the engine's metrics, with vLLM's names and the labels ``model_name`` and ``engine``.

Metrics of KV that moves between engines are named ``tokenloom_…`` because vLLM has none.
"""

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tokenloom.engine_core.data.config import SpeculativeConfig
from tokenloom.engine_core.data.draft_counts import SpecDecodingStats
from tokenloom.engine_core.data.handshake import CoreReady
from tokenloom.engine_core.data.kv_messages import KV_FAILURES
from tokenloom.engine_core.data.lora import LoraState
from tokenloom.engine_core.data.messages import (
    PREEMPTED_OUTCOMES,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    LogitsStats,
    PrefillStats,
    SchedulerStats,
)
from tokenloom.services.runtime.telemetry import process_metrics
from tokenloom.services.runtime.telemetry.fast_metrics import Counter as FastCounter
from tokenloom.services.runtime.telemetry.fast_metrics import Histogram, HistogramAlias
from tokenloom.services.runtime.telemetry.process_metrics import VLLM

from .attempt import Attempt
from .expert_metrics import ExpertMetrics

_TEXTS = {
    "num_drafts": "Times that a request had drafts in a step.",
    "num_draft_tokens": "Draft tokens that steps verified.",
    "num_accepted_tokens": "Draft tokens that equalled the tokens drawn at their positions.",
}
"""Fields of ``SpecDecodingStats`` that are metrics of the same name, with their texts."""
_PER_POSITION = "num_accepted_tokens_per_pos"


class SpeculationMetrics:
    """Reads the core's counters when metrics are scraped, so steps pay nothing for them."""

    def __init__(
        self,
        registry: CollectorRegistry,
        labels: Mapping[str, str],
        num_speculative_tokens: int,
        read: Callable[[], SpecDecodingStats | None],
    ) -> None:
        """``labels``: the fixed labels. ``read`` returns the counters; None before the first step."""
        self._labels = dict(labels)
        self._none = SpecDecodingStats(num_accepted_tokens_per_pos=[0] * num_speculative_tokens)
        self._read = read
        registry.register(self)

    def describe(self) -> Iterable[CounterMetricFamily]:
        """Return the names, so that the registry refuses a second metric with one of them."""
        names = list(self._labels)
        families = [CounterMetricFamily(f"{VLLM}spec_decode_{key}", text, labels=names) for key, text in _TEXTS.items()]
        text = "Draft tokens that equalled those drawn, by their position after the last known token, from 0."
        return [*families, CounterMetricFamily(f"{VLLM}spec_decode_{_PER_POSITION}", text, labels=[*names, "position"])]

    def collect(self) -> Iterable[CounterMetricFamily]:
        """Return the values now."""
        stats, values = self._read() or self._none, list(self._labels.values())
        *families, per_position = self.describe()
        for family, key in zip(families, _TEXTS, strict=True):
            family.add_metric(values, getattr(stats, key))
        for position, count in enumerate(stats.num_accepted_tokens_per_pos):
            per_position.add_metric([*values, str(position)], count)
        return [*families, per_position]


_RUNNING, _WAITING = "tokenloom_lora_requests_running", "tokenloom_lora_requests_waiting"


class LoraMetrics:
    """Reads the adapters when metrics are scraped, so steps pay nothing for them. Only loaded adapters have labels, so
    their number is bounded."""

    def __init__(
        self,
        registry: CollectorRegistry,
        labels: Mapping[str, str],
        max_loras: int,
        read: Callable[[], Sequence[LoraState]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``labels``: the fixed labels. ``read`` returns the adapters that are loaded. ``clock``: Unix time."""
        self._labels = dict(labels)
        self._max_loras = max_loras
        self._read = read
        self._clock = clock
        registry.register(self)

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return the names, so that the registry refuses a second metric with one of them."""
        text = "Unix time of this page, labelled with the LoRA adapters that have requests."
        info = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        names = list(self._labels)
        return [
            GaugeMetricFamily(f"{VLLM}lora_requests_info", text, labels=[*names, *info]),
            GaugeMetricFamily(_RUNNING, "Requests with a LoRA adapter that are running.", labels=[*names, "adapter"]),
            GaugeMetricFamily(_WAITING, "Requests with a LoRA adapter that wait to run.", labels=[*names, "adapter"]),
        ]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        """Return the values now."""
        adapters, values = self._read(), list(self._labels.values())
        info, running, waiting = self.describe()
        waiting_names = ",".join(each.name for each in adapters if each.num_waiting)
        running_names = ",".join(each.name for each in adapters if each.num_running)
        info.add_metric([*values, str(self._max_loras), waiting_names, running_names], self._clock())
        for each in adapters:
            running.add_metric([*values, each.name], each.num_running)
            waiting.add_metric([*values, each.name], each.num_waiting)
        return [info, running, waiting]


PREFIX = "tokenloom_"
MoveReason: TypeAlias = Literal["operator", "drain", "role", "rebalance", "preemption"]
"""Why a running request goes on at another engine."""


class KVMetrics:
    """Observes the KV that this engine reads from other engines and holds for them."""

    def __init__(self, registry: CollectorRegistry, model: str, engine: str) -> None:
        labels = ("model_name", "engine")
        self._labels = (model, engine)
        self._seen = SchedulerStats()
        FastCounter(
            registry,
            f"{PREFIX}kv_transfer_blocks",
            "Valid KV blocks read from other engines.",
            dict(zip(labels, self._labels, strict=True)),
            lambda: self._seen.kv_blocks_received,
        )
        self._bytes = Counter(
            f"{PREFIX}kv_transfer_bytes",
            "Bytes of valid KV blocks read from other engines, by transport.",
            (*labels, "transport"),
            registry=registry,
        )
        self._recomputes = Counter(
            f"{PREFIX}kv_recompute",
            "Requests whose KV on another engine was not used, by reason.",
            (*labels, "reason"),
            registry=registry,
        )
        self._moves = Counter(
            f"{PREFIX}kv_moves",
            "Running requests that left for another engine, with their KV, by why they were to.",
            (*labels, "reason"),
            registry=registry,
        )
        self._preempted = Counter(
            f"{PREFIX}preempted_states",
            "Preempted requests of a model that keeps states which began again: from states kept in memory, loaded "
            "from the offload file, or computed again.",
            (*labels, "outcome"),
            registry=registry,
        )
        leases = Gauge(f"{PREFIX}kv_leases", "Leases on KV blocks held for other engines.", labels, registry=registry)
        leases.labels(*self._labels).set_function(lambda: self._seen.num_leases)
        for reason in KV_FAILURES:  # a rate needs a first value
            self._recomputes.labels(*self._labels, reason)
        for why in get_args(MoveReason):
            self._moves.labels(*self._labels, why)
        for outcome in PREEMPTED_OUTCOMES:
            self._preempted.labels(*self._labels, outcome)

    def start_transports(self, names: Iterable[str]) -> None:
        """Show zero bytes for each transport that may be used: a rate needs a first value."""
        for name in names:
            self._bytes.labels(*self._labels, name)

    def observe_recompute(self, reason: str) -> None:
        """Count a request that went to the core without the KV of another engine."""
        self._recomputes.labels(*self._labels, reason).inc()

    def observe_move(self, why: MoveReason) -> None:
        """Count a request that left for another engine."""
        self._moves.labels(*self._labels, why).inc()

    def observe_stats(self, stats: SchedulerStats) -> None:
        """Take the present values of the core's counters."""
        seen, self._seen = self._seen, stats
        for transport, count in stats.kv_bytes_received.items():
            self._bytes.labels(*self._labels, transport).inc(count - seen.kv_bytes_received.get(transport, 0))
        for reason, count in stats.kv_recomputes.items():
            self._recomputes.labels(*self._labels, reason).inc(count - seen.kv_recomputes.get(reason, 0))
        for outcome, count in stats.preempted_states.items():
            self._preempted.labels(*self._labels, outcome).inc(count - seen.preempted_states.get(outcome, 0))


_LABELS = ("model_name", "engine")
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LOGITS = (-100.0, -50.0, -20.0, -10.0, -5.0, -2.0, 0.0, 2.0, 5.0, 10.0, 20.0, 30.0, 50.0, 100.0)
_NATS = (0.01, 0.03, 0.1, 0.3, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 10.0)
_TEMPERATURES = (0.0, 0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0)
_COUNTERS_OF_CORE = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "external_prefix_cache_queries": "Prompt tokens looked up in other engines or in the offload tier.",
    "external_prefix_cache_hits": "Prompt tokens whose KV was loaded from other engines or the offload tier.",
    "num_preemptions": "Requests that lost their KV blocks to other requests and resumed later.",
}
"""Fields of ``SchedulerStats`` that are metrics of the same name, with their texts."""


class EngineMetrics:
    """Observes attempts and steps; times are monotonic seconds.

    Attributes:
        labels: The labels that all metrics of the engine have.
        stats: The core's latest statistics.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        model: str,
        engine: str,
        *,
        logits: bool = False,
        speculative: SpeculativeConfig | None = None,
    ) -> None:
        """``logits``: whether the core measures logits; otherwise their metrics do not exist, nor do those of drafts
        without ``speculative``."""
        self.kv = KVMetrics(registry, model, engine)
        self._registry = registry
        self._labels = (model, engine)
        self.stats = SchedulerStats()
        self._show_stats()
        self._corrupted = self._counter("corrupted_requests", "Requests with NaN in their logits, if that is checked.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that produced output.")
        text = "Prompt tokens, by where their KV came from."
        sources = process_metrics.counter(registry, "prompt_tokens_by_source", text, (*_LABELS, "source"))
        self._computed, self._cached, self._loaded = (sources.labels(*self._labels, name) for name in _SOURCES)
        labels_of = self.labels = dict(zip(_LABELS, self._labels, strict=True))
        self.generation_tokens = process_metrics.fast_counter(
            registry, "generation_tokens", "Generated tokens.", labels_of
        )
        text = "Requests that have ended, by reason."
        success = process_metrics.counter(registry, "request_success", text, (*_LABELS, "finished_reason"))
        self._success = {reason: success.labels(*self._labels, reason.name.lower()) for reason in FinishReason}
        text = "Requests that returned what was pooled from their prompts, by task."
        self._pooled = process_metrics.counter(registry, "pooling_requests", text, (*_LABELS, "task"))
        self._make_histograms()
        self._logits = _LogitsMetrics(registry, labels_of) if logits else None
        if speculative is not None:
            num_tokens = speculative.num_speculative_tokens
            SpeculationMetrics(registry, labels_of, num_tokens, lambda: self.stats.spec_decoding)
        self._experts: ExpertMetrics | None = None  # of a model with experts, once it is loaded

    def _make_histograms(self) -> None:
        self._ttft = self._histogram("time_to_first_token_seconds", "Seconds from arrival to the first token.")
        self._itl = self._histogram("inter_token_latency_seconds", "Seconds between two tokens of a request.")
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean seconds per token after the first, by request."
        )
        text = "Tokens per step: generated tokens, and tokens of the prompts that it completed."
        self._iteration = self._histogram("iteration_tokens_total", text, _ITERATION_TOKENS)
        text = "Prompt tokens that a request computed itself: neither cached nor loaded."
        self._prefilled = self._histogram("request_prefill_kv_computed_tokens", text, process_metrics.TOKENS)
        self._e2e, self._queue, self._prefill, self._decode, self._inference = (
            self._histogram(name, text, process_metrics.REQUEST_SECONDS)
            for name, text in (
                ("e2e_request_latency_seconds", "Seconds from arrival to the end of a request."),
                ("request_queue_time_seconds", "Seconds from arrival until a request is first scheduled."),
                ("request_prefill_time_seconds", "Seconds from the first scheduling to the first token."),
                ("request_decode_time_seconds", "Seconds from the first token to the last."),
                ("request_inference_time_seconds", "Seconds from the first scheduling to the last token."),
            )
        )
        self._show_conventional_names()

    def _show_conventional_names(self) -> None:
        """Show what OpenTelemetry's conventions have a name for under that name too, as its Prometheus exporter would
        (https://github.com/open-telemetry/semantic-conventions-genai)."""
        model, engine = self._labels
        # An engine does not know the API of a request: no name of the convention's operations fits all of them.
        labels = {"gen_ai_operation_name": "generate", "gen_ai_provider_name": "tokenloom"}
        labels |= {"gen_ai_request_model": model, "engine": engine}
        for name, source, text in (
            ("request_duration", self._e2e, "Seconds from arrival to the end of a request."),
            ("time_to_first_token", self._ttft, "Seconds from arrival to the first token."),
            ("time_per_output_token", self._tpot, "Mean seconds per token after the first, by request."),
        ):
            HistogramAlias(self._registry, source, f"gen_ai_server_{name}_seconds", text, labels)

    def observe_ready(self, ready: CoreReady, *, enable_prefix_caching: bool) -> None:
        """Show the configuration of the engine as labels of a gauge that is 1, and the experts of a model with some."""
        if ready.experts_per_token:
            self._experts = ExpertMetrics(self._registry, dict(zip(_LABELS, self._labels, strict=True)))
        info = {
            "block_size": str(ready.block_size),
            "num_gpu_blocks": str(ready.num_kv_blocks),
            "enable_prefix_caching": str(enable_prefix_caching),
        }
        names = (*_LABELS, *info)
        gauge = process_metrics.gauge(self._registry, "cache_config_info", "Configuration of the KV cache.", names)
        gauge.labels(*self._labels, *info.values()).set(1)

    def observe_step(self, outputs: EngineCoreOutputs) -> None:
        """Observe a step as a whole."""
        if (stats := outputs.scheduler_stats) is not None:
            self.kv.observe_stats(stats)
            self.stats = stats
        if outputs.expert_loads is not None and self._experts is not None:
            self._experts.loads = outputs.expert_loads
        if outputs.outputs:
            num_generated = sum(len(output.new_token_ids) for output in outputs.outputs)
            prefills = [output.prefill_stats for output in outputs.outputs if output.prefill_stats is not None]
            self.generation_tokens.inc(num_generated)
            self._iteration.observe(num_generated + sum(s.num_prompt_tokens - s.num_cached_tokens for s in prefills))

    def observe_output(self, attempt: Attempt, output: EngineCoreOutput, now: float) -> None:
        """Observe what a step produced for one attempt."""
        if output.new_token_ids:
            times = attempt.times
            if times.first_token:
                self._itl.observe(now - times.last_token)
            else:
                times.first_token = now
                if not attempt.tokens.accepted:  # otherwise another attempt produced the first token
                    self._ttft.observe(now - times.arrival)
            times.last_token = now
        if output.num_nans_in_logits and not attempt.saw_nans:
            attempt.saw_nans = True
            self._corrupted.inc()
        if output.logits_stats is not None and self._logits is not None:
            self._logits.observe(output.logits_stats)
        if (stats := output.prefill_stats) is not None:
            self._prompt_tokens.inc(stats.num_prompt_tokens)
            self._observe_sources(stats)
            self._queue.observe(stats.queued_ns / 1e9)
            self._prefill.observe(stats.prefill_ns / 1e9)

    def observe_end(self, attempt: Attempt, now: float) -> None:
        """Observe the end of an attempt, whether the core or the front ended it."""
        assert attempt.finish_reason is not None
        self._success[attempt.finish_reason].inc()
        if attempt.pooling_task is not None and attempt.finish_reason is FinishReason.STOP:
            self._pooled.labels(*self._labels, attempt.pooling_task.name.lower()).inc()
        times = attempt.times
        self._e2e.observe(now - times.arrival)
        if not times.first_token:
            return
        decode = times.last_token - times.first_token
        num_tokens = attempt.tokens.output - attempt.tokens.accepted
        self._decode.observe(decode)
        if num_tokens > 1:
            self._tpot.observe(decode / (num_tokens - 1))
        if (stats := times.prefill) is not None:
            self._inference.observe(decode + stats.prefill_ns / 1e9)

    def _observe_sources(self, stats: PrefillStats) -> None:
        num_computed = stats.num_prompt_tokens - stats.num_cached_tokens
        self._computed.inc(num_computed)
        self._prefilled.observe(num_computed)
        self._cached.inc(stats.num_cached_tokens - stats.num_external_cached_tokens)
        self._loaded.inc(stats.num_external_cached_tokens)

    def _show_stats(self) -> None:
        """Show the core's latest statistics. They are read when metrics are scraped, so steps pay nothing for them."""
        self._gauge("num_requests_running", "Requests that are running.", lambda: self.stats.num_running)
        self._gauge("num_requests_waiting", "Requests that wait to run.", lambda: self.stats.num_waiting)
        text = "Share of KV blocks in use, from 0 to 1; of slots for states, if that is more."
        self._gauge("kv_cache_usage_perc", text, lambda: self.stats.kv_usage)
        text = "Prompt tokens of the requests that wait to run."
        waiting = Gauge("tokenloom_prompt_tokens_waiting", text, _LABELS, registry=self._registry)
        waiting.labels(*self._labels).set_function(lambda: self.stats.num_waiting_tokens)
        text = "Slots for states of layers that no request has; 0 for models whose layers keep none."
        slots = Gauge("tokenloom_state_slots_free", text, _LABELS, registry=self._registry)
        slots.labels(*self._labels).set_function(lambda: self.stats.num_free_state_slots)
        labels = dict(zip(_LABELS, self._labels, strict=True))
        for name, text in _COUNTERS_OF_CORE.items():
            read = functools.partial(self._read, name)
            process_metrics.fast_counter(self._registry, name, text, labels, read)

    def _read(self, name: str) -> int:
        value: int = getattr(self.stats, name)
        return value

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        process_metrics.gauge(self._registry, name, text, _LABELS).labels(*self._labels).set_function(read)

    def _counter(self, name: str, text: str) -> Counter:
        return process_metrics.counter(self._registry, name, text, _LABELS).labels(*self._labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = process_metrics.LATENCY_SECONDS) -> Histogram:
        labels = dict(zip(_LABELS, self._labels, strict=True))
        return process_metrics.histogram(self._registry, name, text, labels, buckets)


class _LogitsMetrics:
    """Holds the histograms of the measured logits."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        """``labels``: the fixed labels of all of them."""
        self._max, self._min, self._entropy, self._temperature = (
            Histogram(registry, name, text, labels, buckets)
            for name, text, buckets in (
                ("tokenloom_logits_max", "Largest logit of a token that was measured.", _LOGITS),
                ("tokenloom_logits_min", "Smallest logit of a token that was measured.", _LOGITS),
                ("tokenloom_logits_entropy_nats", "Entropy of the distribution of a token that was measured.", _NATS),
                ("tokenloom_temperature", "Temperature that a token that was measured was drawn with.", _TEMPERATURES),
            )
        )

    def observe(self, stats: LogitsStats) -> None:
        self._max.observe(stats.max)
        self._min.observe(stats.min)
        self._entropy.observe(stats.entropy)
        self._temperature.observe(stats.temperature)
