"""The token ids of prompts, as they come from a tokenizer or from the client, on their way to an engine."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias, cast

from tokenloom.request import errors, output_constraints, packed_ids, validation
from tokenloom.request.narrowing import narrow_token_ids
from tokenloom.request.prefix_schedule import MAX_BLOCKS, block_hashes, shortened
from tokenloom.request.prompt_embeds import join_parts
from tokenloom.v1 import tokenizer_pb2, types_pb2

from ..mesh.tokenizer_client import TokenizerClient
from ..records.generate_request import Chat, EmbeddedPrompt, GenerateRequest, SoundPrompt

EncodedPrompt: TypeAlias = tokenizer_pb2.TokenizedPrompt | types_pb2.Prompt
"""The latter for prompts with embeddings."""

BYTES_PER_TOKEN: Final = 4
"""A usual length of a token. A text is counted by its bytes until it has been encoded."""
_EMBEDDING_BYTES: Final = 4096
"""Bytes of a prompt embedding per token, for the same purpose."""
MAX_PARAMETER_BYTES = 32 << 20
"""Limits the sampling parameters of all prompts of a request together: each prompt is sent with its own copy."""
TOKENS_PER_TURN = 1 << 14
"""Tokens of a request that are hashed in one turn of the event loop, up to twice as many at its end: 1 ms for blocks of
16 tokens."""


def read_ids(
    prompt: Sequence[object] | EmbeddedPrompt | SoundPrompt, keep: int | None, field: str, limits: types_pb2.ModelLimits
) -> EncodedPrompt:
    """Return a prompt that is no text any more, or never was. ``keep``: how many ids are kept; None: all.

    Raises ``InvalidArgument``, and ``ContextLengthExceeded`` for too many.
    """
    if isinstance(prompt, SoundPrompt):
        return prompt.prompt
    if not isinstance(prompt, EmbeddedPrompt):
        return _token_ids(prompt if keep is None else prompt[-keep:], field, limits)
    if keep is not None:
        raise errors.InvalidArgument(f"truncate_prompt_tokens is not supported with {field}", "truncate_prompt_tokens")
    return join_parts(prompt.parts, limits)


def _token_ids(prompt: Sequence[object], field: str, limits: types_pb2.ModelLimits) -> tokenizer_pb2.TokenizedPrompt:
    if len(prompt) >= limits.max_model_len:
        # Refuse it for its length before its items are looked at.
        validation.check_prompt(cast(Sequence[int], prompt), types_pb2.SamplingParams(), limits, field=field)
    if (packed := packed_ids.packed_values(prompt)) is not None:
        return tokenizer_pb2.TokenizedPrompt(packed_token_ids=packed)
    return tokenizer_pb2.TokenizedPrompt(token_ids=narrow_token_ids(field, prompt))


async def unpack(prompt: tokenizer_pb2.TokenizedPrompt, ids: Sequence[int]) -> None:
    """Give a packed prompt these ids of it, in pieces, because they become integers of Python."""
    for start in range(0, len(ids), TOKENS_PER_TURN):
        prompt.token_ids.extend(ids[start : start + TOKENS_PER_TURN])
        await asyncio.sleep(0)
    prompt.ClearField("packed_token_ids")


def continued(before: Sequence[int], prompt: EncodedPrompt) -> EncodedPrompt:
    """Return the prompt after the tokens before it, without its block hashes, which assume that a prompt begins."""
    if not (ids := prompt.token_ids or packed_ids.ids_of(prompt)):
        return prompt
    return tokenizer_pb2.TokenizedPrompt(token_ids=[*before, *ids], reasoning_start=prompt.reasoning_start)


def truncated(prompt: EncodedPrompt, keep: int) -> EncodedPrompt:
    """Return the end of a prompt, without its block hashes, which are those of another beginning."""
    if (len(prompt.token_ids) or packed_ids.num_ids(prompt)) <= keep:
        return prompt
    return tokenizer_pb2.TokenizedPrompt(
        token_ids=prompt.token_ids[-keep:],
        packed_token_ids=prompt.packed_token_ids[-packed_ids.ID_BYTES * keep :],
        reasoning_start=prompt.reasoning_start,
    )


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
        all_ids = prompt.token_ids or packed_ids.ids_of(prompt)
        end = min(len(all_ids) // block_size, MAX_BLOCKS) * block_size
        hashes: list[bytes] = []
        for start in range(0, end, most):
            if num_hashed >= TOKENS_PER_TURN:
                num_hashed = 0
                await asyncio.sleep(0)
            ids = all_ids[start : min(start + most, end)]
            hashes += block_hashes(ids, block_size, hashes[-1] if hashes else b"", salt)
            num_hashed += len(ids)
        prompt.block_hash_prefixes.extend(shortened(hashes))


def estimated_tokens(prompt: str | Sequence[object] | EmbeddedPrompt | SoundPrompt) -> int:
    if isinstance(prompt, str):
        return len(prompt) // BYTES_PER_TOKEN + 1
    if isinstance(prompt, EmbeddedPrompt):
        return sum(len(part) // _EMBEDDING_BYTES if isinstance(part, bytes) else len(part) for part in prompt.parts)
    return len(prompt)


def check_copies(sampling: types_pb2.SamplingParams, num_prompts: int) -> None:
    """Raise ``InvalidArgument`` for sampling parameters that are too large to be sent with each of several prompts."""
    num_bytes = sampling.ByteSize() * num_prompts
    if num_bytes > MAX_PARAMETER_BYTES:
        raise errors.InvalidArgument(
            f"the sampling parameters take {num_bytes} bytes for {num_prompts} prompts; at most {MAX_PARAMETER_BYTES} "
            "are allowed: send fewer prompts, or fewer ids in allowed_token_ids and logit_bias",
            "prompt",
        )


async def encode_prompts(
    tokenizers: TokenizerClient,
    request: GenerateRequest,
    prompts: Sequence[str | Sequence[object] | EmbeddedPrompt | SoundPrompt],
    keep: int | None,
    salt: bytes,
    limits: types_pb2.ModelLimits,
) -> list[EncodedPrompt]:
    """Return the token ids of prompts that are no chat. ``keep``: how many of each are kept; None: all."""
    if texts := [prompt for prompt in prompts if isinstance(prompt, str)]:
        encoding = tokenizers.encode(
            texts,
            add_special_tokens=request.add_special_tokens,
            hash_salt=salt,
            takes_packed_ids=True,
            tenant=request.tenant.name,
        )
        return list((await encoding).prompts)
    read: list[EncodedPrompt] = []
    for prompt in prompts:
        if read:
            await asyncio.sleep(0)
        assert not isinstance(prompt, str), "there are texts or others"
        read.append(read_ids(prompt, keep, request.prompt_field, limits))
        if packed := read[-1].packed_token_ids:
            await asyncio.to_thread(packed_ids.largest, packed)  # the first one imports numpy, which takes 0.1 s
    return read


async def forbid_words(
    tokenizers: TokenizerClient,
    request: GenerateRequest,
    sampling: types_pb2.SamplingParams,
    limits: types_pb2.ModelLimits,
) -> None:
    """Add words of a request that must not appear to its parameters. Raises ``InvalidArgument``."""
    texts, tenant = output_constraints.word_spellings(request.bad_words), request.tenant.name
    encoded = (await tokenizers.encode(texts, add_special_tokens=False, tenant=tenant)).prompts
    output_constraints.forbid_words(sampling, [each.token_ids for each in encoded])
    validation.check_sampling(sampling, limits)


async def echoed_texts(
    tokenizers: TokenizerClient, request: GenerateRequest, prompts: Sequence[EncodedPrompt]
) -> list[str]:
    """Return what is echoed of each prompt: the client's own text, or the text of its tokens."""
    if request.truncate_prompt_tokens is None and not isinstance(request.prompts, Chat):
        own = [prompt for prompt in request.prompts if isinstance(prompt, str)]
        if own:
            return own
    skip = request.text.skip_special_tokens if request.text.HasField("skip_special_tokens") else True
    decoding = [
        tokenizers.decode(
            prompt.token_ids or packed_ids.ids_of(prompt), skip_special_tokens=skip, tenant=request.tenant.name
        )
        for prompt in prompts
    ]
    return [decoded.text for decoded in await asyncio.gather(*decoding)]
