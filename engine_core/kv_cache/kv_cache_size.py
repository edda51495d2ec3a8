"""Computes how many KV blocks and how many slots for states an engine has, and how long a request may be.

Blocks and slots share one budget of memory, which is split when the engine starts.
"""

from collections.abc import Callable

from ..data.config import EngineConfig
from ..data.kv_groups import KVCacheConfig, KVNeed
from ..data.model_info import ModelInfo
from .kv_manager import largest_chunk

# What 24 agents in 48 GiB find cached of their prompts (tests/engine_core/kv_cache/agent_hits.py), at the sizes of
# Qwen3-Next and of Granite-4-H-Small: with 12,000 here 94 to 95 %, which is 2.1 to 2.9 points less than for a model
# without states; with 15,000 or more 92 to 94 %; with 9,000 1 point more for prompts of 45,000 tokens than with 12,000,
# and 0.6 points less for those of 80,000.
_KV_OF_A_STATE = 12_000
"""Tokens of KV for which one state is kept."""
_SMALL_STATE = 64
"""A state that is as large as the KV of fewer tokens is kept at the end of every block."""
_FEWEST_SLOTS = 2
"""Slots without which no request could run: one that is read, and one that is written."""
_STATES_OF_A_ROW = 16
"""More states that are kept than so many for each request of a batch are of little use, unless they are small."""


def size_kv_cache(config: EngineConfig, model: ModelInfo, available_memory: Callable[[], int]) -> KVCacheConfig:
    """Compute the number of blocks and the context length.

    ``available_memory`` does the worker's profile run and returns bytes; called only if no setting fixes the size.
    Raises ``ValueError``, naming the setting, if no request fits, or the longest one that is configured does not.
    """
    _check_settings(config, model)
    wanted = config.max_model_len or model.max_model_len
    config.check_whole_prompts(model.max_model_len)  # as it is known without the memory
    budget = _budget(config, available_memory)
    num_slots = _num_slots(config, model, wanted, budget) if model.state_bytes else 0
    num_blocks = _num_blocks(config, model, wanted, budget - num_slots * model.state_bytes)
    # A rank without requests computes a dummy token so that its experts answer the other ranks. Block 0 takes that
    # token's KV; any other block may belong to a request.
    has_null_block = has_waves(config, model) and not model.kv_groups  # groups have one anyway
    cross_blocks = _cross_blocks(config, model)
    capacity = _capacity(config, model, max(0, num_blocks - has_null_block - cross_blocks)) * config.cache.block_size
    if capacity < (config.max_model_len or 2):
        beside = f", beside the {cross_blocks} of a sound" if cross_blocks else ""
        # A smaller step leaves more of what was measured, and a window's layers keep the chunk of a prompt.
        is_step_in_it = model.kv_groups or (config.cache.num_blocks is None and config.cache.memory_bytes is None)
        raise ValueError(
            f"the KV cache holds {capacity} tokens ({num_blocks} blocks of {config.cache.block_size}{beside}), fewer "
            f"than max_model_len {wanted}; increase its memory or lower max_model_len"
            f"{' or max_num_batched_tokens' if is_step_in_it else ''}"
        )
    return KVCacheConfig(
        num_blocks=num_blocks,
        max_model_len=min(wanted, capacity),
        groups=model.kv_groups,
        has_null_block=has_null_block,
        num_state_slots=num_slots,
        cross_blocks=cross_blocks,
        state_chunk=model.state_chunk,
        keeps_every_state=_is_small(model),
    )


def has_waves(config: EngineConfig, model: ModelInfo) -> bool:
    """Return whether the engine computes in waves with the other ranks of its data-parallel group."""
    # Workers of stages name no number of experts, but wait for the other engines' in every layer that has some.
    spreads = config.parallel.spreads_experts_over_engines and model.has_experts
    return bool(config.parallel.group_id) and (model.experts_per_token > 0 or spreads)


def _check_settings(config: EngineConfig, model: ModelInfo) -> None:
    if config.cache.block_size < 1:
        raise ValueError(f"block_size is {config.cache.block_size}; it must be at least 1")
    if config.max_model_len is not None and not 2 <= config.max_model_len <= model.max_model_len:
        raise ValueError(
            f"max_model_len is {config.max_model_len}; it must be at least 2 (one token of prompt, one of output) and "
            f"at most the model's context of {model.max_model_len}"
        )


