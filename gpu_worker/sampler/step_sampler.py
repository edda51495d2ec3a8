"""Draws the tokens of a step from the model's logits, one for each row that it is asked for, and completes the output
of a step once its tokens are on the host.

On a GPU the device draws, except for rows with what it lacks; on a CPU one kernel call, where rows need nothing but a
token; otherwise numpy. All three follow the rule of ``host/sampler.py``.
"""

import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import LogitsStats, Logprobs
from tokenloom.engine_core.data.scheduler_output import GrammarOutput, ModelRunnerOutput

from ..batch.expected_tokens import ExpectedTokens
from ..batch.input_batch import InputBatch, StepInputs
from ..device.device_link import Event, to_device
from .device.device_sampler import NO_CHOICE, NOTHING, DeviceSampler, RowDemands
from .device.sampling_arrays import SampledRows, SamplingRows
from .host.logprobs import JoinedLogprobs, RowLogprobs
from .host.sampler import NO_TOKEN, Sampler


class PendingStep:
    """Fulfils :class:`tokenloom.engine_core.data.scheduler_output.PendingOutput`. Any thread may wait for it."""

    def __init__(self, output: ModelRunnerOutput, drawn: SampledRows, indices: list[int], *, has_masks: bool) -> None:
        """``output``: without tokens yet. ``indices`` [S]: the requests of the step that drew. ``has_masks``: whether
        masks of requests can be why a row has no choice."""
        self._output = output
        self._drawn = drawn
        self._indices = indices
        self._has_masks = has_masks
        self._is_complete = False
        self._lock = threading.Lock()

    def result(self) -> ModelRunnerOutput:
        """Return the output with its tokens, once they are there. Nothing else of the device is waited for."""
        token_ids, logprobs = self._drawn.tokens.wait(), self._drawn.wait_for_logprobs()
        with self._lock:
            if not self._is_complete:
                self._is_complete = True
                self._complete(token_ids, logprobs)
        return self._output

    def _complete(self, token_ids: list[int], logprobs: dict[int, Logprobs]) -> None:
        output, indices = self._output, self._indices
        output.sampled_token_ids = by_request(token_ids, indices, len(output.req_ids))
        output.logprobs = {output.req_ids[indices[row]]: found for row, found in logprobs.items()}
        if min(token_ids) < 0:
            if self._has_masks:
                without = [
                    output.req_ids[at] for at, drawn in zip(indices, token_ids, strict=True) if drawn == NO_CHOICE
                ]
                output.without_choice += without
            drop_undrawn(output, token_ids, indices)


class EndingStep:
    """Fulfils the same for a step that draws no token: the device may still write keys and values, which the blocks of
    an output that is there must hold."""

    def __init__(self, output: ModelRunnerOutput, ended: Event) -> None:
        self._output = output
        self._ended = ended

    def result(self) -> ModelRunnerOutput:
        """Return the output, once the device has computed the step."""
        if not self._ended.query():
            self._ended.synchronize()
        return self._output


def by_request(tokens: list[int], indices: Iterable[int], num_requests: int) -> list[list[int]]:
    """Return the tokens [S] of the requests ``indices`` [S] in a list for each request of the step."""
    if len(tokens) == num_requests:  # every request decodes
        return [[token_id] for token_id in tokens]
    by_request: list[list[int]] = [[] for _ in range(num_requests)]
    for index, token_id in zip(indices, tokens, strict=True):
        by_request[index] = [token_id]
    return by_request


def drop_undrawn(output: ModelRunnerOutput, tokens: list[int], indices: list[int]) -> list[int]:
    """List the requests of the rows without a token in ``output``, unless they are listed as without choice.

    Returns the tokens with an arbitrary one for these rows, as the requests may be in the next step already.
    """
    for row, token_id in enumerate(tokens):
        if token_id < 0:
            output.sampled_token_ids[indices[row]] = []
            req_id = output.req_ids[indices[row]]
            if req_id not in output.without_choice:
                output.without_finite_logit.append(req_id)
    return [max(token_id, 0) for token_id in tokens]


