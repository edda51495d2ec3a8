"""The token ids of prompts, as they come from a tokenizer or from the client, on their way to an engine."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import TypeAlias, cast

from tokenloom.request import errors, packed_ids, validation
from tokenloom.request.narrowing import narrow_token_ids
from tokenloom.request.prefix_schedule import MAX_BLOCKS, block_hashes, shortened
from tokenloom.request.prompt_embeds import join_parts
from tokenloom.v1 import tokenizer_pb2, types_pb2

from ..records.generate_request import EmbeddedPrompt

EncodedPrompt: TypeAlias = tokenizer_pb2.TokenizedPrompt | types_pb2.Prompt
"""The latter for prompts with embeddings."""

TOKENS_PER_TURN = 1 << 14
"""Tokens of a request that are hashed in one turn of the event loop, up to twice as many at its end: 1 ms for blocks of
16 tokens."""


def read_ids(
    prompt: str | Sequence[object] | EmbeddedPrompt, keep: int | None, field: str, limits: types_pb2.ModelLimits
) -> EncodedPrompt:
    """Return a prompt that the client has sent as ids or embeddings. ``keep``: how many ids are kept; None: all.

    Raises ``InvalidArgument``, and ``ContextLengthExceeded`` for too many.
    """
    if not isinstance(prompt, EmbeddedPrompt):
        return _token_ids(prompt if keep is None else prompt[-keep:], field, limits)
    if keep is not None:
        raise errors.InvalidArgument(f"truncate_prompt_tokens is not supported with {field}", "truncate_prompt_tokens")
    return join_parts(prompt.parts, limits)


def _token_ids(prompt: Sequence[object], field: str, limits: types_pb2.ModelLimits) -> tokenizer_pb2.TokenizedPrompt:
    if len(prompt) >= limits.max_model_len:
        # Refuse it for its length before its items are looked at.
        validation.check_prompt(cast(Sequence[int], prompt), types_pb2.SamplingParams(), limits, field=field)
    return tokenizer_pb2.TokenizedPrompt(token_ids=narrow_token_ids(field, prompt))


async def unpack(prompt: tokenizer_pb2.TokenizedPrompt, ids: Sequence[int]) -> None:
    """Give a packed prompt these ids of it, in pieces, because they become integers of Python."""
    for start in range(0, len(ids), TOKENS_PER_TURN):
        prompt.token_ids.extend(ids[start : start + TOKENS_PER_TURN])
        await asyncio.sleep(0)
    prompt.ClearField("packed_token_ids")


async def unpack_kept(
    prompt: tokenizer_pb2.TokenizedPrompt, keep: int | None, field: str, limits: types_pb2.ModelLimits
) -> None:
    """Unpack the ids of a prompt that are kept; None: all. Raises ``ContextLengthExceeded`` if they are too many."""
    if not prompt.packed_token_ids:
        return
    ids = packed_ids.ids_of(prompt)
    if keep is None and len(ids) >= limits.max_model_len:  # refused for its length before its items are looked at
        validation.check_prompt(range(len(ids)), types_pb2.SamplingParams(), limits, field=field)
    if keep is not None and len(ids) > keep:
        ids = ids[-keep:]
        prompt.ClearField("block_hash_prefixes")  # they are those of another beginning
    await unpack(prompt, ids)


def continued(before: Sequence[int], prompt: EncodedPrompt) -> EncodedPrompt:
    """Return the prompt after the tokens before it, without its block hashes, which assume that a prompt begins."""
    if not prompt.token_ids:
        return prompt
    return tokenizer_pb2.TokenizedPrompt(token_ids=[*before, *prompt.token_ids], reasoning_start=prompt.reasoning_start)


def truncated(prompt: EncodedPrompt, keep: int) -> EncodedPrompt:
    """Return the end of a prompt, without its block hashes, which are those of another beginning."""
    if len(prompt.token_ids) <= keep:
        return prompt
    return tokenizer_pb2.TokenizedPrompt(token_ids=prompt.token_ids[-keep:], reasoning_start=prompt.reasoning_start)


async def add_hashes(prompts: Iterable[EncodedPrompt], block_size: int, salt: bytes) -> None:
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
