"""A worker that only waits, for benchmarks: everything that a token costs beyond the wait is the cost of the mesh."""

import zlib
from collections.abc import Sequence

import numpy as np

from ..data.config import EngineConfig
from ..data.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from .hash_row import Floats, hash_pooled
from .hash_worker import HashWorker, TokenIds, allowed_tokens

_STRIDE = 7919
"""Prime, so that outputs run through the whole vocabulary: each token then needs to be detokenized anew."""
_LOW_IDS = 300
"""Ids below this are not sampled: they are special tokens and single bytes. Several bytes make a character, so not each
one would yield an event."""


class TimedWorker(HashWorker):
    """Takes the configured time for a step, and derives tokens from their position alone. It does not use its cache."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._num_known: dict[str, int] = {}
        self._step: SchedulerOutput | None = None
        self._first_id = min(_LOW_IDS, self._vocab_size // 8)

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._wait(scheduler_output)
        self.begin(scheduler_output)

    def begin(self, scheduler_output: SchedulerOutput) -> None:
        """Begin a step without waiting: the caller keeps the time."""
        if scheduler_output.defers_drafts:
            known = self._num_known
            scheduler_output = scheduler_output.with_drafts(lambda req_id: known[req_id], self._proposed)
        self._step = scheduler_output

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        assert self._step is not None, "execute_model comes first"
        step = self._step
        known, allowed = self._known(step), allowed_tokens(grammar, self._vocab_size)
        sampled: dict[str, list[int]] = {}
        pooled: dict[str, Floats] = {}
        for req_id, num_before in step.num_computed_tokens().items():
            drafts = step.draft_token_ids.get(req_id, ())
            num_computed = num_before + step.num_scheduled_tokens[req_id] - len(drafts)
            sampled[req_id] = []
            if num_computed != known[req_id]:
                continue
            if (pooling := self._pooling.get(req_id)) is not None:
                pooled[req_id] = hash_pooled(np.arange(2 * num_computed, dtype=np.int32).reshape(-1, 2), pooling)
            elif drafts or req_id in allowed:
                sampled[req_id] = self._draw_all(num_computed, drafts, allowed.get(req_id))
                known[req_id] += len(sampled[req_id])
            else:
                # Most rows: a worker's own time would count as the mesh's.
                sampled[req_id] = [self._draw(num_computed)]
                known[req_id] += 1
        req_ids = list(step.num_scheduled_tokens)
        output = ModelRunnerOutput(req_ids, [sampled[req_id] for req_id in req_ids], pooled=pooled)
        if step.num_drafts_wanted or self._proposed:
            self._draft(step, sampled, output)
        return output

    def _draw_all(self, num_known: int, drafts: Sequence[int], among: list[TokenIds] | None) -> list[int]:
        """Return the next token and, as long as the drafts equal what was drawn, those after them. ``among``: those
        that may be drawn, for each of them."""
        tokens: list[int] = []
        most = 1 + len(drafts) if among is None else len(among)
        while len(tokens) < most:
            position = num_known + len(tokens)
            choices = None if among is None else among[len(tokens)]
            token_id = self._draw(position) if choices is None else int(choices[position % len(choices)])
            tokens.append(token_id)
            if drafts[len(tokens) - 1 : len(tokens)] != [token_id]:
                break
        return tokens

    def _draft(self, step: SchedulerOutput, sampled: dict[str, list[int]], output: ModelRunnerOutput) -> None:
        """Propose the tokens of the next positions; a hash decides which of them are wrong."""
        wrong_from = self._config.draft_accuracy * 1000
        proposed: dict[str, list[int]] = {}
        for req_id, count in step.num_drafts_wanted.items():
            if sampled.get(req_id):
                seed, first = zlib.crc32(req_id.encode()), self._num_known[req_id]
                proposed[req_id] = [
                    self._draw(position) + ((seed + position * _STRIDE) % 1000 >= wrong_from)
                    for position in range(first, first + count)
                ]
        self._proposed, output.draft_token_ids = proposed, proposed.copy()
        output.num_verified = {req_id: len(drafts) for req_id, drafts in step.draft_token_ids.items()}

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
