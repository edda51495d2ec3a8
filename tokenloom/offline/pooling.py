"""Embeds, classifies and scores for the offline API."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch.nn.functional as F

from .offline_loop import OfflineLoop
from .pooled_request import OfflinePooledRequest
from .pooling_outputs import PoolingOutput, PoolingParams, PoolingRequestOutput, PoolingTaskName, ScoringOutput
from .pooling_prompts import PoolingPrompts
from .prompts import Prompt

Result = TypeVar("Result")


class OfflinePooling:
    """Runs pooling requests; see the methods of the same names of :class:`tokenloom.LLM`."""

    def __init__(self, prompts: PoolingPrompts, loop: OfflineLoop) -> None:
        self._prompts = prompts
        self._loop = loop

    def encode(
        self,
        prompts: Sequence[Prompt],
        params: PoolingParams | Sequence[PoolingParams] | None,
        task: PoolingTaskName | None,
        truncate: int | None,
        use_tqdm: bool | Callable[..., Any],
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        each = _one_for_each(params, len(prompts))
        requests = []
        for prompt, own in zip(self._prompts.read(prompts, truncate), each, strict=True):
            if task is not None and own.task not in (None, task):
                raise ValueError(f"pooling_params.task is {own.task}, but {task} is asked for")
            if (wanted := task or own.task) is None:
                raise ValueError(
                    "pooling_task is not set; expected embed, classify, score, token_embed, token_classify"
                )
            requests.append(self._prompts.build(prompt, wanted, own))
        return self._run(requests, use_tqdm)

    def score(
        self,
        first: str | Sequence[str],
        second: str | Sequence[str],
        params: PoolingParams | None,
        truncate: int | None,
        use_tqdm: bool | Callable[..., Any],
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        pairs = _pairs(first, second)
        if self._prompts.serves("score"):
            scored = self._run(self._prompts.pairs(pairs, params or PoolingParams(), truncate), use_tqdm)
            return [with_outputs(output, ScoringOutput(float(output.outputs.data))) for output in scored]
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        embedded = self.encode(texts, params, "embed", truncate, use_tqdm)
        vectors = dict(zip(texts, embedded, strict=True))
        return [_similarity(vectors[left], vectors[right]) for left, right in pairs]

    def _run(
        self, requests: list[OfflinePooledRequest], use_tqdm: bool | Callable[..., Any]
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        self._loop.run(requests, use_tqdm)
        return [request.output() for request in requests]


def with_outputs(output: PoolingRequestOutput[Any], outputs: Result) -> PoolingRequestOutput[Result]:
    """Return a result with its numbers in another form."""
    return replace(output, outputs=outputs)


def _one_for_each(params: PoolingParams | Sequence[PoolingParams] | None, count: int) -> list[PoolingParams]:
    if params is None or isinstance(params, PoolingParams):
        return [params or PoolingParams()] * count
    if len(params) != count:
        raise ValueError(f"pooling_params has {len(params)} entries for {count} prompts")
    return list(params)


def _pairs(first: str | Sequence[str], second: str | Sequence[str]) -> list[tuple[str, str]]:
    left, right = ([each] if isinstance(each, str) else list(each) for each in (first, second))
    if len(left) == 1:
        left *= len(right)
    if len(left) != len(right):
        raise ValueError(f"score: {len(left)} texts and {len(right)} texts; give one and several, or as many of each")
    return list(zip(left, right, strict=True))


def _similarity(
    left: PoolingRequestOutput[PoolingOutput], right: PoolingRequestOutput[PoolingOutput]
) -> PoolingRequestOutput[ScoringOutput]:
    """Return the cosine similarity of two vectors."""
    score = float(F.cosine_similarity(left.outputs.data, right.outputs.data, dim=0))
    joined = replace(left, prompt_token_ids=left.prompt_token_ids + right.prompt_token_ids)
    return with_outputs(joined, ScoringOutput(score))
