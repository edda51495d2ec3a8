"""Drives a worker step by step, without an engine core: what the check needs of a scheduler is little."""

from collections.abc import Sequence
from pathlib import Path

from tokenloom.engine_core.config import CacheConfig, EngineConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.kv_cache.kv_cache_config import KVCacheConfig
from tokenloom.engine_core.pending_output import await_output
from tokenloom.engine_core.wire.core_sampling_params import SamplingParams
from tokenloom.engine_core.wire.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from tokenloom.gpu_worker.model_worker import ModelWorker
from tokenloom.gpu_worker.platform.devices import make_worker

_BLOCK = 16
Requests = dict[str, tuple[list[int], SamplingParams]]
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
        dtype: str = "auto",
        eager: bool = False,
    ) -> None:
        config = EngineConfig(
            worker=WorkerConfig(model=str(model), device=device, dtype=dtype, enforce_eager=eager),  # type: ignore[arg-type]
            cache=CacheConfig(block_size=_BLOCK),
            scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=8192),
            max_model_len=max_model_len,
        )
        worker = make_worker(config)
        assert isinstance(worker, ModelWorker)
        self.worker = worker
        self.info = worker.load_model()
        self._computed: dict[str, int] = {}
        self._blocks_each = -(-max_model_len // _BLOCK)
        self._config = KVCacheConfig(num_blocks=max_num_seqs * self._blocks_each, max_model_len=max_model_len)

    def start(self) -> None:
        """Make the pool, and compute the steps of warm-up."""
        self.worker.initialize_kv_cache(self._config)

    def begin_in_parts(self, requests: Requests, most: int) -> None:
        """Compute the prompts of these requests, at most ``most`` in a step."""
        items = list(requests.items())
        for start in range(0, len(items), most):
            self.begin(dict(items[start : start + most]))

    def begin(self, requests: Requests) -> dict[str, list[int]]:
        """Compute the prompts of these requests in one step. Returns the first tokens."""
        first = len(self._computed)
        news = [
            NewRequestData(name, prompt, [], params, self._blocks(first + index), 0)
            for index, (name, (prompt, params)) in enumerate(requests.items())
        ]
        counts = {name: len(prompt) for name, (prompt, _) in requests.items()}
        self._computed |= counts
        return self._step(news, CachedRequestData([], [], [], {}), counts, [])

    def decode(self, names: Sequence[str]) -> dict[str, list[int]]:
        """Compute one token of each of these requests."""
        cached = CachedRequestData(list(names), [[]] * len(names), [self._computed[name] for name in names], {})
        for name in names:
            self._computed[name] += 1
        return self._step([], cached, dict.fromkeys(names, 1), [])

    def end(self, names: Sequence[str]) -> None:
        """Forget these requests, which are all that there are."""
        self._computed.clear()
        self._step([], CachedRequestData([], [], [], {}), {}, list(names))

    def generate(self, requests: Requests, num_tokens: int) -> dict[str, list[int]]:
        """Return the tokens of requests that run together."""
        outputs = self.begin(requests)
        for _ in range(num_tokens - 1):
            for name, tokens in self.decode(list(requests)).items():
                outputs[name] += tokens
        self.end(list(requests))
        return outputs

    def _blocks(self, index: int) -> list[int]:
        return list(range(index * self._blocks_each, (index + 1) * self._blocks_each))

    def _step(
        self, news: list[NewRequestData], cached: CachedRequestData, counts: dict[str, int], finished: list[str]
    ) -> dict[str, list[int]]:
        self.worker.execute_model(SchedulerOutput(news, cached, counts, sum(counts.values()), finished, []))
        output = await_output(self.worker.sample_tokens(None))
        return dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
