"""Pools prompts offline: embeddings, classes, scores and rewards."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from tokenloom.engine_core.data.core_params import DRAWS_NOTHING, CorePoolingParams
from tokenloom.engine_core.data.messages import EngineCoreOutput, EngineCoreRequest
from tokenloom.model_files.sentence_texts import SentenceTexts
from tokenloom.request.errors import TokenloomError
from tokenloom.services.engine.records.core_request import to_core_pooling
from tokenloom.services.tokenizer.encoder import PromptTruncation, TextRule, VectorTexts, encode_text
from tokenloom.v1 import engine_pb2, types_pb2

from .offline_loop import OfflineLoop, check_failures
from .offline_request import check_step
from .outputs import PoolingOutput, PoolingParams, PoolingRequestOutput, PoolingTaskName, ScoringOutput
from .prompts import Prompt, TokenizedPrompt, read_each, read_prompt, whole_text

NO_OUTPUT: Any = None
"""Stands for the numbers of a request that failed."""


class PooledSample:
    """Holds the only sample of a request; it is also its own completion."""

    def __init__(self, core_request: EngineCoreRequest) -> None:
        self.core_request = core_request
        self.completion = self
        self.is_finished = False

    def finished(self) -> bool:
        return self.is_finished


class OfflinePooledRequest:
    """Fulfils :class:`.offline_loop.InFlight`."""

    def __init__(self, core_request: EngineCoreRequest) -> None:
        self._sample = PooledSample(core_request)
        self.samples: Sequence[PooledSample] = [self._sample]
        self.media = None
        self._result: EngineCoreOutput | None = None
        self.error: Exception | None = None

    @property
    def finished(self) -> bool:
        return self._sample.is_finished

    @property
    def num_tokens(self) -> int:
        """Return 0: pooling draws no tokens."""
        return 0

    def accept(self, sample: PooledSample, step: EngineCoreOutput) -> bool:
        """Take the result. Returns False: the core has ended the request. Raises `CoreRefusal`."""
        sample.is_finished = True
        check_step(step)
        self._result = step
        return False

    def abort(self, error: Exception | None = None) -> None:
        """End the request without a result, because of an error if there is one."""
        self._sample.is_finished = True
        self.error = self.error or error

    def use_weights(self, version: int, *, has_begun: bool) -> None:
        """Do nothing: a prompt that is pooled is computed in a few steps, and anew after a change of weights."""

    def output(self) -> PoolingRequestOutput[PoolingOutput]:
        """Return the result of a request that has ended; without numbers if it failed."""
        step, request = self._result, self._sample.core_request
        if step is None or step.pooled is None:
            error = self.error or RuntimeError("the request was aborted")
            return PoolingRequestOutput(request.request_id, NO_OUTPUT, request.prompt_token_ids, error=str(error))
        num_cached = step.prefill_stats.num_cached_tokens if step.prefill_stats is not None else 0
        data = torch.from_numpy(step.pooled.copy())
        return PoolingRequestOutput(request.request_id, PoolingOutput(data), request.prompt_token_ids, num_cached)


class PoolingPrompts:
    """Builds requests; one that is refused has ended with its error. Raises ``ValueError`` for arguments that are wrong
    for all."""

    def __init__(self, tokenizer: Tokenizer, limits: types_pb2.ModelLimits, texts: SentenceTexts | None = None) -> None:
        """``texts``: how texts that become vectors are encoded; None: as all others."""
        self._tokenizer = tokenizer
        self._vector_texts = VectorTexts(tokenizer, texts)
        self._limits = limits
        self._request_ids = (f"pooled-{number}" for number in itertools.count())

    def serves(self, task: PoolingTaskName) -> bool:
        """Return whether the model pools for this task."""
        return types_pb2.PoolingTask.Value(_wire_name(task)) in self._limits.pooling_tasks

    def read(
        self, prompts: Sequence[Prompt], tasks: Sequence[PoolingTaskName], truncate: int | None, prompt_name: str | None
    ) -> list[TokenizedPrompt]:
        """Encode prompts, of which the first ``truncate`` tokens are kept, and the special ones around texts; -1: as
        many as the context holds; None: all. The files of sentence-transformers may limit texts that become vectors
        further.

        ``prompt_name``: of the prompt before such texts; None: the default.
        """
        cut, rule = self._cut(truncate), self._vector_texts.rule(prompt_name or "")
        own = TextRule(cut=cut)

        def read(pair: tuple[Prompt, PoolingTaskName]) -> TokenizedPrompt:
            prompt, makes_vectors = pair[0], pair[1] in ("embed", "token_embed")
            tokenized = read_prompt(prompt, self._tokenizer)
            is_text = isinstance(prompt, str) or (isinstance(prompt, Mapping) and "prompt_token_ids" not in prompt)
            if prompt_name and not (is_text and makes_vectors):
                raise ValueError("prompt_name is for texts that become vectors; leave it out")
            if not is_text or tokenized.text is None:
                return tokenized if cut is None else replace(tokenized, token_ids=tokenized.token_ids[: cut.max_tokens])
            encoded = encode_text(self._tokenizer, tokenized.text, None, rule.cut_to(cut) if makes_vectors else own)
            return replace(tokenized, token_ids=encoded.token_ids, skipped_tokens=encoded.skipped_tokens)

        return read_each(zip(prompts, tasks, strict=True), read)

    def pairs(
        self, pairs: Sequence[tuple[str, str]], params: PoolingParams, truncate: int | None
    ) -> list[OfflinePooledRequest]:
        """Return a request for each pair of texts, which the model reads at once."""
        rule, first_parts = TextRule(cut=self._cut(truncate)), [0] * len(pairs)

        def read(index: int) -> TokenizedPrompt:
            first, second = (whole_text("a text", text) for text in pairs[index])
            encoded = encode_text(self._tokenizer, first, second, rule)
            first_parts[index] = encoded.first_part_tokens
            return TokenizedPrompt(None, encoded.token_ids)

        prompts = read_each(range(len(pairs)), read)
        return [self.build(prompt, "score", params, num) for prompt, num in zip(prompts, first_parts, strict=True)]

    def request(self, prompt: Prompt, params: PoolingParams) -> OfflinePooledRequest:
        """Return a request for a prompt of any form; one that is refused has ended with its error.

        Raises ``ValueError`` if the parameters name no task.
        """
        task = _task(None, params)
        (tokenized,) = self.read([prompt], [task], None, None)
        return self.build(tokenized, task, params)

    def build(
        self, prompt: TokenizedPrompt, task: PoolingTaskName, params: PoolingParams, first_part_tokens: int = 0
    ) -> OfflinePooledRequest:
        """Return a request for a prompt."""
        request_id = next(self._request_ids)
        request = EngineCoreRequest(request_id, prompt.token_ids, DRAWS_NOTHING, cache_salt=prompt.cache_salt)
        try:
            if prompt.error is not None:
                raise prompt.error
            request.pooling_params = self._pooling_params(prompt, task, params, first_part_tokens)
        except (TokenloomError, ValueError) as error:
            refused = OfflinePooledRequest(request)
            refused.abort(ValueError(error.message) if isinstance(error, TokenloomError) else error)
            return refused
        return OfflinePooledRequest(request)

    def _pooling_params(
        self, prompt: TokenizedPrompt, task: PoolingTaskName, params: PoolingParams, first_part_tokens: int
    ) -> CorePoolingParams:
        wire = types_pb2.PoolingParams(
            task=_wire_name(task),
            dimensions=params.dimensions,
            use_activation=params.use_activation,
            first_part_tokens=first_part_tokens,
            skipped_tokens=prompt.skipped_tokens,
        )
        wire_prompt = types_pb2.Prompt(token_ids=prompt.token_ids, embeds=prompt.embeds)
        return to_core_pooling(engine_pb2.AddRequest(prompt=wire_prompt, pooling_params=wire), self._limits)

    def _cut(self, truncate: int | None) -> PromptTruncation | None:
        most = self._limits.max_model_len if truncate == -1 else truncate
        if most is None:
            return None
        if most < 1:
            raise ValueError(f"truncate_prompt_tokens must be at least 1, or -1, not {truncate}")
        return PromptTruncation(most, keep_first=True)


def _wire_name(task: PoolingTaskName) -> str:
    return f"POOLING_TASK_{task.upper()}"


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
        prompt_name: str | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        each = _one_for_each(params, len(prompts))
        tasks = [_task(task, own) for own in each]
        tokenized = self._prompts.read(prompts, tasks, truncate, prompt_name)
        requests = [self._prompts.build(*one) for one in zip(tokenized, tasks, each, strict=True)]
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
            return [with_outputs(output, lambda data: ScoringOutput(float(data))) for output in scored]
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        embedded = self.encode(texts, params, "embed", truncate, use_tqdm)
        vectors = dict(zip(texts, embedded, strict=True))
        return [_similarity(vectors[left], vectors[right]) for left, right in pairs]

    def _run(
        self, requests: list[OfflinePooledRequest], use_tqdm: bool | Callable[..., Any]
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        self._loop.run(requests, use_tqdm)
        check_failures([request.error for request in requests])
        return [request.output() for request in requests]


def with_outputs(
    output: PoolingRequestOutput[Any], read: Callable[[torch.Tensor], Result]
) -> PoolingRequestOutput[Result]:
    """Return a result with its numbers in the form that ``read`` makes of them, if it has any."""
    return replace(output, outputs=NO_OUTPUT if output.error is not None else read(output.outputs.data))


def _task(task: PoolingTaskName | None, params: PoolingParams) -> PoolingTaskName:
    """Return the task that the call or its parameters name. Raises ``ValueError`` for none, or for two."""
    if task is not None and params.task not in (None, task):
        raise ValueError(f"pooling_params.task is {params.task}, but {task} is asked for")
    if (wanted := task or params.task) is None:
        raise ValueError("pooling_task is not set; expected embed, classify, score, token_embed, token_classify")
    return wanted


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
    joined = replace(
        left, prompt_token_ids=left.prompt_token_ids + right.prompt_token_ids, error=left.error or right.error
    )
    return with_outputs(joined, lambda data: ScoringOutput(float(F.cosine_similarity(data, right.outputs.data, dim=0))))
