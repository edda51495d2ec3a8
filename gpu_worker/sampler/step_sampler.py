"""Draws the tokens of a step from the model's logits: one for each row that it is asked for."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tokenloom.engine_core.wire.core_sampling_params import SamplingParams
from tokenloom.engine_core.wire.scheduler_output import GrammarOutput, ModelRunnerOutput

from ..batch.expected_tokens import ExpectedTokens
from ..batch.input_batch import InputBatch, StepInputs
from ..cuda.device_rows import RowDraws
from ..cuda.packed_copy import to_device
from ..cuda.sampler import DeviceSampler
from .grammar_mask import allow_only, force
from .logits_stats import LogitsMeter
from .logprobs import KeptLogits
from .pending_step import PendingStep, by_request, drop_undrawn
from .sampler import NO_TOKEN, Sampler

Ints = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]


class Draw(Protocol):
    """Draws a token for each row; see :meth:`Sampler.sample`."""

    def __call__(self, logits: Logits, params: Sequence[SamplingParams], output_indices: Ints) -> list[int]: ...


class StepSampler:
    """Applies masks and logits processors, draws, and finds log probabilities."""

    def __init__(
        self,
        batch: InputBatch,
        device_sampler: DeviceSampler | None = None,
        *,
        count_nans: bool = False,
        logits_metrics_interval: int = 0,
        publish: Callable[[Ints], None] | None = None,
    ) -> None:
        """``publish``: is called with the tokens [S] of each step that draws any. The others are those of
        :class:`~tokenloom.gpu_worker.model_runner.ModelRunner`.
        """
        self.batch = batch
        self.draw: Draw = Sampler().sample
        """Draws on the host."""
        self.device_sampler = device_sampler
        self._publish = publish
        self._count_nans = count_nans
        self._meter = LogitsMeter(logits_metrics_interval) if logits_metrics_interval else None

    def sample(
        self, inputs: StepInputs, logits: Tensor, grammar: GrammarOutput | None, output: ModelRunnerOutput
    ) -> None:
        """Draw a token for each request of ``inputs.sampled`` [S] from its row of ``logits`` [S, vocab]."""
        indices = inputs.sampled.tolist()
        self.measure(inputs, logits, output)
        tokens, kept = self.draw_rows(inputs, inputs.sampled, logits, grammar, output)
        output.sampled_token_ids = by_request(tokens, indices, len(inputs.req_ids))
        if NO_TOKEN in tokens:
            tokens = drop_undrawn(output, tokens, indices)
        drawn = np.array(tokens, dtype=np.int64)
        self.batch.append(rows_of(inputs, inputs.sampled), drawn)
        if self._publish is not None:
            self._publish(drawn)
        if kept is not None:
            by_row = kept.logprobs_of(tokens)
            output.logprobs = {inputs.req_ids[indices[row]]: logprobs for row, logprobs in by_row.items()}

    def may_pend(self, inputs: StepInputs, grammar: GrammarOutput | None) -> bool:
        """Return whether the device draws all tokens of a step by itself, so that :meth:`start` may begin it."""
        if self.device_sampler is None or self._count_nans or self._publish is not None:
            return False
        return not len(self._places_on_host(inputs, inputs.sampled, grammar))

    def start(
        self,
        inputs: StepInputs,
        logits: Tensor,
        draws: RowDraws,
        output: ModelRunnerOutput,
        expected: ExpectedTokens,
    ) -> PendingStep:
        """Do what :meth:`sample` does without waiting for the device: the batch and the output get the tokens later.

        ``draws``: what the rows of ``inputs.sampled`` ask for. ``expected`` gets the tokens when they are there.
        """
        assert self.device_sampler is not None, "may_pend comes first"
        self.measure(inputs, logits, output)
        drawn = self.device_sampler.draw(logits, draws.columns)
        draws.keep(drawn)
        tokens = self.device_sampler.fetch(drawn)
        expected.add(self.batch.expect_tokens(rows_of(inputs, inputs.sampled)), tokens)
        return PendingStep(output, tokens, inputs.sampled.tolist())

    @property
    def measures(self) -> bool:
        """Return whether the logits of some steps are measured."""
        return self._meter is not None

    def measure(self, inputs: StepInputs, logits: Tensor, output: ModelRunnerOutput) -> None:
        """Report statistics of ``logits`` [S, vocab] of ``inputs.sampled``, if this step is to be measured."""
        if self._meter is not None and self._meter.is_due():
            measured = self._meter.measure(logits, self.batch.sampling(inputs.rows[inputs.sampled])[0])
            stats_of = zip(inputs.sampled.tolist(), measured, strict=True)
            output.logits_stats = {inputs.req_ids[index]: stats for index, stats in stats_of if stats is not None}

    def only_draws(self, grammar: GrammarOutput | None) -> bool:
        """Return whether the tokens follow from logits, parameters and output indices alone."""
        return grammar is None and not self._count_nans and self.batch.only_draws

    def draw_rows(
        self,
        inputs: StepInputs,
        places: Ints,
        logits: Tensor,
        grammar: GrammarOutput | None,
        output: ModelRunnerOutput,
        draw: Draw | None = None,
    ) -> tuple[list[int], KeptLogits | None]:
        """Draw the next token of the requests ``places`` [n] of the step from ``logits`` [n, vocab].

        Returns the tokens, ``NO_TOKEN`` where no token can be drawn, and what log probabilities need. Adds to
        ``output`` what only the logits show. ``draw`` replaces :attr:`draw`.
        """
        if self.device_sampler is not None and draw is None and not self._count_nans:
            return self._draw_on_device(self.device_sampler, inputs, places, logits, grammar, output)
        return self._draw_on_host(inputs, places, logits, grammar, output, draw or self.draw)

    def _draw_on_device(
        self,
        device_sampler: DeviceSampler,
        inputs: StepInputs,
        places: Ints,
        logits: Tensor,
        grammar: GrammarOutput | None,
        output: ModelRunnerOutput,
    ) -> tuple[list[int], KeptLogits | None]:
        """Let the device draw, but for the rows that ask for changed logits or for log probabilities: only their logits
        come to the host."""
        pending = device_sampler.start(logits, *self.batch.sampling(rows_of(inputs, places)))
        hosted = self._places_on_host(inputs, places, grammar)
        if not len(hosted):
            return pending.wait(), None
        own = logits[to_device(hosted, logits.device)]
        drawn, kept = self._draw_on_host(inputs, places[hosted], own, grammar, output, self.draw)
        tokens = pending.wait()
        for index, token_id in zip(hosted.tolist(), drawn, strict=True):
            tokens[index] = token_id
        if kept is not None:
            kept = replace(kept, indices=[int(hosted[index]) for index in kept.indices])
        return tokens, kept

    def _places_on_host(self, inputs: StepInputs, places: Ints, grammar: GrammarOutput | None) -> Ints:
        """Return the indices among ``places`` of the requests whose tokens the host draws."""
        if self.only_draws(grammar):
            return places[:0]
        constrained = set() if grammar is None else {*grammar.req_ids, *grammar.forced}
        wanted = [
            self.batch.draws_on_host(row) or inputs.req_ids[place] in constrained
            for place, row in zip(places.tolist(), inputs.rows[places].tolist(), strict=True)
        ]
        return np.flatnonzero(wanted)

    def _draw_on_host(
        self,
        inputs: StepInputs,
        places: Ints,
        on_device: Tensor,
        grammar: GrammarOutput | None,
        output: ModelRunnerOutput,
        draw: Draw,
    ) -> tuple[list[int], KeptLogits | None]:
        logits: Logits = on_device.cpu().numpy()
        rows, batch = rows_of(inputs, places), self.batch
        req_ids = [inputs.req_ids[index] for index in places.tolist()] if self._count_nans or grammar else []
        if self._count_nans:
            output.num_nans_in_logits = _count_nans(logits, req_ids)
        kept = batch.logprobs.keep(logits, rows)
        if grammar is not None:
            allow_only(grammar, req_ids, logits)
        batch.logits_processors.apply(logits, rows)
        if grammar is not None:
            force(grammar, req_ids, logits)
        tokens = draw(logits, *batch.sampling(rows))
        if batch.logits_processors and NO_TOKEN in tokens:
            for row, index in enumerate(places.tolist()):
                if tokens[row] == NO_TOKEN and np.isneginf(logits[row]).all():
                    output.without_choice.append(inputs.req_ids[index])
        return tokens, kept


def rows_of(inputs: StepInputs, places: Ints) -> Ints:
    """Return the rows of the batch of the requests ``places``, an ascending part of those of the step."""
    return inputs.rows if len(places) == len(inputs.rows) else inputs.rows[places]


def _count_nans(logits: Logits, req_ids: Sequence[str]) -> dict[str, int]:
    """Count the NaN logits of the rows, [n, vocab], that have any."""
    counts = np.isnan(logits).sum(axis=1).tolist()
    return {req_id: count for req_id, count in zip(req_ids, counts, strict=True) if count}
