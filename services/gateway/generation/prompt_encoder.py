"""Turns what a client sent into token ids: encodes, truncates, and encodes words that must not appear."""

import asyncio
from collections.abc import Sequence
from typing import TypeAlias, cast

from tokenloom.request import bad_words, errors, validation
from tokenloom.request.prompt_embeds import join_parts
from tokenloom.v1 import tokenizer_pb2, types_pb2

from ..mesh.tokenizer_client import TokenizerClient
from .job import Chat, EmbedsPrompt, Job

EncodedPrompt: TypeAlias = tokenizer_pb2.TokenizedPrompt | types_pb2.Prompt
"""The latter for prompts with embeddings."""

_TRUNCATED_CONTEXTS = 8
"""Limit on a text that is to be truncated, in contexts: all of it is encoded first."""


class PromptEncoder:
    """Asks a tokenizer for what jobs need."""

    def __init__(self, tokenizers: TokenizerClient) -> None:
        self._tokenizers = tokenizers

    async def encode(
        self, job: Job, sampling: types_pb2.SamplingParams, limits: types_pb2.ModelLimits, max_token_bytes: int
    ) -> Sequence[EncodedPrompt]:
        """Return every prompt's token ids. Raises ``InvalidArgument`` for what cannot become a prompt, where possible
        before it is encoded.

        ``max_token_bytes``: length of the longest token; 0: unknown.
        """
        keep = None if job.truncate_prompt_tokens is None else _num_kept(job.truncate_prompt_tokens, sampling, limits)
        contexts = 1 if keep is None else _TRUNCATED_CONTEXTS
        _check_sizes(job, contexts * max_token_bytes * limits.max_model_len)
        prompts: Sequence[EncodedPrompt]
        if isinstance(job.prompts, Chat):
            prompts = [(await self._tokenizers.encode_chat(job.prompts)).prompt]
        elif texts := [prompt for prompt in job.prompts if isinstance(prompt, str)]:
            prompts = (await self._tokenizers.encode(texts, add_special_tokens=job.add_special_tokens)).prompts
        else:
            prompts = [_read(prompt, keep, job.prompt_field, limits) for prompt in job.prompts]
            keep = None
        if keep is not None:
            prompts = [_truncated(prompt, keep) for prompt in prompts]
        return [_continued(job.before, prompt) for prompt in prompts] if job.before else prompts

    async def forbid(
        self, words: Sequence[str], sampling: types_pb2.SamplingParams, limits: types_pb2.ModelLimits
    ) -> None:
        """Add words that must not appear to the parameters. Raises ``InvalidArgument``."""
        texts = bad_words.spellings(words)
        encoded = (await self._tokenizers.encode(texts, add_special_tokens=False, want_hashes=False)).prompts
        for ids in bad_words.sequences([each.token_ids for each in encoded]):
            sampling.bad_words.add(ids=ids)
        validation.check_sampling(sampling, limits)

    async def texts(self, job: Job, prompts: Sequence[Sequence[int]]) -> list[str]:
        """Return what is echoed of each prompt: the client's own text, or the text of its tokens."""
        if job.truncate_prompt_tokens is None and not isinstance(job.prompts, Chat):
            own = [prompt for prompt in job.prompts if isinstance(prompt, str)]
            if own:
                return own
        skip = job.text.skip_special_tokens if job.text.HasField("skip_special_tokens") else True
        decoding = [self._tokenizers.decode(ids, skip_special_tokens=skip) for ids in prompts]
        return [decoded.text for decoded in await asyncio.gather(*decoding)]


def _num_kept(keep: int, sampling: types_pb2.SamplingParams, limits: types_pb2.ModelLimits) -> int:
    """Return how many tokens of a prompt are kept. ``keep``: what the client asks for."""
    if keep == 0:
        raise errors.InvalidArgument("truncate_prompt_tokens must be -1 or at least 1", "truncate_prompt_tokens")
    if keep > limits.max_model_len:
        raise errors.InvalidArgument(
            f"truncate_prompt_tokens is {keep}, more than the model's context of {limits.max_model_len}",
            "truncate_prompt_tokens",
        )
    return keep if keep > 0 else max(limits.max_model_len - max(sampling.max_tokens, 1), 1)


def _check_sizes(job: Job, max_bytes: int) -> None:
    """Refuse texts that cannot become a prompt. ``max_bytes``: size of the longest text; 0: unknown."""
    field = job.prompt_field
    for text in (job.prompts.messages_json,) if isinstance(job.prompts, Chat) else job.prompts:
        if text == "":
            raise errors.InvalidArgument(f"{field} is empty; at least one token is needed", field)
        if max_bytes and isinstance(text, str | bytes) and len(text) > max_bytes:
            raise errors.InvalidArgument(f"{field} is longer than the model's context", field)


def _read(
    prompt: str | Sequence[object] | EmbedsPrompt, keep: int | None, field: str, limits: types_pb2.ModelLimits
) -> EncodedPrompt:
    if not isinstance(prompt, EmbedsPrompt):
        return _token_ids(prompt if keep is None else prompt[-keep:], field, limits)
    if keep is not None:
        raise errors.InvalidArgument(f"truncate_prompt_tokens is not supported with {field}", "truncate_prompt_tokens")
    return join_parts(prompt.parts, limits)


def _token_ids(prompt: Sequence[object], field: str, limits: types_pb2.ModelLimits) -> tokenizer_pb2.TokenizedPrompt:
    if len(prompt) >= limits.max_model_len:
        # Refuse it for its length before its items are looked at.
        validation.check_prompt(cast(Sequence[int], prompt), types_pb2.SamplingParams(), limits, field=field)
    return tokenizer_pb2.TokenizedPrompt(token_ids=validation.narrow_token_ids(field, prompt))


def _continued(before: Sequence[int], prompt: EncodedPrompt) -> EncodedPrompt:
    """Return the prompt after the tokens before it, without its block hashes, which assume that a prompt begins."""
    return tokenizer_pb2.TokenizedPrompt(token_ids=[*before, *prompt.token_ids]) if prompt.token_ids else prompt


def _truncated(prompt: EncodedPrompt, keep: int) -> EncodedPrompt:
    """Return the end of a prompt, without its block hashes, which are those of another beginning."""
    if len(prompt.token_ids) <= keep:
        return prompt
    opens = isinstance(prompt, tokenizer_pb2.TokenizedPrompt) and prompt.opens_reasoning
    return tokenizer_pb2.TokenizedPrompt(token_ids=prompt.token_ids[-keep:], opens_reasoning=opens)
