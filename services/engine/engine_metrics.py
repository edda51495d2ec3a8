"""The engine's metrics, under vLLM's names, labelled ``model_name`` and ``engine``."""

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter

from tokenloom.engine_core.wire.messages import (
    CoreReady,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    PrefillStats,
    SchedulerStats,
)
from tokenloom.services.runtime.telemetry import process_metrics
from tokenloom.services.runtime.telemetry.fast_metrics import Histogram

from .kv.kv_metrics import KVMetrics
from .streams.attempts import Attempt

_LABELS = ("model_name", "engine")
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class EngineMetrics:
    """Observes attempts and steps; times are monotonic seconds."""

    def __init__(self, registry: CollectorRegistry, model: str, engine: str) -> None:
        self.kv = KVMetrics(registry, model, engine)
        self._registry = registry
        self._labels = (model, engine)
        self._seen = SchedulerStats()
        self._show_stats()
        sources = process_metrics.counter(
            registry, "prompt_tokens_by_source", "Prompt tokens, by where their KV came from.", (*_LABELS, "source")
        )
        self._computed, self._cached, self._loaded = (sources.labels(*self._labels, name) for name in _SOURCES)
        self._corrupted = self._counter("corrupted_requests", "Requests with NaN logits, if those are counted.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that produced output.")
        labels_of = dict(zip(_LABELS, self._labels, strict=True))
        self.generation_tokens = process_metrics.fast_counter(
            registry, "generation_tokens", "Tokens generated.", labels_of
        )
        success = process_metrics.counter(
            registry, "request_success", "Requests that ended, by reason.", (*_LABELS, "finished_reason")
        )
        self._success = {reason: success.labels(*self._labels, reason.name.lower()) for reason in FinishReason}
        self._ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self._itl = self._histogram("inter_token_latency_seconds", "Between two tokens of a request.")
        self._tpot = self._histogram("request_time_per_output_token_seconds", "Mean time of tokens after the first.")
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end.", process_metrics.REQUEST_SECONDS
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "Waiting to be scheduled.", process_metrics.REQUEST_SECONDS
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From first scheduled to the first token.", process_metrics.REQUEST_SECONDS
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", process_metrics.REQUEST_SECONDS
        )
        self._inference = self._histogram(
            "request_inference_time_seconds", "From first scheduled to the last token.", process_metrics.REQUEST_SECONDS
        )
        self._iteration = self._histogram(
            "iteration_tokens_total",
            "Tokens of a step: generated, and of prompts that it completed.",
            _ITERATION_TOKENS,
        )

    def observe_ready(self, ready: CoreReady, *, enable_prefix_caching: bool) -> None:
        """The engine as it came up, as labels of a gauge that is 1."""
        info = {
            "block_size": str(ready.block_size),
            "num_gpu_blocks": str(ready.num_kv_blocks),
            "enable_prefix_caching": str(enable_prefix_caching),
        }
        names = (*_LABELS, *info)
        gauge = process_metrics.gauge(self._registry, "cache_config_info", "Configuration of the KV cache.", names)
        gauge.labels(*self._labels, *info.values()).set(1)

    def observe_step(self, outputs: EngineCoreOutputs) -> None:
        """A step as a whole."""
        if (stats := outputs.scheduler_stats) is not None:
            self.kv.observe_stats(stats)
            self._seen = stats
        if outputs.outputs:
            num_generated = sum(len(output.new_token_ids) for output in outputs.outputs)
            prefills = [output.prefill_stats for output in outputs.outputs if output.prefill_stats is not None]
            self.generation_tokens.inc(num_generated)
            self._iteration.observe(num_generated + sum(s.num_prompt_tokens - s.num_cached_tokens for s in prefills))

    def observe_output(self, attempt: Attempt, output: EngineCoreOutput, now: float) -> None:
        """What a step produced for one attempt."""
        if output.new_token_ids:
            if attempt.first_token_at:
                self._itl.observe(now - attempt.last_token_at)
            else:
                attempt.first_token_at = now
                if not attempt.num_accepted_tokens:  # else another attempt had it
                    self._ttft.observe(now - attempt.arrival)
            attempt.last_token_at = now
        if output.num_nans_in_logits and not attempt.saw_nans:
            attempt.saw_nans = True
            self._corrupted.inc()
        if (stats := output.prefill_stats) is not None:
            self._prompt_tokens.inc(stats.num_prompt_tokens)
            self._observe_sources(stats)
            self._queue.observe(stats.queued_ns / 1e9)
            self._prefill.observe(stats.prefill_ns / 1e9)

    def observe_end(self, attempt: Attempt, now: float) -> None:
        """An attempt that ended, by the core or by the front."""
        assert attempt.finish_reason is not None
        self._success[attempt.finish_reason].inc()
        self._e2e.observe(now - attempt.arrival)
        if not attempt.first_token_at:
            return
        decode = attempt.last_token_at - attempt.first_token_at
        num_tokens = attempt.num_output_tokens - attempt.num_accepted_tokens
        self._decode.observe(decode)
        if num_tokens > 1:
            self._tpot.observe(decode / (num_tokens - 1))
        if (stats := attempt.prefill_stats) is not None:
            self._inference.observe(decode + stats.prefill_ns / 1e9)

    def _observe_sources(self, stats: PrefillStats) -> None:
        self._computed.inc(stats.num_prompt_tokens - stats.num_cached_tokens)
        self._cached.inc(stats.num_cached_tokens - stats.num_external_cached_tokens)
        self._loaded.inc(stats.num_external_cached_tokens)

    def _show_stats(self) -> None:
        """What the core counts: its last word when it is scraped, nothing to do in a step."""
        self._gauge("num_requests_running", "Requests in the batch.", lambda: self._seen.num_running)
        self._gauge("num_requests_waiting", "Requests not yet in the batch.", lambda: self._seen.num_waiting)
        self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", lambda: self._seen.kv_usage)
        self._reading(
            "prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            lambda: self._seen.prefix_cache_queries,
        )
        self._reading(
            "prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda: self._seen.prefix_cache_hits
        )
        self._reading(
            "external_prefix_cache_queries",
            "Prompt tokens that other engines or tiers were asked for.",
            lambda: self._seen.external_prefix_cache_queries,
        )
        self._reading(
            "external_prefix_cache_hits",
            "Prompt tokens loaded from them.",
            lambda: self._seen.external_prefix_cache_hits,
        )
        self._reading(
            "num_preemptions",
            "Requests that lost their blocks and were resumed.",
            lambda: self._seen.num_preemptions,
        )

    def _gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        process_metrics.gauge(self._registry, name, text, _LABELS).labels(*self._labels).set_function(read)

    def _reading(self, name: str, text: str, read: Callable[[], float]) -> None:
        labels = dict(zip(_LABELS, self._labels, strict=True))
        process_metrics.fast_counter(self._registry, name, text, labels, read)

    def _counter(self, name: str, text: str) -> Counter:
        return process_metrics.counter(self._registry, name, text, _LABELS).labels(*self._labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = process_metrics.LATENCY_SECONDS) -> Histogram:
        labels = dict(zip(_LABELS, self._labels, strict=True))
        return process_metrics.histogram(self._registry, name, text, labels, buckets)
