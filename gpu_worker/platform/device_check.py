"""Refuses options that a device does not support, before anything is loaded."""

from tokenloom.engine_core.config import EngineConfig

from .platform import Platform


def check_device(config: EngineConfig, platform: Platform) -> None:
    """Raise ``ValueError`` naming an option that is not supported on the device of ``platform``."""
    kind = platform.device.type
    if platform.pool_is_on_host:
        if config.worker.dtype == "float16":
            raise ValueError("dtype float16 is computed on a GPU only: choose bfloat16 or float32 on a CPU")
        return
    if config.kv.transports:
        raise ValueError(f"kv_transports: KV on {kind} does not move between engines yet")
    if config.kv.offload_path:
        raise ValueError(f"kv_offload_path: KV on {kind} is not offloaded to files yet")
    if config.worker.quantization:
        raise ValueError(f"quantization: {config.worker.quantization} is not supported on {kind} yet")
    if config.cache.dtype != "auto":
        raise ValueError(f"kv_cache_dtype: {config.cache.dtype} is not supported on {kind} yet")
