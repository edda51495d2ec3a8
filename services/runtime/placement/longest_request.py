"""Says how long a request may be on an engine. No I/O."""

from tokenloom.v1.coordinator_pb2 import EngineIdentity


def longest_request(engine: EngineIdentity) -> int:
    """Return the tokens of one request that an engine holds at most: its KV cache or, for an encoder, which keeps no
    KV, its limit."""
    size = engine.num_kv_blocks * engine.fingerprint.block_size
    limit = engine.limits.max_model_len
    return min(size, limit or size) if size else limit
