"""Prepares pooling calls: checks them against the model's limits and encodes their prompts."""

import asyncio
from collections.abc import Sequence

from tokenloom.request import errors, validation
from tokenloom.request.narrowing import narrow_token_ids
from tokenloom.request.prompt_embeds import FIELD as EMBEDS_FIELD
from tokenloom.v1 import tokenizer_pb2, types_pb2

from ..mesh.tokenizer_client import TokenizerClient
from ..records.generate_request import Chat, EmbeddedPrompt
from ..records.pooling_input import PoolingInput, task_name, task_names
from .preparation import check_sizes

_TEXTS_PER_CALL = 64
"""Texts of one call to a tokenizer; a call with more inputs is spread over the tokenizers."""
_CHECKED_AT_ONCE = 64

Prompts = Sequence[tokenizer_pb2.TokenizedPrompt]


def check_task(params: types_pb2.PoolingParams, limits: types_pb2.ModelLimits) -> None:
    """Raise ``InvalidArgument`` for what the model does not serve."""
    if params.task not in limits.pooling_tasks:
        name = task_name(params.task)
        raise errors.InvalidArgument(
            f"the model does not serve the task {name}; its pooling tasks are: {task_names(limits)}", "model"
        )
    if params.HasField("dimensions"):
        if not limits.matryoshka:
            raise errors.InvalidArgument("dimensions: the model's vectors cannot be shortened", "dimensions")
        if not params.dimensions:
            raise errors.InvalidArgument("dimensions must be at least 1", "dimensions")


async def encode(pooling: PoolingInput, tokenizers: TokenizerClient, limits: types_pb2.ModelLimits) -> Prompts:
    """Return the token ids of every prompt, checked. Raises ``InvalidArgument`` naming the field."""
    job = pooling.job
    keep = _num_kept(pooling, limits)
    info = tokenizers.info
    if info is not None and not keep:
        check_sizes(job, info.max_token_bytes, limits)
    prompts = await _encode(pooling, tokenizers, keep)
    for start in range(0, len(prompts), _CHECKED_AT_ONCE):
        for prompt in prompts[start : start + _CHECKED_AT_ONCE]:
            validation.check_pooling_prompt(prompt.token_ids, limits, field=job.prompt_field)
        await asyncio.sleep(0)
    return prompts


async def _encode(pooling: PoolingInput, tokenizers: TokenizerClient, keep: int) -> Prompts:
    job = pooling.job
    if isinstance(job.prompts, Chat):
        chat = (await tokenizers.encode_chat(job.prompts, hash_salt=job.cache_salt)).prompt
        return [_cut(chat.token_ids, pooling, keep) if keep else chat]
    texts: list[str] = []
    lists: list[tokenizer_pb2.TokenizedPrompt] = []
    for number, prompt in enumerate(job.prompts):
        if isinstance(prompt, str):
            texts.append(prompt)
        elif isinstance(prompt, EmbeddedPrompt):
            raise errors.InvalidArgument(f"{EMBEDS_FIELD} is not supported for pooling", EMBEDS_FIELD)
        else:
            lists.append(_cut(narrow_token_ids(job.prompt_field, prompt), pooling, keep))
        if number % _CHECKED_AT_ONCE == 0:
            await asyncio.sleep(0)
    if texts and lists:
        raise errors.InvalidArgument(
            f"{job.prompt_field} must be texts or lists of token ids, not both", job.prompt_field
        )
    if lists:
        return lists
    calls = [
        tokenizers.encode(
            texts[start : start + _TEXTS_PER_CALL],
            add_special_tokens=job.add_special_tokens,
            hash_salt=job.cache_salt,
            second_texts=pooling.second_texts[start : start + _TEXTS_PER_CALL],
            max_tokens=keep,
            keep_first=pooling.keep_first,
        )
        for start in range(0, len(texts), _TEXTS_PER_CALL)
    ]
    return [prompt for response in await asyncio.gather(*calls) for prompt in response.prompts]


def _cut(token_ids: Sequence[int], pooling: PoolingInput, keep: int) -> tokenizer_pb2.TokenizedPrompt:
    if keep and len(token_ids) > keep:
        token_ids = token_ids[:keep] if pooling.keep_first else token_ids[-keep:]
    return tokenizer_pb2.TokenizedPrompt(token_ids=token_ids)


def _num_kept(pooling: PoolingInput, limits: types_pb2.ModelLimits) -> int:
    """Return how many tokens of a prompt are kept; 0: all."""
    keep = pooling.job.truncate_prompt_tokens
    if keep is None:
        return 0
    if keep == 0 or keep > limits.max_model_len:
        raise errors.InvalidArgument(
            f"truncate_prompt_tokens must be -1 or from 1 to the model's context of {limits.max_model_len}",
            "truncate_prompt_tokens",
        )
    return keep if keep > 0 else limits.max_model_len
