"""Defines what proposes tokens, and verifies drafts: a draft counts while it equals the token that is drawn at its
position.

Sampling runs in passes. The first draws the next token of every request; a request that drew its draft takes part in
the following pass with the row after it. Each pass draws as a step without drafts does, from the same state of the
request, so every token is the one that would have been drawn without speculation.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput

from ..attention.attention_backend import IntArray
from ..batch.input_batch import Ints, StepInputs
from ..device.device_link import to_device
from ..sampler.host.logprobs import RowLogprobs
from ..sampler.host.sampler import NO_TOKEN
from ..sampler.step_sampler import StepSampler, drop_undrawn, rows_of
from .rejection import RejectionSampler

StepArrays = tuple[IntArray, IntArray, IntArray, IntArray]
"""The arguments of :meth:`AttentionBackend.plan`."""


class Proposer(Protocol):
    """Proposes the tokens that may follow the last one of a request."""

    def update(self, step: SchedulerOutput) -> None:
        """Forget requests that ended or were preempted, and those that begin or resume. The batch takes the step
        afterwards."""

    def propose(self, step: StepInputs, hidden: Tensor, wanted: Mapping[str, int]) -> dict[str, list[int]]:
        """Return drafts of requests of ``step``: at most ``wanted[request]`` of each, none of one that is not named.

        The step's tokens are drawn and appended to the batch. ``hidden`` [T, hidden_size] holds the model's last hidden
        states of the step's tokens. Called after every step, with requests that want drafts or without.
        """

    def make_kv_caches(self) -> None:
        """Allocate empty KV caches, if there are none."""

    def drop_kv_caches(self) -> None:
        """Drop the KV caches with their content; no step may run before :meth:`make_kv_caches`."""

    def dummy_run(self, positions: Ints, hidden: Tensor, plan: StepArrays) -> None:
        """Compute what follows a step of the model, for a profile.

        ``positions`` [T] are the tokens', ``hidden`` [T, hidden_size] the model's last hidden states.
        """


class Speculation:
    """Follows the steps of one model runner."""

    def __init__(self, sampler: StepSampler, proposer: Proposer, rejection: RejectionSampler | None) -> None:
        """``rejection`` accepts drafts by another rule, which keeps the distribution but not the tokens; None: drafts
        count if they equal the tokens that are drawn."""
        self._sampler = sampler
        self.proposer = proposer
        self._rejection = rejection
        self._wanted: Mapping[str, int] = {}
        self._is_paused = False
        self.proposed: Mapping[str, list[int]] = {}
        """The drafts after the step that was sampled last, by request."""

    def update(self, step: SchedulerOutput) -> None:
        """Take what changed with a step, before it is computed."""
        self.proposer.update(step)
        if self._rejection is not None:
            self._rejection.forget(step.finished_req_ids + step.preempted_req_ids)
        self._wanted, self._is_paused = step.num_drafts_wanted, step.drafts_paused

    def verify(
        self, inputs: StepInputs, logits: Tensor, grammar: GrammarOutput | None, output: ModelRunnerOutput
    ) -> None:
        """Draw the tokens of the requests of ``inputs.sampled`` from ``logits`` [``inputs.rows_to_verify``, vocab]."""
        output.sampled_token_ids = [[] for _ in inputs.req_ids]
        output.num_verified = {req_id: len(drafts) for req_id, drafts in inputs.drafts.items()}
        if self._sampler.measures:
            self._sampler.measure(inputs, _select(logits, _first_rows(inputs)), output)
        # Strict by default: rejection sampling uses other random numbers than decoding, so tokens would depend on the
        # load and change after a preemption. With the drafter drawing by the same number it gains at most 2 % of a
        # step's tokens (105 questions of the demo model).
        is_stateless = self._rejection is None and self._sampler.only_draws(grammar)
        if not (is_stateless and self._draw_at_once(inputs, logits, output)):
            self._draw_in_passes(inputs, logits, _first_rows(inputs), grammar, output)
        self._sampler.publish_verified(inputs, output)

    def _draw_at_once(self, inputs: StepInputs, logits: Tensor, output: ModelRunnerOutput) -> bool:
        """Draw from all rows, as if every draft were right, and keep the tokens up to the first that differs.

        Every row gets the token that it would get in its pass, because no request has a state that tokens change.
        Returns False, with nothing done, if some row has no token.
        """
        sampler, batch = self._sampler, self._sampler.batch
        rows, places = rows_of(inputs, inputs.sampled), inputs.sampled.tolist()
        drafts = [inputs.drafts.get(inputs.req_ids[place], ()) for place in places]
        params, first_indices = batch.sampling(rows)
        all_params: list[CoreSamplingParams] = []
        indices: list[int] = []
        for each, first, proposed in zip(params, first_indices.tolist(), drafts, strict=True):
            all_params += [each] * (1 + len(proposed))
            indices += range(first, first + 1 + len(proposed))
        output_indices = np.array(indices, dtype=np.int64)
        if sampler.device_sampler is not None:
            tokens = sampler.device_sampler.sample(logits, all_params, output_indices)
        else:
            tokens = sampler.draw(logits.cpu().numpy(), all_params, output_indices)
        if NO_TOKEN in tokens:
            return False
        start = 0
        for row, place, proposed in zip(rows.tolist(), places, drafts, strict=True):
            kept = tokens[start : start + _num_equal(proposed, tokens, start) + 1]
            output.sampled_token_ids[place] = kept
            batch.extend(row, kept)
            start += 1 + len(proposed)
        return True

    def _draw_in_passes(
        self,
        inputs: StepInputs,
        logits: Tensor,
        starts: Ints,
        grammar: GrammarOutput | None,
        output: ModelRunnerOutput,
    ) -> None:
        masks = None if grammar is None else _MasksByPass(grammar)
        places, number, found = inputs.sampled, 0, output
        while len(places):
            req_ids = [inputs.req_ids[place] for place in places.tolist()]
            all_drafts = [inputs.drafts.get(req_id, ()) for req_id in req_ids]
            drafts = [each[number] if number < len(each) else None for each in all_drafts]
            masked = None if masks is None else masks.of_pass(number, req_ids)
            draw = None if self._rejection is None else self._rejection.bind(req_ids, number, drafts)
            part = _select(logits, starts + number)
            tokens, kept = self._sampler.draw_rows(inputs, places, part, masked, found, draw)
            is_right = self._accept(inputs, places, tokens, kept, output, drafts, is_first=number == 0)
            if number:
                for req_id, count in found.num_nans_in_logits.items():
                    output.num_nans_in_logits[req_id] = output.num_nans_in_logits.get(req_id, 0) + count
            number += 1
            found = ModelRunnerOutput([], [])  # what later rows show, a step without drafts would report later
            if masks is not None:
                is_right &= [masks.has_row(req_id, number) for req_id in req_ids]
            places, starts = places[is_right], starts[is_right]

    def _accept(
        self,
        inputs: StepInputs,
        places: Ints,
        tokens: list[int],
        kept: RowLogprobs | None,
        output: ModelRunnerOutput,
        drafts: Sequence[int | None],
        is_first: bool,
    ) -> npt.NDArray[np.bool_]:
        """Add the tokens of a pass to the batch and ``output``. Returns [n], whether each is the request's draft.

        A request without a token has none in its first pass. In a later one it ends with the tokens so far: the next
        step then draws this token again, and reports why it cannot.
        """
        indices = places.tolist()
        is_drawn = np.array([token_id != NO_TOKEN for token_id in tokens])
        is_right = np.array([token_id == draft for token_id, draft in zip(tokens, drafts, strict=True)])
        for index, token_id in zip(indices, tokens, strict=True):
            if token_id != NO_TOKEN:
                output.sampled_token_ids[index].append(token_id)
        known = np.array(tokens, dtype=np.int64)
        if is_first and not is_drawn.all():
            known = np.array(drop_undrawn(output, tokens, indices), dtype=np.int64)
            is_drawn[:] = True
        self._sampler.batch.append(inputs.rows[places][is_drawn], known[is_drawn])
        if kept is not None:
            for row, logprobs in kept.logprobs_of(np.maximum(known, 0).tolist()).items():
                if not is_drawn[row]:
                    continue
                before = output.logprobs.setdefault(inputs.req_ids[indices[row]], logprobs)
                if before is not logprobs:
                    before.extend(logprobs)
        return is_right

    def propose(self, inputs: StepInputs, hidden: Tensor, output: ModelRunnerOutput) -> None:
        """Add drafts of the next tokens to ``output``. ``hidden`` [T, hidden_size]: the step's last hidden states."""
        self.proposed = {}
        if self._is_paused and len(inputs.token_ids) == len(inputs.req_ids):
            return  # every request decodes
        wanted = {}
        if self._wanted:
            for req_id, tokens in zip(inputs.req_ids, output.sampled_token_ids, strict=True):
                if tokens and (count := self._wanted.get(req_id, 0)) > 0:
                    wanted[req_id] = count
        output.draft_token_ids = self.proposer.propose(inputs, hidden, wanted)
        self.proposed = output.draft_token_ids.copy()