Ints = npt.NDArray[np.int64]
Logits = npt.NDArray[np.float32]


SampleRows = Callable[[Logits, Sequence[CoreSamplingParams], Ints], list[int]]
"""Draws a token for each row; see :meth:`Sampler.sample`."""


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
        """``publish``: is called with the tokens [S] of each step that draws any, or [S, 1 + most drafts] of one that
        verifies drafts, ``NO_TOKEN`` behind those that were accepted. The others are those of
        :class:`~tokenloom.gpu_worker.model_runner.ModelRunner`.
        """
        self.batch = batch
        self.draw: SampleRows = Sampler().sample
        """Draws on the host."""
        self.device_sampler = device_sampler
        self._publish = publish
        self._count_nans = count_nans
        self._meter = LogitsMeter(logits_metrics_interval) if logits_metrics_interval else None

    def sample(
        self, inputs: StepInputs, logits: Tensor, grammar: GrammarOutput | None, output: ModelRunnerOutput
    ) -> None:
        """Sample a token for each request of ``inputs.sampled`` [S] from its row of ``logits`` [S, vocab]."""
        self.measure(inputs, logits, output)
        if self.device_sampler is None and self.only_draws(grammar):
            tokens = self.batch.append_drawn(inputs.sampled, logits)
            if tokens is not None:
                self._report(inputs, tokens, output)
                return
        self._complete(inputs, *self.draw_rows(inputs, inputs.sampled, logits, grammar, output), output)

    def _report(self, inputs: StepInputs, tokens: Ints, output: ModelRunnerOutput) -> None:
        """Put the tokens [S], which the batch has already, into the output."""
        output.sampled_token_ids = by_request(tokens.tolist(), inputs.sampled, len(inputs.req_ids))
        if self._publish is not None:
            # The array is the kernel's and holds until its next call, while sending may still go on.
            self._publish(tokens.copy())

    def _complete(
        self, inputs: StepInputs, tokens: list[int], kept: RowLogprobs | None, output: ModelRunnerOutput
    ) -> None:
        """Put the tokens [S] into the batch and into the output, and their log probabilities into the output."""
        indices = inputs.sampled.tolist()
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

    def start(
        self,
        inputs: StepInputs,
        logits: Tensor,
        grammar: GrammarOutput | None,
        draws: SamplingRows,
        output: ModelRunnerOutput,
        expected: ExpectedTokens,
    ) -> PendingStep | None:
        """Do what :meth:`sample` does, without waiting for the device if it draws all tokens and no later step needs
        them on the host: then the batch and the output get them later.

        ``draws``: what the rows of ``inputs.sampled`` ask for, on the device. ``expected`` gets the tokens when they
        are there. Returns what completes the output; None: it is complete.
        """
        assert self.device_sampler is not None, "draws come only where the device draws"
        self.measure(inputs, logits, output)
        if self._count_nans:
            output.num_nans_in_logits = _count_nans(logits, [inputs.req_ids[index] for index in inputs.sampled])
        rows, processors = rows_of(inputs, inputs.sampled), self.batch.logits_processors
        indices = self.batch.output_indices(rows)
        demands = self._demands(inputs, inputs.sampled, indices, grammar)
        drawn = self.device_sampler.start_with(logits, draws.columns, indices, demands)
        # Bad words of several tokens depend on the output so far, and other ranks need the tokens: both are on the
        # host.
        if drawn.left_out or self._publish is not None or processors.follow_output(rows):
            expected.settle_all()  # the host may look at tokens of earlier steps
            found = self._finish(drawn, inputs, inputs.sampled, logits, grammar, output)
            self._complete(inputs, *found, output)
            return None
        draws.keep(drawn.token_ids)
        expected.add(self.batch.expect_tokens(rows), drawn.tokens)
        return PendingStep(output, drawn, inputs.sampled.tolist(), has_masks=bool(processors))

    def publish_verified(self, inputs: StepInputs, output: ModelRunnerOutput) -> None:
        """Let the other ranks know the tokens of a step that verified drafts, which the batch has already."""
        if self._publish is not None:
            tokens = np.full((len(inputs.sampled), inputs.most_drafts + 1), NO_TOKEN, dtype=np.int64)
            for row, place in zip(tokens, inputs.sampled.tolist(), strict=True):
                kept = output.sampled_token_ids[place] or [0]  # what the batch holds for a row without a token
                row[: len(kept)] = kept
            self._publish(tokens)

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
        draw: SampleRows | None = None,
    ) -> tuple[list[int], RowLogprobs | None]:
        """Sample the next token of the requests ``places`` [n] of the step from ``logits`` [n, vocab].

        Returns the tokens, ``NO_TOKEN`` where no token can be drawn, and what log probabilities need. Adds to
        ``output`` what only the logits show. ``draw`` replaces :attr:`draw`.
        """
        if self._count_nans:
            output.num_nans_in_logits = _count_nans(logits, [inputs.req_ids[index] for index in places.tolist()])
        if self.device_sampler is not None and draw is None:
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
    ) -> tuple[list[int], RowLogprobs | None]:
        params, indices = self.batch.sampling(rows_of(inputs, places))
        drawn = device_sampler.start(logits, params, indices, self._demands(inputs, places, indices, grammar))
        return self._finish(drawn, inputs, places, logits, grammar, output)

    def _finish(
        self,
        drawn: SampledRows,
        inputs: StepInputs,
        places: Ints,
        logits: Tensor,
        grammar: GrammarOutput | None,
        output: ModelRunnerOutput,
    ) -> tuple[list[int], RowLogprobs | None]:
        """Sample on the host for the rows that the device left out, only their logits come to it, and wait for the
        others."""
        hosted, found = np.array(sorted(drawn.left_out), dtype=np.int64), None
        if len(hosted):
            own = logits[to_device(hosted, logits.device)]
            found = self._draw_on_host(inputs, places[hosted], own, grammar, output, self.draw)
        tokens = drawn.tokens.wait()
        if found is not None:
            for index, token_id in zip(hosted.tolist(), found[0], strict=True):
                tokens[index] = token_id
        if NO_CHOICE in tokens:
            self._report_choices(tokens, inputs, places, output)
        if found is None:
            return tokens, None if drawn.logprobs is None else JoinedLogprobs(drawn.wait_for_logprobs())
        return tokens, JoinedLogprobs(drawn.wait_for_logprobs(), found[1], hosted.tolist())

    def _demands(
        self, inputs: StepInputs, places: Ints, output_indices: Ints, grammar: GrammarOutput | None
    ) -> RowDemands:
        """Return what the requests ``places`` [n] of the step ask for beside a token, whose index each has."""
        batch = self.batch
        if batch.only_draws and grammar is None:
            return NOTHING
        demands, rows = RowDemands({}, {}, plugins=batch.plugged), rows_of(inputs, places)
        masks = {} if grammar is None else _masks(grammar)
        forced = {} if grammar is None else grammar.forced
        columns = zip(places.tolist(), rows.tolist(), output_indices.tolist(), strict=True)
        for index, (place, row, output_index) in enumerate(columns):
            req_id = inputs.req_ids[place]
            if row in batch.logits_processors or req_id in masks or req_id in forced:
                edit = demands.edits[index] = batch.logits_processors.describe(row, output_index)
                edit.allowed += masks.get(req_id, ())
                edit.forced = forced.get(req_id, -1)
                if edit.is_plugged:
                    demands.plugged[index] = row
            if row in batch.logprobs:
                demands.logprobs[index] = batch.logprobs.wanted(row)
        return demands

    def _report_choices(self, tokens: list[int], inputs: StepInputs, places: Ints, output: ModelRunnerOutput) -> None:
        """Replace ``NO_CHOICE`` by ``NO_TOKEN``, and list the requests if masks can be the reason."""
        for index, place in enumerate(places.tolist()):
            if tokens[index] == NO_CHOICE:
                tokens[index] = NO_TOKEN
                if self.batch.logits_processors:
                    output.without_choice.append(inputs.req_ids[place])

    def _draw_on_host(
        self,
        inputs: StepInputs,
        places: Ints,
        on_device: Tensor,
        grammar: GrammarOutput | None,
        output: ModelRunnerOutput,
        draw: SampleRows,
    ) -> tuple[list[int], RowLogprobs | None]:
        logits: Logits = on_device.cpu().numpy()
        rows, batch = rows_of(inputs, places), self.batch
        req_ids = [inputs.req_ids[index] for index in places.tolist()] if grammar else []
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


