"""Proposes tokens with a small model, whose KV lies next to that of the model that it drafts for."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.scheduler_output import SchedulerOutput

from ..attention.attention_backend import AttentionBackend, KVCache
from ..batch.input_batch import InputBatch, Ints, StepInputs
from ..device.device_link import to_device
from ..sampler.device.device_sampler import DeviceSampler, RowDemands
from ..sampler.host.sampler import Purpose, Sampler
from .drafter import Drafter, RecordedDrafter
from .greedy_drafts import DraftRange, GreedyDrafts
from .rejection import RejectionSampler, distribution
from .speculation import StepArrays

# Six stories in one stream, four drafts: 836 tokens for each second of CPU instead of 558. A high
# num_speculative_tokens then costs little.
LEAST_CONFIDENCE = 0.4
"""A draft that all drafts of its step are right with a lower probability than this is the last one: computing the next
one would cost more than it gains."""
# One call computes requests one after the other. With more of them, the drafter's operations read each weight once for
# all.
_FEW_REQUESTS = 8
"""Up to so many requests are drafted for one after the other, in one call."""


class _Ranges(NamedTuple):
    """Says which positions the drafter computes first: those that the model has computed, and the last token."""

    places: list[int]
    """Requests of the step."""
    req_ids: list[str]
    ranges: list[DraftRange]
    computed: list[int]
    """[R]: how many tokens of each request of the step the model has computed."""


class ModelProposer:
    """Fulfils :class:`~.speculation.Proposer`.

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
        recorded: RecordedDrafter | None = None,
        device_sampler: DeviceSampler | None = None,
    ) -> None:
        """``make_kv_caches`` allocates the drafter's caches. With ``rejection`` drafts are drawn with numbers of their
        own, and it learns what they were drawn from. ``recorded`` runs the steps of which it can make recordings; None:
        the drafter computes every step. ``device_sampler`` draws drafts where the host does not look at logits; None:
        the host draws all."""
        self._batch = batch
        self._recorded = recorded
        self._drafter: Drafter | None = drafter
        self._backend = backend
        self._make_kv_caches = make_kv_caches
        self._kv_caches = make_kv_caches()
        self._device = device
        self._rejection = rejection
        self.least_confidence = LEAST_CONFIDENCE
        self._sampler = Sampler(Purpose.SAMPLE if rejection is None else Purpose.DRAFT)
        self._device_sampler = device_sampler if rejection is None else None
        self._computed: dict[str, int] = {}
        """How many tokens of a request have the drafter's KV; a request that is absent: those that the model has."""

    @property
    def drafter(self) -> Drafter | None:
        """What computes the drafts; None while its weights are asleep."""
        return self._drafter

    @drafter.setter
    def drafter(self, drafter: Drafter | None) -> None:
        self._drafter = drafter
        self._forget_recordings()

    @property
    def _awake(self) -> Drafter:
        assert self._drafter is not None, "the weights are asleep"
        return self._drafter

    def _forget_recordings(self) -> None:
        if self._recorded is not None:
            self._recorded.forget()

    def make_kv_caches(self) -> None:
        """Allocate empty KV caches, if there are none."""
        if not self._kv_caches:
            self._kv_caches = self._make_kv_caches()

    def drop_kv_caches(self) -> None:
        """Drop the KV caches with their content."""
        self._kv_caches = []
        self._forget_recordings()

    def update(self, step: SchedulerOutput) -> None:
        changed = [*step.finished_req_ids, *step.preempted_req_ids, *step.scheduled_cached_reqs.resumed_token_ids]
        changed += [new.req_id for new in step.scheduled_new_reqs]
        for req_id in changed:
            self._computed.pop(req_id, None)
        self._awake.forget(changed)

    def propose(self, step: StepInputs, hidden: Tensor, wanted: Mapping[str, int]) -> dict[str, list[int]]:
        found = self._ranges(step, wanted)
        drafts = self._propose(step, hidden, found) if found.places else {}
        drafting = {req_id for req_id, each in zip(found.req_ids, found.ranges, strict=True) if each.most}
        # What is not drafted now may be later, and a block may be hit or sent: its draft KV has to be complete as well.
        if len(drafting) < len(step.req_ids):
            others = [place for place, req_id in enumerate(step.req_ids) if req_id not in drafting]
            self._awake.keep(step, hidden, others, [found.computed[place] for place in others])
        return drafts

    def _propose(self, step: StepInputs, hidden: Tensor, found: _Ranges) -> dict[str, list[int]]:
        at_once = self._awake.at_once
        if at_once is not None and self._is_greedy(found.ranges):
            return self._draft_at_once(at_once, step, hidden, found)
        with torch.inference_mode():
            return self._draft(step, hidden, found)

    def _draft(self, step: StepInputs, hidden: Tensor, found: _Ranges) -> dict[str, list[int]]:
        """Compute the tokens of the ranges, then draw drafts with the drafter's operations."""
        inputs, output, logits = self._compute(step, hidden, found)
        _, _, ends, counts = np.array(found.ranges, dtype=np.int64).T
        drawing = np.flatnonzero(counts)
        if not len(drawing):
            return {}
        last_rows = to_device(inputs.cu_query_lens[1:][drawing].astype(np.int64) - 1, self._device)
        last = output[last_rows]
        first_logits = self._awake.compute_logits(last) if logits is None else logits[last_rows]
        drawing_ids = [found.req_ids[place] for place in drawing.tolist()]
        drafts = self._draw(drawing_ids, inputs.rows[drawing], ends[drawing], counts[drawing], last, first_logits)
        if self._awake.keeps_drafts:
            for req_id, tokens in drafts.items():
                self._computed[req_id] += len(tokens) - 1  # nothing follows the last one
        return drafts

    def _compute(self, step: StepInputs, hidden: Tensor, found: _Ranges) -> tuple[StepInputs, Tensor, Tensor | None]:
        """Compute the tokens of the ranges. Returns them, the drafter's states, and the logits as
        :meth:`_forward` does."""
        rows, starts, ends, _ = np.array(found.ranges, dtype=np.int64).T
        inputs = self._batch.gather(found.req_ids, rows, starts, ends - starts)
        places = np.array(found.places, dtype=np.int64)
        output, logits = self._forward(inputs, self._awake.states(step, hidden, places, inputs))
        self._computed.update(zip(found.req_ids, ends.tolist(), strict=True))
        return inputs, output, logits

    def _is_greedy(self, ranges: Sequence[DraftRange]) -> bool:
        """Return whether the drafts of a few requests are those of the largest logits."""
        batch = self._batch
        if self._rejection is not None or batch.logits_processors or batch.block_table.num_groups > 1:
            return False
        if batch.media.images and any(batch.media.turn(each.row) for each in ranges):
            return False  # the one call rotates by the index of a token
        return len(ranges) <= _FEW_REQUESTS and batch.are_greedy([each.row for each in ranges if each.most])

    def _draft_at_once(
        self, at_once: GreedyDrafts, step: StepInputs, hidden: Tensor, found: _Ranges
    ) -> dict[str, list[int]]:
        ranges, drafter = found.ranges, self._awake
        if any(each.end - each.start > at_once.most_tokens for each in ranges):
            with torch.inference_mode():
                self._compute(step, hidden, found)
            ranges = [each._replace(start=each.end - 1) for each in ranges]  # the last token's state is needed again
        states = drafter.state_addresses(step, hidden, found.places, ranges)
        proposed = at_once.draft(self._batch, ranges, self._kv_caches, self.least_confidence, states)
        drafts = {}
        for req_id, each, tokens in zip(found.req_ids, ranges, proposed, strict=True):
            kept = max(len(tokens) - 1, 0) if drafter.keeps_drafts else 0  # nothing follows the last one
            self._computed[req_id] = each.end + kept
            if tokens:
                drafts[req_id] = tokens
        return drafts

    def _ranges(self, step: StepInputs, wanted: Mapping[str, int]) -> _Ranges:
        batch, found = self._batch, _Ranges([], [], [], [])
        first_rows = step.cu_query_lens[:-1].tolist()
        columns = zip(step.req_ids, step.rows.tolist(), step.seq_lens.tolist(), first_rows, strict=True)
        for place, (req_id, row, seq_len, first_row) in enumerate(columns):
            first, known = step.positions.item(first_row), batch.num_tokens(row)
            # The last token was drawn in this step, and the model has not computed it.
            computed = min(seq_len, known - 1)
            found.computed.append(computed)
            count = max(0, min(wanted.get(req_id, 0), batch.num_slots(row) - known + 1))
            end = known if count else computed
            # A draft that was rejected has the KV of another token.
            done = min(self._computed.get(req_id, first), computed)
            if not self._awake.keeps_drafts:
                done = max(done, first)  # the states of tokens that were not followed are gone
            self._computed[req_id] = done
            if end > done:
                found.places.append(place)
                found.req_ids.append(req_id)
                found.ranges.append(DraftRange(row, done, end, count))
        return found

    def _draw(
        self, req_ids: list[str], rows: Ints, ends: Ints, counts: Ints, last: Tensor, first_logits: Tensor
    ) -> dict[str, list[int]]:
        """Draw ``counts`` [n] drafts of these requests one after the other, the first from ``first_logits``, which
        belong to the states ``last``."""
        on_device: Tensor | None = first_logits
        drafts: dict[str, list[int]] = {req_id: [] for req_id in req_ids}
        drawn_from: dict[str, list[npt.NDArray[np.float64]]] = {req_id: [] for req_id in req_ids}
        batch, number, confidence = self._batch, 0, np.ones(len(req_ids), dtype=np.float32)
        while True:
            computed = self._awake.compute_logits(last) if on_device is None else on_device
            params, output_indices = batch.sampling(rows)
            if self._device_sampler is not None and not batch.logits_processors:
                tokens, shares = _draw_on_device(self._device_sampler, computed, params, output_indices + number)
            else:
                logits = computed.cpu().numpy()
                batch.logits_processors.apply(logits, rows)
                tokens = np.maximum(self._sampler.sample(logits, params, output_indices + number), 0)
                if self._rejection is not None:
                    for row, (req_id, asked) in enumerate(zip(req_ids, params, strict=True)):
                        if asked.temperature != 0.0:
                            drawn_from[req_id].append(distribution(logits[row], asked))
                shares = _probabilities(logits, tokens)
            for req_id, token_id in zip(req_ids, tokens.tolist(), strict=True):
                drafts[req_id].append(token_id)
            number += 1
            confidence *= shares
            going = np.flatnonzero((counts > number) & (confidence >= self.least_confidence))
            if not len(going):
                break
            req_ids = [req_ids[place] for place in going.tolist()]
            rows, ends, counts, confidence = rows[going], ends[going], counts[going], confidence[going]
            batch.place_drafts(rows, ends + number - 1, tokens[going])
            inputs = batch.gather(req_ids, rows, ends + number - 1, np.ones_like(rows))
            last, on_device = self._forward(inputs, last[to_device(going, self._device)])
        if self._rejection is not None:
            for req_id, each in drawn_from.items():
                self._rejection.keep(req_id, each)
        return drafts

    def _forward(self, inputs: StepInputs, states: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute a step of the drafter. Returns its states [T, hidden_size], and the logits [T, vocab] if they were
        computed, too. Both hold until the next step."""
        if self._recorded is not None:
            computed = self._recorded.compute(self._awake, inputs, states, self._kv_caches)
            if computed is not None:
                return computed
        plan = self._backend.plan(inputs.cu_query_lens, inputs.seq_lens, inputs.block_tables, inputs.slot_mapping)
        turned = inputs.positions if inputs.rope is None else inputs.rope
        token_ids, positions = (to_device(array, self._device) for array in (inputs.token_ids, turned))
        return self._awake.forward(token_ids, positions, states, self._kv_caches, plan), None

    def dummy_run(self, positions: Ints, hidden: Tensor, plan: StepArrays) -> None:
        """Compute tokens at ``positions`` [T] for a profile, after ``hidden`` [T, hidden_size] of the model."""
        positions_tensor = to_device(positions, self._device)
        token_ids = torch.zeros_like(positions_tensor)
        self._awake.forward(token_ids, positions_tensor, hidden, self._kv_caches, self._backend.plan(*plan))


def _draw_on_device(
    sampler: DeviceSampler, logits: Tensor, params: Sequence[CoreSamplingParams], output_indices: Ints
) -> tuple[Ints, npt.NDArray[np.float32]]:
    """Draw a token [n] from each row of ``logits`` [n, vocab], which stay on the device. Returns them, and their
    probabilities [n] before temperature and limits."""
    # A copy of the logits for each draft was 0.6 MB a row of 151,936 tokens, and the host computed their sums.
    demands = RowDemands({}, dict.fromkeys(range(len(params)), (0, ())))
    drawn = sampler.start(logits, params, output_indices, demands)
    tokens = np.maximum(np.array(drawn.tokens.wait(), dtype=np.int64), 0)
    found = drawn.wait_for_logprobs()
    shares = np.exp(np.array([found[row].sampled[0] for row in range(len(params))], dtype=np.float32))
    return tokens, np.nan_to_num(shares)


def _probabilities(logits: npt.NDArray[np.float32], tokens: Ints) -> npt.NDArray[np.float32]:
    """Return the probability [n] of each token [n] in its row of ``logits`` [n, vocab], which are overwritten."""
    logits -= logits[np.arange(len(tokens)), tokens][:, None]
    with np.errstate(over="ignore", invalid="ignore"):  # a token far below the best, or no finite logit: zero
        found: npt.NDArray[np.float32] = 1 / np.exp(logits, out=logits).sum(axis=1)
    found[np.isnan(found)] = 0.0
    return found