class _MasksByPass:
    """Holds the rows of a step's bitmask by request, a row for each pass."""

    def __init__(self, grammar: GrammarOutput) -> None:
        self._grammar = grammar
        self._rows: dict[str, list[int]] = {}
        for row, req_id in enumerate(grammar.req_ids):
            self._rows.setdefault(req_id, []).append(row)

    def has_row(self, req_id: str, number: int) -> bool:
        """Return whether the request may draw in pass ``number``."""
        return req_id not in self._rows or len(self._rows[req_id]) > number

    def of_pass(self, number: int, req_ids: Sequence[str]) -> GrammarOutput | None:
        """Return the masks of these requests in pass ``number``; None if none of them has one."""
        forced = self._grammar.forced if number == 0 else {}
        masked = [req_id for req_id in req_ids if req_id in self._rows]
        if not masked and not forced:
            return None
        rows = [self._rows[req_id][number] for req_id in masked]
        return GrammarOutput(masked, self._grammar.bitmask[rows], forced)


def _select(logits: Tensor, rows: Ints) -> Tensor:
    """Return a copy of these rows."""
    return logits[to_device(rows, logits.device)]


def _num_equal(drafts: Sequence[int], tokens: Sequence[int], start: int) -> int:
    """Return how many drafts equal the tokens from ``start`` on, up to the first that does not."""
    for number, draft in enumerate(drafts):
        if draft != tokens[start + number]:
            return number
    return len(drafts)


def _first_rows(inputs: StepInputs) -> Ints:
    """Return the first row of logits of each request of ``inputs.sampled``, [S]."""
    counts = inputs.num_logit_rows()
    return np.cumsum(counts) - counts