def _masks(grammar: GrammarOutput) -> dict[str, list[npt.NDArray[np.int32]]]:
    """Return the bitmasks of each request."""
    masks: dict[str, list[npt.NDArray[np.int32]]] = {}
    for req_id, words in zip(grammar.req_ids, grammar.bitmask, strict=True):
        masks.setdefault(req_id, []).append(words)
    return masks


def _count_nans(logits: Tensor, req_ids: Sequence[str]) -> dict[str, int]:
    """Count the NaN logits of the rows, [n, vocab], that have any. Waits for the device."""
    counts = torch.isnan(logits).sum(1).tolist()
    return {req_id: count for req_id, count in zip(req_ids, counts, strict=True) if count}


def allow_only(grammar: GrammarOutput, req_ids: Sequence[str], logits: npt.NDArray[np.float32]) -> None:
    """Set the logits that a grammar forbids to -inf, in place. ``logits`` is [S, vocab] with the rows of ``req_ids``,
    all of the step or some: a row without a grammar is not changed, and a grammar without a row is passed over."""
    row_of = {req_id: row for row, req_id in enumerate(req_ids)}
    for req_id, allowed in zip(grammar.req_ids, grammar.allowed(logits.shape[1]), strict=True):
        if (row := row_of.get(req_id)) is not None:
            logits[row, ~allowed] = -np.inf


