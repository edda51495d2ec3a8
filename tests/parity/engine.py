"""An engine core over a model in this process, driven to the end of its requests."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import (
    CacheConfig,
    EngineConfig,
    KVCacheDtype,
    LoraConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest, SchedulerStats
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.engine_core.executor.uniproc import ThreadedExecutor, UniProcExecutor
from tokenloom.gpu_worker.devices import make_worker
from tokenloom.request.adapter_names import adapter_salt

MAX_MODEL_LEN = 640


def uni(config: EngineConfig) -> Executor:
    return (ThreadedExecutor if config.scheduler.async_scheduling else UniProcExecutor)(make_worker(config))


class Engine:
    """``generate`` fulfils :data:`tests.parity.identical.Generate`."""

    def __init__(
        self,
        model: Path,
        *,
        num_blocks: int = 1400,
        budget: int = 2048,
        max_num_seqs: int = 32,
        prefix_caching: bool = False,
        stop_token_ids: Sequence[int] = (),
        attention_backend: str = "auto",
        device: str = "cpu",
        dtype: str = "float32",
        quantization: Literal["int8-dynamic", "int4"] | None = None,
        block_size: int = 16,
        model_impl: Literal["auto", "native", "transformers"] = "auto",
        language_model_only: bool = False,
        max_model_len: int = MAX_MODEL_LEN,
        kv_cache_dtype: KVCacheDtype = "auto",
        groups: bool = True,
        lora: LoraConfig | None = None,
        parallel: ParallelConfig | None = None,
        executor: Callable[[EngineConfig], Executor] = uni,
        batch_invariant: bool = False,
        num_threads: int = 1,
        speculative: SpeculativeConfig | None = None,
        state_memory_bytes: int | None = None,
        async_scheduling: bool = False,
        load_format: str = "auto",
    ) -> None:
        worker = WorkerConfig(
            model=str(model),
            device=device,
            dtype=dtype,
            quantization=quantization,
            num_threads=num_threads,
            batch_invariant=batch_invariant,
            attention_backend=attention_backend,
            model_impl=model_impl,
            language_model_only=language_model_only,
            load_format=load_format,
        )
        config = EngineConfig(
            worker=worker,
            cache=CacheConfig(
                num_blocks=num_blocks,
                block_size=block_size,
                enable_prefix_caching=prefix_caching,
                dtype=kv_cache_dtype,
                disable_hybrid_kv_cache_manager=not groups,
                state_memory_bytes=state_memory_bytes,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, async_scheduling=async_scheduling
            ),
            max_model_len=max_model_len,
            lora=lora or LoraConfig(),
            parallel=parallel or ParallelConfig(),
            speculative=speculative,
        )
        self.core = EngineCore(config, executor(config))
        self.stop_token_ids = tuple(stop_token_ids)
        self.stats = SchedulerStats()
        self.most_scheduled = 0
        """Requests in the largest step."""
        self._names = map(str, itertools.count())

    @property
    def attention_backend(self) -> str:
        """The one that was chosen."""
        return self.core.ready.numerics.split("/")[2]

    def generate(
        self,
        prompts: Sequence[list[int]],
        max_tokens: Sequence[int],
        accepted: Sequence[list[int]] | None = None,
        adapters: Sequence[bytes] | None = None,
        **sampling: float,
    ) -> list[list[int]]:
        """All at once; greedy unless ``sampling`` says otherwise. Request i of a call has seed i.

        ``accepted``: tokens that an earlier attempt has drawn; they begin the outputs that are returned. ``adapters``:
        the digest of each request's.
        """
        tokens: dict[str, list[int]] = {}
        given = accepted or [[] for _ in prompts]
        digests = adapters or [b""] * len(prompts)
        for seed, (prompt, limit, begun, digest) in enumerate(zip(prompts, max_tokens, given, digests, strict=True)):
            params = CoreSamplingParams(
                max_tokens=limit, seed=seed, stop_token_ids=self.stop_token_ids, **{"temperature": 0.0, **sampling}
            )
            tokens[name := next(self._names)] = list(begun)
            request = EngineCoreRequest(
                name, prompt, params, list(begun), cache_salt=adapter_salt(b"", digest), adapter=digest
            )
            self.core.add_request(request)
        while self.core.has_work():
            outputs = self.core.step()
            for output in outputs.outputs:
                assert not output.error, output.error
                assert output.token_index == len(tokens[output.request_id])
                tokens[output.request_id] += output.new_token_ids
            self.stats = outputs.scheduler_stats or self.stats
            self.most_scheduled = max(self.most_scheduled, len(outputs.outputs))
        assert self.stats.kv_usage == 0.0, "a block leaked"
        return list(tokens.values())

    def next_logprobs(self, prompt: list[int], accepted: list[int], num_tokens: int = 20) -> dict[int, float]:
        """Log probabilities of the likeliest tokens after an output."""
        params = CoreSamplingParams(max_tokens=len(accepted) + 1, temperature=0.0, seed=0, logprobs=num_tokens)
        request = EngineCoreRequest(next(self._names), prompt, params, accepted_token_ids=list(accepted))
        self.core.add_request(request)
        while self.core.has_work():
            for output in self.core.step().outputs:
                if (columns := output.new_logprobs) is not None:
                    return dict(zip(columns.token_ids, columns.logprobs, strict=True))
        raise AssertionError("no token came")
