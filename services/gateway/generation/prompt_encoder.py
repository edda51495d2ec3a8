"""From what a client sent to token ids: encoding, truncation, words that must not appear, and texts to be echoed."""

import asyncio
from collections.abc import Sequence
from typing import TypeAlias, cast

from tokenloom.request import bad_words, errors, validation
from tokenloom.request.prompt_embeds import join_parts
from tokenloom.v1 import tokenizer_pb2, types_pb2

from ..mesh.tokenizer_client import TokenizerClient
from .embeds_prompt import EmbedsPrompt
from .job import Chat, Job

EncodedPrompt: TypeAlias = tokenizer_pb2.TokenizedPrompt | types_pb2.Prompt
"""The latter where there are embeddings."""

_TRUNCATED_CONTEXTS = 8
"""A text that is to be truncated may be so many contexts long: all of it is encoded first."""


class PromptEncoder:
    """Asks the tokenizer what jobs need of it."""

    def __init__(self, tokenizers: TokenizerClient) -> None:
        self._tokenizers = tokenizers

    async def encode(
        self, job: Job, sampling: types_pb2.SamplingParams, limits: types_pb2.ModelLimits, max_token_bytes: int
    ) -> Sequence[EncodedPrompt]:
        """Every prompt's ids. Raises ``InvalidArgument`` for what cannot become a prompt, mostly before it is encoded.

        ``max_token_bytes``: of the longest token; 0: unknown.
        """
        keep = _num_kept(job, sampling, limits)
        contexts = 1 if keep is None else _TRUNCATED_CONTEXTS
        _check_sizes(job, contexts * max_token_bytes * limits.max_model_len)
        if isinstance(job.prompts, Chat):
            prompts = [await self._tokenizers.encode_chat(job.prompts)]
        elif texts := [prompt for prompt in job.prompts if isinstance(prompt, str)]:
            prompts = await self._tokenizers.encode(texts, add_special_tokens=job.add_special_tokens)
        else:
            return [_continued(job, _read(prompt, keep, job.prompt_field, limits)) for prompt in job.prompts]
        return [_continued(job, prompt if keep is None else _truncated(prompt, keep)) for prompt in prompts]

    async def forbid(
        self, words: Sequence[str], sampling: types_pb2.SamplingParams, limits: types_pb2.ModelLimits
    ) -> None:
        """Puts words that must not appear into the parameters. Raises ``InvalidArgument``."""
        texts = bad_words.spellings(words)
        encoded = await self._tokenizers.encode(texts, add_special_tokens=False, want_hashes=False)
        for ids in bad_words.sequences([each.token_ids for each in encoded]):
            sampling.bad_words.add(ids=ids)
        validation.check_sampling(sampling, limits)

    async def texts(self, job: Job, prompts: Sequence[Sequence[int]]) -> list[str]:
        """What is echoed of each prompt: the client's own text, or that of its tokens."""
        if job.truncate_prompt_tokens is None and not isinstance(job.prompts, Chat):
            own = [prompt for prompt in job.prompts if isinstance(prompt, str)]
            if own:
                return own
        skip = job.text.skip_special_tokens if job.text.HasField("skip_special_tokens") else True
        decoding = [self._tokenizers.decode(ids, skip_special_tokens=skip) for ids in prompts]
        return list(await asyncio.gather(*decoding))


def _num_kept(job: Job, sampling: types_pb2.SamplingParams, limits: types_pb2.ModelLimits) -> int | None:
    """Tokens of a prompt that count, at most; None: all."""
    keep = job.truncate_prompt_tokens
    if keep is None:
        return None
    if keep == 0:
        raise errors.InvalidArgument("truncate_prompt_tokens must be -1 or at least 1", "truncate_prompt_tokens")
    if keep > limits.max_model_len:
        raise errors.InvalidArgument(
            f"truncate_prompt_tokens is {keep}, more than the model's context of {limits.max_model_len}",
            "truncate_prompt_tokens",
        )
    return keep if keep > 0 else max(limits.max_model_len - max(sampling.max_tokens, 1), 1)


def _check_sizes(job: Job, max_bytes: int) -> None:
    """Refuses, before it is encoded, what cannot become a prompt. ``max_bytes``: of a full context; 0: unknown."""
    field = job.prompt_field
    for text in job.texts:
        if not text:
            raise errors.InvalidArgument(f"{field} is empty; at least one token is needed", field)
        if max_bytes and len(text) > max_bytes:
            raise errors.InvalidArgument(f"{field} is longer than the model's context", field)


def _read(
    prompt: Sequence[object] | EmbedsPrompt, keep: int | None, field: str, limits: types_pb2.ModelLimits
) -> EncodedPrompt:
    if not isinstance(prompt, EmbedsPrompt):
        return _token_ids(prompt if keep is None else prompt[-keep:], field, limits)
    if keep is not None:
        raise errors.InvalidArgument(f"truncate_prompt_tokens does not go with {field}", "truncate_prompt_tokens")
    return join_parts(prompt.parts, limits)


def _continued(job: Job, prompt: EncodedPrompt) -> EncodedPrompt:
    """Behind what was said before, if anything was; then without its block hashes, which are those of a beginning."""
    if not job.before or not prompt.token_ids:
        return prompt
    return tokenizer_pb2.TokenizedPrompt(token_ids=[*job.before, *prompt.token_ids])


def _truncated(prompt: tokenizer_pb2.TokenizedPrompt, keep: int) -> tokenizer_pb2.TokenizedPrompt:
    """Without its block hashes, which are those of another beginning."""
    if len(prompt.token_ids) <= keep:
        return prompt
    return tokenizer_pb2.TokenizedPrompt(token_ids=prompt.token_ids[-keep:], opens_reasoning=prompt.opens_reasoning)


def _token_ids(prompt: Sequence[object], field: str, limits: types_pb2.ModelLimits) -> tokenizer_pb2.TokenizedPrompt:
    if len(prompt) >= limits.max_model_len:
        # Refused for its length before a long look at its items.
        validation.check_prompt(cast(Sequence[int], prompt), types_pb2.SamplingParams(), limits, field=field)
    return tokenizer_pb2.TokenizedPrompt(token_ids=validation.narrow_token_ids(field, prompt))