def force(grammar: GrammarOutput, req_ids: Sequence[str], logits: npt.NDArray[np.float32]) -> None:
    """Leave only the forced token of each row that has one, in place, whatever was masked or added before.

    ``logits`` is [S, vocab] with the rows of ``req_ids``.
    """
    if grammar.forced:
        for row, req_id in enumerate(req_ids):
            if (token_id := grammar.forced.get(req_id)) is not None:
                logits[row] = -np.inf
                logits[row, token_id] = 0.0


class LogitsMeter:
    """Measures every n-th step that draws tokens."""

    def __init__(self, interval: int) -> None:
        """``interval``: measure one step of so many, one or more."""
        self._interval = interval
        self._num_steps = 0

    def is_due(self) -> bool:
        """Count a step. Returns whether it is to be measured; the first one is."""
        self._num_steps += 1
        # Not each step: reading every logit costs as much as sampling.
        return self._num_steps % self._interval == 1 or self._interval == 1

    def measure(self, logits: torch.Tensor, params: Sequence[CoreSamplingParams]) -> list[LogitsStats | None]:
        """Return the statistics of each row of the model's own logits [rows, vocab]; None for one that is not finite.

        They must not have been changed by logits processors. ``params`` [rows] are those of the rows' requests.
        """
        values: npt.NDArray[np.float32] = logits.float().cpu().numpy()
        largest, smallest = values.max(axis=1), values.min(axis=1)
        is_finite = np.isfinite(largest) & np.isfinite(smallest)
        stats: list[LogitsStats | None] = [None] * len(values)
        for row in np.flatnonzero(is_finite).tolist():
            entropy = _entropy(values[row], largest[row])
            stats[row] = LogitsStats(float(largest[row]), float(smallest[row]), entropy, params[row].temperature)
        return stats


def _entropy(logits: npt.NDArray[np.float32], largest: np.float32) -> float:
    """Return the entropy of the distribution of finite logits [vocab], in nats."""
    shifted = np.subtract(logits, largest, dtype=np.float64)
    weights = np.exp(shifted)
    total = float(weights.sum())
    # The sum of -p ln p, with p = weights / total and ln p = shifted - ln total.
    return max(0.0, float(np.log(total) - np.dot(weights, shifted) / total))
