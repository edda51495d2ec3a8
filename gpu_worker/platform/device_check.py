"""Refuses options that a device does not support, before anything is loaded."""

from tokenloom.engine_core.data.config import EngineConfig

from .platform import Platform


def check_device(config: EngineConfig, platform: Platform) -> None:
    """Raise ``ValueError`` naming an option that is not supported on the device of ``platform``."""
    if platform.pool_is_on_host:
        _check_host(config)
    else:
        _check_apart(config, platform)


def _check_host(config: EngineConfig) -> None:
    if config.worker.dtype == "float16":
        raise ValueError("dtype float16 is computed on a GPU only: choose bfloat16 or float32 on a CPU")
    if config.worker.quantization == "fp8":
        raise ValueError("quantization fp8 is computed on a GPU only: choose int8-dynamic or int4 on a CPU")
    if config.cache.dtype == "fp8":
        raise ValueError("kv_cache_dtype fp8 is read on a GPU only: choose int8, of the same size, on a CPU")
    if "cuda" in config.kv.transports:
        raise ValueError("kv_transports: cuda moves KV between GPUs: choose shm or socket on a CPU")


def _check_apart(config: EngineConfig, platform: Platform) -> None:
    kind = platform.device.type
    if config.kv.offload_path:
        raise ValueError(f"kv_offload_path: KV on {kind} is not offloaded to files yet")
    if config.worker.quantization not in (None, "fp8"):
        raise ValueError(f"quantization: {config.worker.quantization} is not supported on {kind}: choose fp8")
    if config.cache.dtype not in ("auto", "fp8"):
        raise ValueError(f"kv_cache_dtype: {config.cache.dtype} is not supported on {kind}: choose fp8")
    if "fp8" in (config.worker.quantization, config.cache.dtype) and not platform.computes_fp8:
        option = "quantization" if config.worker.quantization == "fp8" else "kv_cache_dtype"
        raise ValueError(
            f"{option}: fp8 needs a GPU of compute capability 8.9 or more (Ada, Hopper or newer), "
            f"which {platform.hardware or kind} has not"
        )
    if config.kv.transports:
        _check_transports(config, kind)


def _check_transports(config: EngineConfig, kind: str) -> None:
    """Raise ``ValueError`` for what moves no KV of a device yet."""
    if "nixl" in config.kv.transports:
        raise ValueError(f"kv_transports: nixl moves no KV on {kind} yet: choose cuda, shm or socket")
    if config.parallel.world_size > 1 or config.parallel.distributed_executor_backend in ("mp", "ray"):
        raise ValueError(f"kv_transports: KV on {kind} moves only if the one worker runs in the core's process (uni)")
    if config.speculative is not None and config.speculative.method != "ngram":
        raise ValueError(f"kv_transports: the KV of a draft model on {kind} does not move between engines yet")
