"""Turns prompts and pairs of texts of the offline API into checked pooling requests of the engine core."""

import itertools
from collections.abc import Sequence

from tokenizers import Tokenizer

from tokenloom.engine_core.data.core_sampling_params import DRAWS_NOTHING
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.services.engine.records.core_request import to_core_pooling
from tokenloom.v1 import engine_pb2, types_pb2

from .pooled_request import OfflinePooledRequest
from .pooling_outputs import PoolingParams, PoolingTaskName
from .prompts import Prompt, TokenizedPrompt, read_prompt, whole_text


class PoolingPrompts:
    """Builds requests. Raises ``InvalidArgument`` or ``ValueError`` naming what is wrong."""

    def __init__(self, tokenizer: Tokenizer, limits: types_pb2.ModelLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._request_ids = (f"pooled-{number}" for number in itertools.count())

    def serves(self, task: PoolingTaskName) -> bool:
        """Return whether the model pools for this task."""
        return types_pb2.PoolingTask.Value(_wire_name(task)) in self._limits.pooling_tasks

    def read(self, prompts: Sequence[Prompt], truncate: int | None) -> list[TokenizedPrompt]:
        """Encode prompts, of which ``truncate`` tokens are kept; -1: as many as the context holds; None: all."""
        return [self._shorten(read_prompt(prompt, self._tokenizer), truncate) for prompt in prompts]

    def pairs(
        self, pairs: Sequence[tuple[str, str]], params: PoolingParams, truncate: int | None
    ) -> list[OfflinePooledRequest]:
        """Return a request for each pair of texts, which the model reads at once."""
        requests = []
        for first, second in pairs:
            encoding = self._tokenizer.encode(whole_text("a text", first), whole_text("a text", second))
            prompt = self._shorten(TokenizedPrompt(None, encoding.ids), truncate)
            types = encoding.type_ids[: len(prompt.token_ids)]
            requests.append(self.build(prompt, "score", params, types.index(1) if 1 in types else 0))
        return requests

    def build(
        self, prompt: TokenizedPrompt, task: PoolingTaskName, params: PoolingParams, first_part_tokens: int = 0
    ) -> OfflinePooledRequest:
        """Return a request for a prompt."""
        wire = types_pb2.PoolingParams(
            task=_wire_name(task),
            dimensions=params.dimensions,
            use_activation=params.use_activation,
            first_part_tokens=first_part_tokens,
        )
        wire_prompt = types_pb2.Prompt(token_ids=prompt.token_ids, embeds=prompt.embeds)
        pooling = to_core_pooling(engine_pb2.AddRequest(prompt=wire_prompt, pooling_params=wire), self._limits)
        return OfflinePooledRequest(
            EngineCoreRequest(
                next(self._request_ids),
                prompt.token_ids,
                DRAWS_NOTHING,
                cache_salt=prompt.cache_salt,
                pooling_params=pooling,
            )
        )

    def _shorten(self, prompt: TokenizedPrompt, truncate: int | None) -> TokenizedPrompt:
        if truncate is None:
            return prompt
        most = self._limits.max_model_len if truncate == -1 else truncate
        if most < 1:
            raise ValueError(f"truncate_prompt_tokens must be at least 1, or -1, not {truncate}")
        return TokenizedPrompt(prompt.text, prompt.token_ids[:most], prompt.cache_salt, prompt.embeds)


def _wire_name(task: PoolingTaskName) -> str:
    return f"POOLING_TASK_{task.upper()}"
