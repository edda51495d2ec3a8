"""Hashes the blocks of prompts that no tokenizer has hashed: token ids, the end of a text, a session's next turn."""

import asyncio
from collections.abc import Iterable

from tokenloom.request.prefix_schedule import MAX_BLOCKS, shortened
from tokenloom.request.prompt_block_hash import block_hashes
from tokenloom.v1 import types_pb2
from tokenloom.v1.tokenizer_pb2 import TokenizedPrompt

TOKENS_PER_TURN = 1 << 14
"""Tokens of a request that are hashed in one turn of the event loop, up to twice as many at its end: 1 ms for blocks of
16 tokens."""


async def add_hashes(prompts: Iterable[TokenizedPrompt | types_pb2.Prompt], block_size: int, salt: bytes) -> None:
    """Add to a request's prompts the block hashes by which they are placed, to those that have none.

    Prompts with embeddings get none: hashes of token ids do not cover them. ``block_size``: tokens of a KV block; 0:
    the engines differ or are not known, and nothing is hashed.
    """
    # Only the tokenizer hashed blocks once, so prompts of token ids and the next turns of a session were placed without
    # regard to the engine that has their beginning in its cache.
    num_hashed = 0  # in this turn
    for prompt in prompts:
        if isinstance(prompt, types_pb2.Prompt) or not block_size or prompt.block_hash_prefixes:
            continue
        most = max(TOKENS_PER_TURN // block_size, 1) * block_size
        end = min(len(prompt.token_ids) // block_size, MAX_BLOCKS) * block_size
        hashes: list[bytes] = []
        for start in range(0, end, most):
            if num_hashed >= TOKENS_PER_TURN:
                num_hashed = 0
                await asyncio.sleep(0)
            ids = prompt.token_ids[start : min(start + most, end)]
            hashes += block_hashes(ids, block_size, hashes[-1] if hashes else b"", salt)
            num_hashed += len(ids)
        prompt.block_hash_prefixes.extend(shortened(hashes))
