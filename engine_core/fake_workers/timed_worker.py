"""A worker that only waits, for benchmarks: everything that a token costs beyond the wait is the cost of the mesh."""

import numpy as np

from ..data.config import EngineConfig
from ..data.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from .hash_row import Floats, hash_pooled
from .hash_worker import HashWorker, allowed_tokens

_STRIDE = 7919
"""Prime, so that outputs run through the whole vocabulary: each token then needs to be detokenized anew."""
_LOW_IDS = 300
"""Ids below this are not sampled: they are special tokens and single bytes. Several bytes make a character, so not each
one would yield an event."""


class TimedWorker(HashWorker):
    """Takes the configured time for a step, and derives tokens from their position alone. It does not use its cache."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        if config.speculative is not None:
            raise ValueError("speculative_config: the timed worker drafts no tokens; use the worker hash or model")
        self._num_known: dict[str, int] = {}
        self._step: SchedulerOutput | None = None
        self._first_id = min(_LOW_IDS, self._vocab_size // 8)

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._wait(scheduler_output)
        self.begin(scheduler_output)

    def begin(self, scheduler_output: SchedulerOutput) -> None:
        """Begin a step without waiting: the caller keeps the time."""
        self._step = scheduler_output

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        assert self._step is not None, "execute_model comes first"
        known, allowed = self._known(self._step), allowed_tokens(grammar, self._vocab_size)
        sampled: dict[str, list[int]] = {}
        pooled: dict[str, Floats] = {}
        for req_id, num_before in self._step.num_computed_tokens().items():
            num_computed = num_before + self._step.num_scheduled_tokens[req_id]
            sampled[req_id] = []
            if num_computed != known[req_id]:
                continue
            if (pooling := self._pooling.get(req_id)) is not None:
                pooled[req_id] = hash_pooled(np.arange(2 * num_computed, dtype=np.int32).reshape(-1, 2), pooling)
            else:
                among = allowed.get(req_id)
                token_id = self._draw(num_computed) if among is None else int(among[0][num_computed % len(among[0])])
                sampled[req_id] = [token_id]
                known[req_id] += 1
        req_ids = list(self._step.num_scheduled_tokens)
        return ModelRunnerOutput(req_ids, [sampled[req_id] for req_id in req_ids], pooled=pooled)

    def _draw(self, num_computed: int) -> int:
        return self._first_id + num_computed * _STRIDE % (self._vocab_size - self._first_id)

    def _known(self, step: SchedulerOutput) -> dict[str, int]:
        """Return how many tokens each request has before the step samples one."""
        known = self._num_known
        for req_id in step.finished_req_ids + step.preempted_req_ids:
            known.pop(req_id, None)
            self._pooling.pop(req_id, None)
        for new in step.scheduled_new_reqs:
            known[new.req_id] = len(new.prompt_token_ids) + len(new.output_token_ids)
            if new.pooling_params is not None:
                self._pooling[new.req_id] = new.pooling_params
        for req_id, token_ids in step.scheduled_cached_reqs.resumed_token_ids.items():
            known[req_id] = len(token_ids)
        return known
