"""Makes small cores over the hash worker and runs them until they are idle."""

import functools
from collections.abc import Sequence

import pytest

from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import (
    CacheConfig,
    EngineConfig,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from tokenloom.engine_core.data.core_params import DRAWS_NOTHING, CorePoolingParams, CoreSamplingParams, PoolingTask
from tokenloom.engine_core.data.messages import EngineCoreOutput, EngineCoreRequest, SessionTurn
from tokenloom.engine_core.data.scheduler_output import GrammarOutput, ModelRunnerOutput
from tokenloom.engine_core.executor.make_executor import make_executor
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker

VOCAB_SIZE = 97


def make_config(
    *,
    num_blocks: int | None = 64,
    block_size: int = 4,
    caching: bool = True,
    max_num_seqs: int = 8,
    budget: int = 64,
    beside_decode: int | None = None,
    chunked: bool = True,
    max_model_len: int | None = None,
    async_scheduling: bool = False,
    policy: str = "fcfs",
    long_prefill: int = 0,
    reserve_full_prompt: bool = True,
    watermark: float = 0.01,
    kv_events: bool = False,
    num_drafts: int = 0,
    draft_accuracy: float = 0.7,
    draft_model: str = "",
    rows_bytes: int = 1 << 20,
) -> EngineConfig:
    return EngineConfig(
        worker=WorkerConfig(model="", worker="hash", draft_accuracy=draft_accuracy),
        cache=CacheConfig(
            block_size=block_size, enable_prefix_caching=caching, num_blocks=num_blocks, kv_events=kv_events
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            prefill_tokens_beside_decode=beside_decode,
            enable_chunked_prefill=chunked,
            async_scheduling=async_scheduling,
            policy=policy,
            long_prefill_token_threshold=long_prefill,
            reserve_full_prompt=reserve_full_prompt,
            watermark=watermark,
            rows_cache_bytes=rows_bytes,
        ),
        max_model_len=max_model_len,
        speculative=_speculative(num_drafts, draft_model),
    )


def _speculative(num_drafts: int, draft_model: str) -> SpeculativeConfig | None:
    """The hash worker drafts by its own rule; with a model, the scheduler reserves the blocks that it would write."""
    if not num_drafts:
        return None
    return SpeculativeConfig("draft_model" if draft_model else "ngram", num_drafts, draft_model)


def make_core(*, vocab_size: int = VOCAB_SIZE, **settings: object) -> EngineCore:
    """Return a core; ``settings`` are the keywords of ``make_config``. No clock decides whether it drafts."""
    config = make_config(**settings)  # type: ignore[arg-type]
    worker = functools.partial(make_worker, vocab_size=vocab_size)
    core = EngineCore(config, make_executor(config, worker))
    if core.scheduler.drafts is not None:
        core.scheduler.drafts.costs = None
    return core


def make_worker(config: EngineConfig, vocab_size: int = VOCAB_SIZE) -> HashWorker:
    return HashWorker(config, vocab_size=vocab_size, max_model_len=256)


def lose_steps(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """Let each ``every``-th step of hash workers fail with ``OSError`` after it has sampled."""
    num_calls, sample = 0, HashWorker.sample_tokens

    def fail_at_times(self: HashWorker, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        nonlocal num_calls
        num_calls += 1
        result = sample(self, grammar)
        if num_calls % every == 0:
            raise OSError("lost")
        return result

    monkeypatch.setattr(HashWorker, "sample_tokens", fail_at_times)


def make_request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 5,
    *,
    accepted: Sequence[int] = (),
    stop: tuple[int, ...] = (),
    salt: bytes = b"",
    priority: int = 0,
    tenant: str = "",
    session: SessionTurn | None = None,
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=CoreSamplingParams(max_tokens=max_tokens, seed=0, stop_token_ids=stop),
        accepted_token_ids=list(accepted),
        cache_salt=salt,
        priority=priority,
        tenant=tenant,
        session=session,
    )


def finish(core: EngineCore, max_steps: int = 1000) -> dict[str, list[EngineCoreOutput]]:
    """Step until the core is idle. Returns the outputs of each request, in order."""
    outputs: dict[str, list[EngineCoreOutput]] = {}
    for _ in range(max_steps):
        if not core.has_work():
            return outputs
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    raise AssertionError(f"still busy after {max_steps} steps")


def tokens_of(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


def make_pooling(
    request_id: str, prompt: Sequence[int], task: PoolingTask = PoolingTask.EMBED, **params: object
) -> EngineCoreRequest:
    pooling = CorePoolingParams(task, **params)  # type: ignore[arg-type]
    return EngineCoreRequest(request_id, list(prompt), DRAWS_NOTHING, pooling_params=pooling)
