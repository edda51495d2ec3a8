"""Drives a worker step by step, without an engine core: what the check needs of a scheduler is little."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.kv_groups import KVCacheConfig
from tokenloom.engine_core.data.scheduler_output import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    await_output,
)
from tokenloom.gpu_worker.devices import make_worker
from tokenloom.gpu_worker.model_worker import ModelWorker

_BLOCK = 16
MOST_TOKENS = 8192
"""Of a step."""
Requests = dict[str, tuple[list[int], CoreSamplingParams]]
"""Prompts and parameters by name."""


class Driver:
    """Holds a loaded worker."""

    def __init__(
        self,
        model: Path,
        *,
        device: str,
        max_num_seqs: int,
        max_model_len: int,
        pool_tokens: int = 0,
        make: Callable[[EngineConfig], Any] = make_worker,
        kv_cache_dtype: str = "auto",
        **options: Any,
    ) -> None:
        """``pool_tokens``: of the KV pool; 0: room for all requests of any length. ``options``: of the worker."""
        config = EngineConfig(
            worker=WorkerConfig(model=str(model), device=device, **options),  # type: ignore[arg-type]
            cache=CacheConfig(block_size=_BLOCK, dtype=kv_cache_dtype),  # type: ignore[arg-type]
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=MOST_TOKENS),
            max_model_len=max_model_len,
        )
        worker = make(config)
        assert isinstance(worker, ModelWorker)
        self.worker = worker
        self.info = worker.load_model()
        self._computed: dict[str, int] = {}
        self._most_blocks = -(-max_model_len // _BLOCK)
        num_blocks = -(-(pool_tokens or max_num_seqs * max_model_len) // _BLOCK) + max_num_seqs
        self._config = KVCacheConfig(num_blocks=num_blocks, max_model_len=max_model_len)
        self._next_block = itertools.count()

    def start(self) -> None:
        """Make the pool, and compute the steps of warm-up."""
        self.worker.initialize_kv_cache(self._config)

    def begin_in_parts(self, requests: Requests, most: int) -> None:
        """Compute the prompts of these requests, at most ``most`` in a step."""
        items = list(requests.items())
        for start in range(0, len(items), most):
            self.begin(dict(items[start : start + most]))

    def begin(self, requests: Requests, *, room: int = 64) -> dict[str, list[int]]:
        """Compute the prompts of these requests in one step, with blocks for ``room`` more tokens. Returns the first
        tokens."""
        return _tokens(self.begin_step(requests, room))

    def begin_step(self, requests: Requests, room: int = 64) -> ModelRunnerOutput:
        """Do the same, and return all of the step's output."""
        news = [
            NewRequestData(name, prompt, [], params, self._blocks(len(prompt) + room), 0)
            for name, (prompt, params) in requests.items()
        ]
        counts = {name: len(prompt) for name, (prompt, _) in requests.items()}
        self._computed |= counts
        return self._step(news, CachedRequestData([], [], [], {}), counts, [])

    def decode(self, names: Sequence[str]) -> dict[str, list[int]]:
        """Compute one token of each of these requests."""
        cached = CachedRequestData(list(names), [[]] * len(names), [self._computed[name] for name in names], {})
        for name in names:
            self._computed[name] += 1
        return _tokens(self._step([], cached, dict.fromkeys(names, 1), []))

    def end(self, names: Sequence[str]) -> None:
        """Forget these requests, which are all that there are."""
        self._computed.clear()
        self._next_block = itertools.count()
        self._step([], CachedRequestData([], [], [], {}), {}, list(names))

    def generate(self, requests: Requests, num_tokens: int) -> dict[str, list[int]]:
        """Return the tokens of requests that run together."""
        outputs = self.begin(requests, room=num_tokens)
        for _ in range(num_tokens - 1):
            for name, tokens in self.decode(list(requests)).items():
                outputs[name] += tokens
        self.end(list(requests))
        return outputs

    def _blocks(self, num_tokens: int) -> list[int]:
        blocks = list(itertools.islice(self._next_block, min(-(-num_tokens // _BLOCK), self._most_blocks)))
        assert not blocks or blocks[-1] < self._config.num_blocks, "the requests do not fit into the pool"
        return blocks

    def _step(
        self, news: list[NewRequestData], cached: CachedRequestData, counts: dict[str, int], finished: list[str]
    ) -> ModelRunnerOutput:
        self.worker.execute_model(SchedulerOutput(news, cached, counts, sum(counts.values()), finished, []))
        return await_output(self.worker.sample_tokens(None))


def _tokens(output: ModelRunnerOutput) -> dict[str, list[int]]:
    return dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