def _budget(config: EngineConfig, available_memory: Callable[[], int]) -> int:
    """Return the bytes for blocks and slots; 0 if the number of blocks is fixed, which needs no profile run."""
    cache = config.cache
    if cache.num_blocks is not None:
        return 0
    return cache.memory_bytes if cache.memory_bytes is not None else max(0, available_memory())


def _num_blocks(config: EngineConfig, model: ModelInfo, max_model_len: int, memory: int) -> int:
    """Return how many blocks fit into ``memory`` bytes."""
    cache = config.cache
    if cache.num_blocks is not None:
        return cache.num_blocks
    block_bytes = model.block_bytes(cache.block_size)
    if cache.memory_bytes is not None and block_bytes:
        return max(0, memory) // block_bytes
    num_useful = _num_useful_blocks(config, model, max_model_len)
    # Where no layer attends, blocks have no bytes: they only name what the states were computed from.
    return min(max(0, memory) // block_bytes, num_useful) if block_bytes else num_useful


def _num_useful_blocks(config: EngineConfig, model: ModelInfo, max_model_len: int) -> int:
    # More blocks than this could never be in use.
    num_blocks = -(-max_model_len // config.cache.block_size) + _cross_blocks(config, model)
    if model.kv_groups:
        return config.scheduler.max_num_seqs * _need(config, model).of_blocks(num_blocks) + 1
    # Without this bound a tiny model on a large host would take half of its memory for blocks that max_num_seqs full
    # contexts cannot fill.
    return config.scheduler.max_num_seqs * num_blocks + has_waves(config, model)


def _cross_blocks(config: EngineConfig, model: ModelInfo) -> int:
    """Return how many blocks of a request hold the keys and values of the rows beside its prompt."""
    return 0 if model.media is None else -(-model.media.cross_rows // config.cache.block_size)


def _num_slots(config: EngineConfig, model: ModelInfo, max_model_len: int, budget: int) -> int:
    """Return how many slots the states get: for running requests and for what is kept of prompts.

    Raises ``ValueError`` if not even one request has room.
    """
    given = config.cache.state_memory_bytes
    num_slots = _best_slots(config, model, max_model_len, budget) if given is None else given // model.state_bytes
    if num_slots < _FEWEST_SLOTS:
        raise ValueError(
            f"the memory holds {num_slots} states of {model.state_bytes} bytes, and a request needs {_FEWEST_SLOTS}; "
            "increase state_memory_bytes or the memory of the KV cache"
        )
    return num_slots


def _best_slots(config: EngineConfig, model: ModelInfo, max_model_len: int, budget: int) -> int:
    cache, rows = config.cache, config.scheduler.max_num_seqs
    is_small = _is_small(model)
    kept = _num_useful_blocks(config, model, max_model_len) if is_small else _STATES_OF_A_ROW * rows
    most = 2 * rows + (kept if cache.enable_prefix_caching else 0)
    kv_bytes = (cache.block_size if is_small else _KV_OF_A_STATE) * model.kv_bytes_per_token
    if cache.num_blocks is not None:
        kept = cache.num_blocks * model.block_bytes(cache.block_size) // kv_bytes if kv_bytes else kept
        return min(most, 2 * rows + kept)
    # A slot for each row comes before blocks, up to half of the memory: fewer would leave seats empty for ever.
    share = max(
        budget * model.state_bytes // (model.state_bytes + kv_bytes), min(rows * model.state_bytes, budget // 2)
    )
    return min(most, share // model.state_bytes)


def _is_small(model: ModelInfo) -> bool:
    return 0 < model.state_bytes < _SMALL_STATE * model.kv_bytes_per_token


def _capacity(config: EngineConfig, model: ModelInfo, num_blocks: int) -> int:
    """Return how many blocks of tokens one request may have."""
    return _need(config, model).capacity(num_blocks - 1) if model.kv_groups else num_blocks


def _need(config: EngineConfig, model: ModelInfo) -> KVNeed:
    lends = bool(config.kv.transports)
    return KVNeed(model.kv_groups, config.cache.block_size, largest_chunk(config.scheduler), lends=lends)
