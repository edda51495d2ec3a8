"""What a scheduler refuses: settings under which it could stand still, requests that could never run."""

from ..config import SchedulerConfig
from ..kv_cache.kv_cache_manager import KVCacheManager
from .request import Request
from .request_queue import SchedulingPolicy


def check_config(config: SchedulerConfig, max_model_len: int) -> None:
    """Raises ``ValueError`` naming the setting."""
    if config.max_num_seqs < 1:
        raise ValueError(f"max_num_seqs is {config.max_num_seqs}; it must be at least 1")
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens {config.max_num_batched_tokens} is below max_num_seqs {config.max_num_seqs}: "
            "a step could not serve every running request"
        )
    if config.policy not in list(SchedulingPolicy):
        raise ValueError(f"policy {config.policy!r} is unknown; there are {', '.join(SchedulingPolicy)}")
    if config.long_prefill_token_threshold < 0:
        raise ValueError(f"long_prefill_token_threshold is {config.long_prefill_token_threshold}; 0 is no limit")
    if config.long_prefill_token_threshold and not config.enable_chunked_prefill:
        raise ValueError("long_prefill_token_threshold needs chunked prefill")
    if not 0 <= config.watermark < 1:
        raise ValueError(f"watermark is {config.watermark}; it is a share of the blocks, below 1")
    if config.prefill_tokens_beside_decode is not None and config.prefill_tokens_beside_decode < 1:
        raise ValueError(
            f"prefill_tokens_beside_decode is {config.prefill_tokens_beside_decode}; it must be at least 1"
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise ValueError(
            f"without chunked prefill max_num_batched_tokens ({config.max_num_batched_tokens}) "
            f"must reach max_model_len ({max_model_len})"
        )


def refusal(
    request: Request, policy: SchedulingPolicy, kv: KVCacheManager, max_model_len: int, *, moves_kv: bool
) -> str:
    """Why a request can never run; empty if it can."""
    if request.priority and policy is not SchedulingPolicy.PRIORITY:
        return f"priority is {request.priority}, but the engine's scheduling policy is {policy}"
    if request.remote is not None and not moves_kv:
        return "this engine does not exchange KV with others"
    if not request.num_prompt_tokens:
        return "prompt is empty"
    if request.num_prompt_tokens >= max_model_len:
        return (
            f"prompt has {request.num_prompt_tokens} tokens; "
            f"with at least one of output the context holds {max_model_len}"
        )
    # The last token's KV is never computed.
    if not kv.can_ever_hold(request.max_num_tokens - 1):
        num_slots = kv.pool.num_blocks * kv.block_size
        return f"prompt and max_tokens need {request.max_num_tokens - 1} KV slots; the engine has {num_slots}"
    return ""
