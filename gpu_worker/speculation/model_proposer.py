"""Proposes tokens with a small model, whose KV lies next to that of the model that it drafts for."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenloom.engine_core.wire.scheduler_output import SchedulerOutput

from ..attention.attention_backend import AttentionBackend, KVCache
from ..batch.input_batch import InputBatch, Ints, StepInputs
from ..batch.transfer import to_device
from ..sampler import Purpose, Sampler
from .drafter import Drafter
from .greedy_drafts import GreedyDrafts
from .interface import StepArrays
from .rejection import RejectionSampler, distribution

LEAST_CONFIDENCE = 0.4
"""A draft that all drafts of its step are right with a lower probability than this is the last one: computing the next
one would cost more than it gains."""
_FEW_REQUESTS = 8
"""Up to so many requests are drafted for one after the other, in one call."""
_FEW_TOKENS = 32
"""Up to so many tokens of a request are computed one after the other, in one call."""


class _Ranges(NamedTuple):
    """Says which positions the drafter computes first: those that the model has computed, and the last token."""

    places: Ints
    """[n]: requests of the step."""
    starts: Ints
    """[n]"""
    lengths: Ints
    """[n]"""
    counts: Ints
    """[n]: drafts to propose."""
    computed: Ints
    """[R]: how many tokens of each request of the step the model has computed."""


class ModelProposer:
    """Fulfils :class:`~.interface.Proposer`.

    After each step the drafter computes what the model has computed, prompts included, so that its KV is complete
    wherever a block can be hit or sent. Drafts are drawn with the parameters of the request and the random number of
    their output index, which makes them equal to the model's tokens as often as the distributions allow.
    """

    def __init__(
        self,
        batch: InputBatch,
        drafter: Drafter,
        backend: AttentionBackend,
        make_kv_caches: Callable[[], list[KVCache]],
        device: torch.device,
        rejection: RejectionSampler | None = None,
    ) -> None:
        """``make_kv_caches`` allocates the drafter's caches. With ``rejection`` drafts are drawn with numbers of their
        own, and it learns what they were drawn from."""
        self._batch = batch
        self.drafter: Drafter | None = drafter
        """None while its weights are asleep."""
        self._backend = backend
        self._make_kv_caches = make_kv_caches
        self._kv_caches = make_kv_caches()
        self._device = device
        self._rejection = rejection
        self.least_confidence = LEAST_CONFIDENCE
        self._sampler = Sampler(Purpose.SAMPLE if rejection is None else Purpose.DRAFT)
        self._computed: dict[str, int] = {}
        """How many tokens of a request have the drafter's KV; a request that is absent: those that the model has."""

    @property
    def _awake(self) -> Drafter:
        assert self.drafter is not None, "the weights are asleep"
        return self.drafter

    def make_kv_caches(self) -> None:
        """Allocate empty KV caches, if there are none."""
        if not self._kv_caches:
            self._kv_caches = self._make_kv_caches()

    def drop_kv_caches(self) -> None:
        """Drop the KV caches with their content."""
        self._kv_caches = []

    def update(self, step: SchedulerOutput) -> None:
        changed = [*step.finished_req_ids, *step.preempted_req_ids, *step.scheduled_cached_reqs.resumed_token_ids]
        changed += [new.req_id for new in step.scheduled_new_reqs]
        for req_id in changed:
            self._computed.pop(req_id, None)
        self._awake.forget(changed)

    def propose(self, step: StepInputs, hidden: Tensor, wanted: Mapping[str, int]) -> dict[str, list[int]]:
        ranges = self._ranges(step, wanted)
        drafts = self._propose(step, hidden, ranges) if len(ranges.places) else {}
        self._awake.keep(step, hidden, ranges.computed)
        return drafts

    def _propose(self, step: StepInputs, hidden: Tensor, ranges: _Ranges) -> dict[str, list[int]]:
        req_ids = [step.req_ids[place] for place in ranges.places.tolist()]
        at_once = self._awake.at_once
        if at_once is not None and self._is_greedy(step.rows[ranges.places], ranges.counts):
            return self._draft_at_once(at_once, step, hidden, ranges, req_ids)
        with torch.inference_mode():
            return self._draft(step, hidden, ranges, req_ids)

    def _draft(self, step: StepInputs, hidden: Tensor, ranges: _Ranges, req_ids: list[str]) -> dict[str, list[int]]:
        """Compute the tokens of ``ranges``, then draw drafts with the drafter's operations."""
        inputs, output = self._compute(step, hidden, ranges, req_ids)
        ends = ranges.starts + ranges.lengths
        drawing = np.flatnonzero(ranges.counts)
        if not len(drawing):
            return {}
        last = output[to_device(inputs.cu_query_lens[1:][drawing].astype(np.int64) - 1, self._device)]
        drawing_ids = [req_ids[place] for place in drawing.tolist()]
        drafts = self._draw(drawing_ids, inputs.rows[drawing], ends[drawing], ranges.counts[drawing], last)
        if self._awake.keeps_drafts:
            for req_id, tokens in drafts.items():
                self._computed[req_id] += len(tokens) - 1  # nothing follows the last one
        return drafts

    def _compute(
        self, step: StepInputs, hidden: Tensor, ranges: _Ranges, req_ids: list[str]
    ) -> tuple[StepInputs, Tensor]:
        """Compute the tokens of ``ranges``. Returns them and the drafter's states."""
        inputs = self._batch.gather(req_ids, step.rows[ranges.places], ranges.starts, ranges.lengths)
        output = self._forward(inputs, self._awake.states(step, hidden, ranges.places, inputs))
        self._computed.update(zip(req_ids, (ranges.starts + ranges.lengths).tolist(), strict=True))
        return inputs, output

    def _is_greedy(self, rows: Ints, counts: Ints) -> bool:
        """Return whether the drafts of a few requests are those of the largest logits."""
        batch = self._batch
        if self._rejection is not None or batch.logits_processors or batch.block_table.num_groups > 1:
            return False
        return len(rows) <= _FEW_REQUESTS and batch.are_greedy(rows[counts > 0])

    def _draft_at_once(
        self, at_once: GreedyDrafts, step: StepInputs, hidden: Tensor, ranges: _Ranges, req_ids: list[str]
    ) -> dict[str, list[int]]:
        starts, ends = ranges.starts, ranges.starts + ranges.lengths
        if ranges.lengths.max() > _FEW_TOKENS:
            with torch.inference_mode():
                self._compute(step, hidden, ranges, req_ids)
            starts = ends - 1  # the state of the last token is needed again
        columns = (step.rows[ranges.places], starts, ends, ranges.counts)
        found = at_once.draft(self._batch, columns, self._kv_caches, self.least_confidence)
        drafts = {}
        for req_id, end, tokens in zip(req_ids, ends.tolist(), found, strict=True):
            self._computed[req_id] = end + max(len(tokens) - 1, 0)  # nothing follows the last one
            if tokens:
                drafts[req_id] = tokens
        return drafts

    def _ranges(self, step: StepInputs, wanted: Mapping[str, int]) -> _Ranges:
        batch, rows = self._batch, step.rows
        firsts = step.positions[step.cu_query_lens[:-1]].tolist()
        columns = zip(
            step.req_ids,
            firsts,
            step.seq_lens.tolist(),
            batch.num_tokens(rows).tolist(),
            batch.num_slots(rows).tolist(),
            strict=True,
        )
        found, computed = [], []
        for place, (req_id, first, seq_len, known, room) in enumerate(columns):
            # The last token was drawn in this step, and the model has not computed it.
            computed.append(min(seq_len, known - 1))
            count = max(0, min(wanted.get(req_id, 0), room - known + 1))
            end = known if count else computed[-1]
            # A draft that was rejected has the KV of another token.
            done = self._computed[req_id] = min(self._computed.get(req_id, first), computed[-1])
            if end > done:
                found.append((place, done, end - done, count))
        numbers = np.array(found, dtype=np.int64).reshape(-1, 4)
        places, starts, lengths, counts = np.ascontiguousarray(numbers.T)
        return _Ranges(places, starts, lengths, counts, np.array(computed, dtype=np.int64))

    def _draw(self, req_ids: list[str], rows: Ints, ends: Ints, counts: Ints, last: Tensor) -> dict[str, list[int]]:
        """Draw ``counts`` [n] drafts of these requests one after the other, the first from the states ``last``."""
        drafts: dict[str, list[int]] = {req_id: [] for req_id in req_ids}
        drawn_from: dict[str, list[npt.NDArray[np.float64]]] = {req_id: [] for req_id in req_ids}
        batch, number, confidence = self._batch, 0, np.ones(len(req_ids), dtype=np.float32)
        while True:
            logits = self._awake.compute_logits(last).cpu().numpy()
            batch.logits_processors.apply(logits, rows)
            params, output_indices = batch.sampling(rows)
            tokens = np.maximum(self._sampler.sample(logits, params, output_indices + number), 0)
            for row, (req_id, token_id) in enumerate(zip(req_ids, tokens.tolist(), strict=True)):
                drafts[req_id].append(token_id)
                if self._rejection is not None and params[row].temperature != 0.0:
                    drawn_from[req_id].append(distribution(logits[row], params[row]))
            number += 1
            confidence *= _probabilities(logits, tokens)
            going = np.flatnonzero((counts > number) & (confidence >= self.least_confidence))
            if not len(going):
                break
            req_ids = [req_ids[place] for place in going.tolist()]
            rows, ends, counts, confidence = rows[going], ends[going], counts[going], confidence[going]
            batch.place_drafts(rows, ends + number - 1, tokens[going])
            inputs = batch.gather(req_ids, rows, ends + number - 1, np.ones_like(rows))
            last = self._forward(inputs, last[to_device(going, self._device)])
        if self._rejection is not None:
            for req_id, each in drawn_from.items():
                self._rejection.keep(req_id, each)
        return drafts

    def _forward(self, inputs: StepInputs, states: Tensor | None) -> Tensor:
        plan = self._backend.plan(inputs.cu_query_lens, inputs.seq_lens, inputs.block_tables, inputs.slot_mapping)
        token_ids, positions = (to_device(array, self._device) for array in (inputs.token_ids, inputs.positions))
        return self._awake.forward(token_ids, positions, states, self._kv_caches, plan)

    def dummy_run(self, positions: Ints, hidden: Tensor, plan: StepArrays) -> None:
        """Compute tokens at ``positions`` [T] for a profile, after ``hidden`` [T, hidden_size] of the model."""
        positions_tensor = to_device(positions, self._device)
        token_ids = torch.zeros_like(positions_tensor)
        self._awake.forward(token_ids, positions_tensor, hidden, self._kv_caches, self._backend.plan(*plan))


def _probabilities(logits: npt.NDArray[np.float32], tokens: Ints) -> npt.NDArray[np.float32]:
    """Return the probability [n] of each token [n] in its row of ``logits`` [n, vocab], which are overwritten."""
    logits -= logits[np.arange(len(tokens)), tokens][:, None]
    with np.errstate(over="ignore", invalid="ignore"):  # a token far below the best, or no finite logit: zero
        found: npt.NDArray[np.float32] = 1 / np.exp(logits, out=logits).sum(axis=1)
    found[np.isnan(found)] = 0.0
    return found
