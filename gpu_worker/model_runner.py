"""Runs one step of the model: the scheduler's differences go in, tokens come out."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.engine_core.wire.core_sampling_params import SamplingParams
from tokenloom.engine_core.wire.messages import Logprobs
from tokenloom.engine_core.wire.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput

from .attention.attention_backend import AttentionBackend, IntArray, KVCache
from .batch.input_batch import InputBatch, StepInputs
from .batch.transfer import to_device
from .models.model import Model
from .sampler import NO_TOKEN, Sampler
from .sampler.device_sampler import DeviceSampler
from .sampler.grammar_mask import allow_only, force
from .sampler.logits_stats import LogitsMeter
from .sampler.logprobs import KeptLogits

Logits = npt.NDArray[np.float32]
_CPU = torch.device("cpu")


class ModelRunner:
    """Turns scheduled work into arrays and runs the model over the paged KV cache (``execute``); then ``sample``."""

    def __init__(
        self,
        model: Model,
        backend: AttentionBackend,
        batch: InputBatch,
        num_blocks: int,
        memory: PoolMemory | None = None,
        device: torch.device = _CPU,
        device_sampler: DeviceSampler | None = None,
        *,
        count_nans: bool = False,
        logits_metrics_interval: int = 0,
    ) -> None:
        """``memory`` holds the KV caches; None: torch allocates them. ``device`` is that of model and backend.

        ``device_sampler`` draws if no request asks for changed logits or log probabilities; None: all tokens are
        drawn on the host. ``count_nans``: whether NaN logits of every step are counted. The
        logits of one step of ``logits_metrics_interval`` are measured; 0: none.
        """
        self._logits_meter = LogitsMeter(logits_metrics_interval) if logits_metrics_interval else None
        self._count_nans = count_nans
        self._model = model
        self._backend = backend
        self._batch = batch
        self._sampler = Sampler()
        self._device = device
        self._device_sampler = device_sampler
        self._make_kv_caches = functools.partial(backend.allocate, num_blocks, memory)
        self._kv_caches: list[KVCache] = []
        self.make_kv_caches()
        self._executed: _Executed | None = None  # set between ``execute`` and ``sample``

    def set_model(self, model: Model) -> None:
        """Use other weights of the same shapes from now on."""
        self._model = model

    def make_kv_caches(self) -> None:
        """Allocate empty KV caches, if there are none."""
        if not self._kv_caches:
            self._kv_caches = self._make_kv_caches()

    def drop_kv_caches(self) -> None:
        """Drop the KV caches with their content; no step may run before :meth:`make_kv_caches`."""
        self._kv_caches = []

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> None:
        """Compute the scheduled tokens, and the logits of each request whose known tokens are then all computed.

        An exception makes the runner forget every request; the scheduler must then start them anew.
        """
        try:
            self._execute(step)
        except BaseException:
            self._batch.clear()
            raise

    def sample(self, grammar: GrammarOutput | None = None) -> ModelRunnerOutput:
        """Draw the tokens of the step that was executed last, among those that ``grammar`` allows."""
        if self._executed is None:
            return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        executed, self._executed = self._executed, None
        try:
            return self._sample(executed, grammar)
        except BaseException:
            self._batch.clear()
            raise

    def _execute(self, step: SchedulerOutput) -> None:
        self._batch.update(step)
        self._executed = None
        if step.total_num_scheduled_tokens:
            inputs = self._batch.prepare(step.num_scheduled_tokens)
            hidden = self._forward(inputs)
            self._executed = _Executed(inputs, self._logits(inputs, hidden), self._prompt_logprobs(inputs, hidden))

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        tails = self._batch.take_foreign_tails(inputs) if self._backend.reads_tails else None
        plan = self._backend.plan(
            inputs.cu_query_lens, inputs.seq_lens, inputs.block_tables, inputs.slot_mapping, tails
        )
        token_ids, positions = self._to_device(inputs.token_ids), self._to_device(inputs.positions)
        # Copied: arrays from a message are read-only, which torch does not support.
        embeds = [(start, self._to_device(rows.copy())) for start, rows in inputs.embeds]
        return self._model.forward(token_ids, positions, self._kv_caches, plan, embeds)

    def _to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return to_device(array, self._device)

    def _logits(self, inputs: StepInputs, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [S, vocab] of the rows that draw a token, on the device."""
        if not len(inputs.sampled):
            return torch.empty(0, 0)
        if len(inputs.sampled) == len(hidden):  # every request decodes
            return self._model.compute_logits(hidden)
        last_rows = self._to_device(inputs.cu_query_lens[1:][inputs.sampled] - 1)
        return self._model.compute_logits(hidden[last_rows])

    def _prompt_logprobs(self, inputs: StepInputs, hidden: torch.Tensor) -> dict[str, Logprobs]:
        """Return the log probabilities of the prompt tokens that this step computed, for the requests that ask."""
        asking = self._batch.prompt_logprobs
        if not asking:
            return {}
        result = {}
        for index, (req_id, row) in enumerate(zip(inputs.req_ids, inputs.rows.tolist(), strict=True)):
            begin, end = inputs.cu_query_lens[index : index + 2].tolist()
            start = int(inputs.positions[begin])
            part = asking.compute(row, start, hidden[begin:end], self._model.compute_logits)
            if part is not None:
                result[req_id] = part
        return result

    def _sample(self, executed: "_Executed", grammar: GrammarOutput | None) -> ModelRunnerOutput:
        inputs = executed.inputs
        output = ModelRunnerOutput(inputs.req_ids, [], {}, executed.prompt_logprobs)
        if not len(inputs.sampled):
            output.sampled_token_ids = _by_request([], [], len(inputs.req_ids))
            return output
        rows, indices = inputs.rows[inputs.sampled], inputs.sampled.tolist()
        if self._logits_meter is not None and self._logits_meter.is_due():
            measured = self._logits_meter.measure(executed.logits, self._batch.sampling(inputs)[0])
            stats_of = zip(indices, measured, strict=True)
            output.logits_stats = {inputs.req_ids[index]: stats for index, stats in stats_of if stats is not None}
        kept = None
        if self._device_sampler is not None and grammar is None and not self._count_nans and self._batch.only_draws:
            tokens = self._device_sampler.sample(executed.logits, *self._batch.sampling(inputs))
        else:
            tokens, kept = self._draw_on_host(executed, rows, grammar, output)
        output.sampled_token_ids = _by_request(tokens, indices, len(inputs.req_ids))
        if NO_TOKEN in tokens:
            tokens = _drop_undrawn(output, tokens, indices)
        self._batch.append(rows, np.array(tokens, dtype=np.int64))
        if kept is not None:
            by_row = kept.logprobs_of(tokens)
            output.logprobs = {inputs.req_ids[indices[row]]: logprobs for row, logprobs in by_row.items()}
        return output

    def _draw_on_host(
        self, executed: "_Executed", rows: IntArray, grammar: GrammarOutput | None, output: ModelRunnerOutput
    ) -> tuple[list[int], KeptLogits | None]:
        """Return the tokens of the batch's ``rows`` [S], and what log probabilities need. Lists in ``output`` what only
        the logits show."""
        inputs = executed.inputs
        logits: Logits = executed.logits.cpu().numpy()
        req_ids = [inputs.req_ids[index] for index in inputs.sampled.tolist()] if self._count_nans or grammar else []
        if self._count_nans:
            output.num_nans_in_logits = _count_nans(logits, req_ids)
        kept = self._batch.logprobs.keep(logits, rows)
        if grammar is not None:
            allow_only(grammar, req_ids, logits)
        self._batch.logits_processors.apply(logits, rows)
        if grammar is not None:
            force(grammar, req_ids, logits)
        tokens = self._sampler.sample(logits, *self._batch.sampling(inputs))
        if self._batch.logits_processors and NO_TOKEN in tokens:
            for row, index in enumerate(inputs.sampled.tolist()):
                if tokens[row] == NO_TOKEN and np.isneginf(logits[row]).all():
                    output.without_choice.append(inputs.req_ids[index])
        return tokens, kept

    @torch.inference_mode()
    def dummy_run(self, query_lens: list[int], block_size: int, num_layers: int | None = None) -> torch.Tensor:
        """Compute prompts of these lengths in separate blocks from block 0 on. Returns the logits of the last token of
        each, [n, vocab]. ``num_layers``: compute only the first layers; None: all.

        This is for profiling and warm-up: no request may hold a block.
        """
        lengths = np.array(query_lens, dtype=np.int64)
        num_blocks = -(-lengths // block_size)
        first_blocks = np.cumsum(num_blocks) - num_blocks
        positions = np.concatenate([np.arange(length) for length in query_lens])
        cu_query_lens = np.concatenate([[0], np.cumsum(lengths)])
        slots = positions + np.repeat(first_blocks * block_size, lengths)
        tables: IntArray = first_blocks[:, None] + np.arange(int(num_blocks.max()))
        if (num_groups := self._batch.block_table.num_groups) > 1:  # all of them use the same blocks
            tables, slots = np.repeat(tables, num_groups, axis=1), np.tile(slots, (num_groups, 1))
        plan = self._backend.plan(cu_query_lens, lengths, tables, slots)
        positions_tensor = self._to_device(positions)
        hidden = self._model.forward(
            torch.zeros_like(positions_tensor), positions_tensor, self._kv_caches[:num_layers], plan
        )
        return self._model.compute_logits(hidden[self._to_device(cu_query_lens[1:] - 1)])

    def dummy_sample(self, logits: torch.Tensor, params: SamplingParams) -> None:
        """Draw a token for each row of ``logits`` [n, vocab], as a step would whose requests all have ``params``."""
        rows, indices = [params] * len(logits), np.zeros(len(logits), dtype=np.int64)
        if self._device_sampler is not None:
            self._device_sampler.sample(logits, rows, indices)
        self._sampler.sample(logits.cpu().numpy(), rows, indices)


def _by_request(tokens: list[int], indices: list[int], num_requests: int) -> list[list[int]]:
    """Return the tokens [S] of the requests ``indices`` [S] in a list for each request of the step."""
    if len(tokens) == num_requests:  # every request decodes
        return [[token_id] for token_id in tokens]
    by_request: list[list[int]] = [[] for _ in range(num_requests)]
    for index, token_id in zip(indices, tokens, strict=True):
        by_request[index] = [token_id]
    return by_request


def _drop_undrawn(output: ModelRunnerOutput, tokens: list[int], indices: list[int]) -> list[int]:
    """List the requests of the rows without a token in ``output``, unless they are listed as without choice.

    Returns the tokens with an arbitrary one for these rows, as the requests may be in the next step already.
    """
    for row, token_id in enumerate(tokens):
        if token_id == NO_TOKEN:
            output.sampled_token_ids[indices[row]] = []
            req_id = output.req_ids[indices[row]]
            if req_id not in output.without_choice:
                output.without_finite_logit.append(req_id)
    return [max(token_id, 0) for token_id in tokens]


def _count_nans(logits: Logits, req_ids: Sequence[str]) -> dict[str, int]:
    """Count the NaN logits of the rows, [n, vocab], that have any."""
    counts = np.isnan(logits).sum(axis=1).tolist()
    return {req_id: count for req_id, count in zip(req_ids, counts, strict=True) if count}


@dataclass(frozen=True, slots=True)
class _Executed:
    """Holds a step whose tokens are not drawn yet."""

    inputs: StepInputs
    logits: torch.Tensor
    """[S, vocab]: logits of the rows that draw, on the device."""
    prompt_logprobs: dict[str, Logprobs]
