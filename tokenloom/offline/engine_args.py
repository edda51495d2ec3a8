"""vLLM's engine arguments, as far as they mean something here, to the engine core's configuration."""

from pathlib import Path
from typing import Any

from tokenloom.engine_core.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from tokenloom.services.engine.core.grammar_config import structured_output_config

_MAX_NUM_SEQS = 128
_DTYPES = {"float": "float32"}


def engine_config(
    path: Path,
    *,
    device: str,
    dtype: Any,
    quantization: str | None,
    max_model_len: int | None,
    max_num_seqs: int | None,
    max_num_batched_tokens: int,
    block_size: int,
    enable_prefix_caching: bool,
    enable_chunked_prefill: bool,
    async_scheduling: bool,
    distributed_executor_backend: str,
    kv_cache_memory_bytes: int | None,
    num_gpu_blocks_override: int | None,
) -> EngineConfig:
    """The configuration of an engine core for one checkpoint. Raises ``ValueError`` naming what is no count."""
    _check_count("max_num_batched_tokens", max_num_batched_tokens)
    _check_count("block_size", block_size)
    _check_count("max_model_len", max_model_len, optional=True)
    _check_count("max_num_seqs", max_num_seqs, optional=True)
    _check_count("kv_cache_memory_bytes", kv_cache_memory_bytes, optional=True)
    _check_count("num_gpu_blocks_override", num_gpu_blocks_override, optional=True)
    cache = CacheConfig(
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
        num_blocks=num_gpu_blocks_override,
        memory_bytes=kv_cache_memory_bytes,
    )
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs or min(_MAX_NUM_SEQS, max_num_batched_tokens),
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=enable_chunked_prefill,
        async_scheduling=async_scheduling,
    )
    worker = WorkerConfig(model=str(path), device=device, dtype=_dtype_name(dtype), quantization=quantization)
    return EngineConfig(
        worker=worker,
        cache=cache,
        scheduler=scheduler,
        parallel=ParallelConfig(distributed_executor_backend=distributed_executor_backend),
        structured_output=structured_output_config(path),
        max_model_len=max_model_len,
    )


def _check_count(name: str, value: object, *, optional: bool = False) -> None:
    if (type(value) is not int or value < 1) and not (optional and value is None):
        raise ValueError(f"{name} must be an integer of at least 1, not {value!r}")


def _dtype_name(dtype: Any) -> str:
    """``torch.float32``, ``"float32"`` and vLLM's ``"float"`` are the same; the worker refuses what it cannot do."""
    name = str(dtype).removeprefix("torch.")
    return _DTYPES.get(name, name)
