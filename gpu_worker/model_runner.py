"""Runs one step of the model: the scheduler's differences go in, tokens come out."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import ExpertBalance, ExpertLoads, RoutedExperts
from tokenloom.engine_core.data.scheduler_output import (
    GrammarOutput,
    ModelRunnerOutput,
    PendingOutput,
    SchedulerOutput,
    StateBases,
)
from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory

from .attention.attention_backend import AttentionBackend, IntArray, KVCache
from .attention.cross_backend import CrossPlan
from .attention.states import StateSlots
from .batch.expected_tokens import ExpectedTokens
from .batch.input_batch import InputBatch, StepInputs
from .batch.prompt_rows import PromptPart
from .batch.sampled_tokens import SampledTokens
from .device.device_link import to_device
from .layers.expert_routes import ExpertRoutes
from .lora.slots import LoraSlots
from .lora.stored_changes import CLASSES
from .models.model import LanguageModel, routes_of
from .parallel.ranks import ONLY_RANK, Ranks
from .pooling.pooler import Floats, Pooler
from .sampler.device.device_sampler import DeviceSampler
from .sampler.device.sampling_arrays import SamplingRows
from .sampler.step_sampler import EndingStep, StepSampler, rows_of
from .speculation.rejection import RejectionSampler
from .speculation.speculation import Proposer, Speculation
from .step_recordings import StepRecordings

if TYPE_CHECKING:
    from .attention.context_backend import PrefillContext

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerParts:
    """Holds what a runner may have beside its model."""

    device: torch.device = _CPU
    """That of model and attention backend."""
    device_sampler: DeviceSampler | None = None
    """Changes logits, samples and finds log probabilities; None: the host does."""
    proposer: Proposer | None = None
    """Proposes drafts; None: no step has any."""
    rejection: RejectionSampler | None = None
    """Accepts drafts; None: a draft counts if it equals the token that is sampled."""
    recordings: StepRecordings | None = None
    """Runs the steps of which it can make recordings; None: the model computes every step."""
    loras: LoraSlots | None = None
    """Holds the adapters that requests name; None: they name none."""
    pooler: Pooler | None = None
    """Pools prompts; None: no request asks for it."""
    ranks: Ranks = ONLY_RANK
    """One of them samples the tokens of all."""
    states: StateSlots | None = None
    """The slots of layers that keep a state; None: no layer does."""


_NO_PARTS: Final = RunnerParts()


class ModelRunner:
    """Turns scheduled work into arrays and runs the model over the paged KV cache (``execute``); then ``sample``."""

    def __init__(
        self,
        model: LanguageModel,
        backend: AttentionBackend,
        batch: InputBatch,
        num_blocks: int,
        memory: PoolMemory | None = None,
        parts: RunnerParts = _NO_PARTS,
        *,
        count_nans: bool = False,
        logits_metrics_interval: int = 0,
    ) -> None:
        """``memory`` holds the KV caches; None: torch allocates them. ``count_nans``: whether NaN logits of every step
        are counted. The logits of one step of ``logits_metrics_interval`` are measured; 0: none."""
        self._recordings = parts.recordings
        self.set_model(model, parts.pooler)
        self._backend = backend
        self._batch = batch
        self._ranks = parts.ranks
        self._is_whole = self._ranks.place.is_whole
        self._sampled_tokens = None if self._ranks.place.is_alone else SampledTokens(self._ranks, batch)
        self._samples = batch.prompt_logprobs.are_kept = self._ranks.place.samples
        self._expected_tokens = ExpectedTokens(batch)
        self._sampler = StepSampler(
            batch,
            parts.device_sampler,
            count_nans=count_nans,
            logits_metrics_interval=logits_metrics_interval,
            publish=None if self._sampled_tokens is None else self._sampled_tokens.publish,
        )
        self._speculation = None
        if parts.proposer is not None:
            self._speculation = Speculation(self._sampler, parts.proposer, parts.rejection)
        self._samples_on_device = parts.proposer is None and parts.device_sampler is not None
        self._loras = parts.loras
        self._device = parts.device
        self._prefill = self._make_prefill() if self._ranks.prefill.size > 1 else None
        self._states = parts.states
        layout = model.config.states
        self._bases = StateBases(is_strict=layout.chunk > 1) if self._states is not None and layout else None
        self._make_kv_caches = functools.partial(backend.allocate, num_blocks, memory)
        self.kv_caches: list[KVCache] = []
        """The cache of each layer."""
        self.make_kv_caches()
        self._executed: _Executed | None = None  # set between ``execute`` and ``sample``

    def set_model(self, model: LanguageModel, pooler: Pooler | None = None) -> None:
        """Use other weights of the same shapes from now on."""
        self._pooler = pooler
        self._model, self._computes_logits = model, model.config.computes_logits
        self._routes = routes_of(model)
        self._forget_recordings()

    def _forget_recordings(self) -> None:
        if self._recordings is not None:
            self._recordings.forget()

    def make_kv_caches(self) -> None:
        """Allocate empty KV caches, if there are none."""
        if not self.kv_caches:
            self.kv_caches = self._make_kv_caches()
        self.make_states()
        if self._speculation is not None:
            self._speculation.proposer.make_kv_caches()

    def drop_kv_caches(self) -> None:
        """Drop the KV caches with their content; no step may run before :meth:`make_kv_caches`."""
        self.kv_caches = []
        self.drop_states()
        self._forget_recordings()
        if self._speculation is not None:
            self._speculation.proposer.drop_kv_caches()

    def make_states(self) -> None:
        """Allocate empty slots for states, if layers keep any and there are none."""
        if self._states is not None:
            self._states.allocate()

    def drop_states(self) -> None:
        """Drop the slots of states with their content; no step may run before :meth:`make_states`."""
        if self._states is not None:
            self._states.drop()
            self._forget_recordings()  # which hold the addresses of the slots

    def execute(self, step: SchedulerOutput) -> None:
        """Compute the scheduled tokens, and the logits of each request whose known tokens are then all computed.

        An exception makes the runner forget every request; the scheduler must then start them anew.
        """
        try:
            if self._sampled_tokens is not None:
                self._sampled_tokens.settle(step)
            # Before the batch changes: a row that ends or moves in this step may still be owed a token of an earlier
            # one.
            if self._expected_tokens.steps:
                self._expected_tokens.settle()
            most_kept = 0
            if step.defers_drafts:
                step, most_kept = self._with_drafts(step), max(step.num_drafts_wanted.values(), default=0)
            if self._speculation is not None:
                self._speculation.update(step)  # while requests that end have their rows
            self._batch.update(step)
            if self._loras is not None and step.lora_slots is not None:
                self._loras.occupy(step.lora_slots)
            self._executed = None
            if step.total_num_scheduled_tokens:
                inputs = self._batch.prepare(step.num_scheduled_tokens, step.draft_token_ids, step.media_rows)
                if self._states is not None:
                    inputs = replace(inputs, states=self._states.plan(step.state_runs))
                if self._routes is not None:
                    self._routes.begin(keep_choices=bool(self._batch.routed))
                if self._loras is not None and self._batch.adapters:
                    hidden, logits = self._compute_adapted(self._loras, inputs)
                else:
                    hidden, logits = self._compute(inputs)
                routed = self._routed_experts(self._routes, inputs) if self._routes is not None else {}
                # On every rank after the same forward passes: expert moves are planned by this count, and no message
                # says when.
                self._ranks.forward_passed()
                asks = self._batch.prompt_logprobs and self._computes_logits
                prompt_logprobs = self._prompt_logprobs(inputs, hidden) if asks else {}
                # Only for drafts: held until sampling, the states of a prompt of 2,048 tokens would add to the peak of
                # every step.
                kept = hidden if self._speculation is not None else None
                pooled = self._pool(inputs, hidden) if self._batch.pooled and self._samples else {}
                sampling_rows = self._recordings.sampling_rows if self._recordings is not None else None
                self._executed = _Executed(
                    inputs, kept, logits, prompt_logprobs, routed, pooled, sampling_rows, most_kept
                )
        except BaseException:
            self._forget_requests()
            raise

    def sample(self, grammar: GrammarOutput | None = None) -> ModelRunnerOutput | PendingOutput:
        """Draw the tokens of the step that was executed last, among those that ``grammar`` allows.

        Where the device draws all of them, the output is a promise, and the next step takes them from the device.
        """
        if self._executed is None:
            return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        executed, self._executed = self._executed, None
        try:
            return self._sample(executed, grammar)
        except BaseException:
            self._forget_requests()
            raise

    def _with_drafts(self, step: SchedulerOutput) -> SchedulerOutput:
        """Return a step that was planned ahead with the drafts that it verifies."""
        keeper = self._speculation if self._samples else self._sampled_tokens
        assert keeper is not None, "drafts come only if speculation is configured"
        return step.with_drafts(self._batch.num_known_tokens, keeper.proposed, self._bases)

    def _forget_requests(self) -> None:
        self._batch.clear()
        self._expected_tokens.clear()
        if self._bases is not None:
            self._bases.clear()

    def _compute(self, inputs: StepInputs, *, adapted: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the last hidden states of the step, and the logits of the rows that draw a token. ``adapted``: rows
        have LoRA adapters."""
        if (computed := self._compute_recorded(inputs, adapted=adapted)) is not None:
            return computed
        with torch.inference_mode():
            hidden = self._forward(inputs)
            return hidden, self._logits(inputs, hidden)

    def _compute_recorded(
        self, inputs: StepInputs, *, adapted: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the same from a recording; None: the step cannot be recorded."""
        if self._recordings is None:
            return None
        # transformers' modules change states where they are. The trial of a recording computes the step once more, for
        # which ranks would have to meet.
        is_tried = self._states is not None and not self._recordings.computes_every_step
        if is_tried and (self._model.config.mixer is None or not self._is_whole):
            return None
        if self._routes is not None:
            if not self._recordings.computes_every_step:
                return None
            adapted = adapted or self._routes.keeps_choices or not self._routes.stay_on_device
        return self._recordings.compute(self._model, inputs, self.kv_caches, adapted=adapted)

    def _compute_adapted(self, loras: LoraSlots, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        loras.begin(self._batch.adapters, inputs)
        try:
            if loras.are_plain or self._device.type != "cpu":
                return self._compute(inputs, adapted=loras.are_used)
            with torch.inference_mode():
                hidden = self._forward(replace(inputs, embeds=[*loras.embeds(inputs), *inputs.embeds]))
                return hidden, self._logits(inputs, hidden, loras)
        finally:
            loras.end()

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        if self._prefill is not None and (hidden := self._divided(self._prefill, inputs)) is not None:
            return hidden
        tails = self._batch.take_foreign_tails(inputs) if self._backend.reads_tails else None
        plan = self._backend.plan(
            inputs.cu_query_lens, inputs.seq_lens, inputs.block_tables, inputs.slot_mapping, tails, inputs.limits
        )
        if inputs.cross is not None:
            assert isinstance(plan, CrossPlan), "the backend has no plan of what stands beside prompts"
            plan.take(inputs.cross, self._device)
        turned = inputs.positions if inputs.rope is None else inputs.rope
        token_ids, positions = self._to_device(inputs.token_ids), self._to_device(turned)
        # Copied: arrays from a message are read-only, which torch does not support.
        embeds = [(start, self._to_device(rows.copy())) for start, rows in inputs.embeds]
        states = inputs.states
        if states is not None and self._device.type != "cpu":
            states = states.send(self._device)
        return self._model.forward(token_ids, positions, self.kv_caches, plan, embeds, states)

    def _make_prefill(self) -> "PrefillContext":
        from .attention.context_backend import PrefillContext  # here, so that a rank that is alone pays nothing for it

        return PrefillContext(self._ranks.prefill, self._batch.block_table.block_size, self._to_device)

    def _divided(self, prefill: "PrefillContext", inputs: StepInputs) -> torch.Tensor | None:
        """Compute a step together with the other ranks; None: this rank has to compute all of it."""
        routes = self._routes
        # Adapters, and experts that are reported, are listed by the rows of the whole step.
        if self._batch.adapters or (routes is not None and routes.keeps_choices):
            return None
        counted = None if routes is None else routes.counts()
        hidden = prefill.forward(self._model, self._backend, self.kv_caches, inputs)
        if routes is not None and counted is not None and hidden is not None:
            own = routes.counts() - counted
            routes.add(self._ranks.prefill.all_gather(self._to_device(own)).sum(0).cpu().numpy() - own)
        return hidden

    def _to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return to_device(array, self._device)

    def _logits(self, inputs: StepInputs, hidden: torch.Tensor, loras: LoraSlots | None = None) -> torch.Tensor:
        """Return the logits [S, vocab] of the rows that draw a token, on the device; where others draw, the part of
        them that this rank computes. ``loras``: the adapters, if some of the step change more than linear layers."""
        if not len(inputs.sampled) or not self._computes_logits:
            return torch.empty(0, 0)
        # Selecting all rows would copy them: without drafts most steps end here.
        # torch computes len(hidden) in Python.
        if len(inputs.sampled) == hidden.shape[0]:  # every request decodes, without drafts
            if loras is not None:
                loras.pick(None, inputs)
            return self._model.compute_logits(hidden)
        last_rows: IntArray = inputs.cu_query_lens[1:][inputs.sampled] - 1
        if inputs.drafts:
            last_rows = inputs.rows_to_verify(last_rows)
        if loras is not None:
            loras.pick(last_rows, inputs)
        return self._model.compute_logits(hidden[self._to_device(last_rows)])

    def _routed_experts(self, routes: ExpertRoutes, inputs: StepInputs) -> dict[str, RoutedExperts]:
        """Return the experts of the tokens that this step computed, for the requests that ask."""
        chosen, result = routes.end(), dict[str, RoutedExperts]()
        if chosen is None:
            return result
        for index, (req_id, row) in enumerate(zip(inputs.req_ids, inputs.rows.tolist(), strict=True)):
            if row in self._batch.routed:
                begin, end = inputs.cu_query_lens[index : index + 2].tolist()
                first, content = int(inputs.positions[begin]), chosen[begin:end].tobytes()
                result[req_id] = RoutedExperts(first, routes.num_layers, routes.top_k, chosen.itemsize, content)
        return result

    @torch.inference_mode()
    def _prompt_logprobs(self, inputs: StepInputs, hidden: torch.Tensor) -> dict[str, PromptPart]:
        """Return the log probabilities of the prompt tokens that this step computed, for the requests that ask."""
        compute_logits, on_device = self._model.compute_logits, self._sampler.device_sampler
        asking, result = self._batch.prompt_logprobs, {}
        for index, (req_id, row) in enumerate(zip(inputs.req_ids, inputs.rows.tolist(), strict=True)):
            begin, end = inputs.cu_query_lens[index : index + 2].tolist()
            start = int(inputs.positions[begin])
            compute = compute_logits if self._loras is None else self._logits_of(row, self._loras)
            part = asking.compute(row, start, hidden[begin:end], compute, on_device)
            if part is not None:
                result[req_id] = part
        return result

    def _logits_of(self, row: int, loras: LoraSlots) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what computes the logits of a request's states after the step."""
        digest, compute = self._batch.adapters.get(row), self._model.compute_logits
        return compute if digest is None else loras.logits(digest, compute)

    @torch.inference_mode()
    def _pool(self, inputs: StepInputs, hidden: torch.Tensor) -> dict[str, Floats]:
        """Return the results of the prompts that are pooled and complete."""
        assert self._pooler is not None, "the core refuses such requests"
        rows, ends, begins = (array.tolist() for array in (inputs.rows, inputs.seq_lens, inputs.cu_query_lens))
        attended = {} if inputs.cross is None else inputs.cross.attended
        poolers = {} if self._loras is None else self._poolers_of(self._loras, self._pooler)
        results = self._batch.pooled.pool(self._pooler, rows, ends, begins, hidden, attended, poolers)
        return {inputs.req_ids[index]: result for index, result in results.items()}

    def _poolers_of(self, loras: LoraSlots, pooler: Pooler) -> dict[int, Pooler]:
        """Return what pools the prompts whose adapters change the class head, by their rows."""
        adapters = self._batch.adapters.items()
        changes = {row: loras.change(digest, CLASSES) for row, digest in adapters if row in self._batch.pooled}
        return {row: pooler.with_class_weight(each.merged) for row, each in changes.items() if each is not None}

    def _sample(self, executed: "_Executed", grammar: GrammarOutput | None) -> ModelRunnerOutput | PendingOutput:
        inputs, logits = executed.inputs, executed.logits
        if not self._samples:
            return self._follow(inputs, executed.most_kept)
        output = ModelRunnerOutput(inputs.req_ids, [], pooled=executed.pooled)
        if executed.prompt_logprobs:
            output.prompt_logprobs = {req_id: part.wait() for req_id, part in executed.prompt_logprobs.items()}
        if self._routes is not None:
            output.routed_experts, output.expert_loads = executed.routed_experts, self._expert_loads(self._routes)
        if not len(inputs.sampled):
            output.sampled_token_ids = [[] for _ in inputs.req_ids]
            ended = self._recordings.event() if self._recordings is not None else None
            # A chunk of a prompt draws nothing, so nothing else waits for the device, and a transfer could fill blocks
            # that the step still writes.
            if ended is not None and self._speculation is None:
                return EndingStep(output, ended)
        elif inputs.drafts:
            assert self._speculation is not None, "drafts come only if speculation is configured"
            self._speculation.verify(inputs, logits, grammar, output)
        elif (rows := executed.sampling_rows) is not None and self._samples_on_device:
            return self._sampler.start(inputs, logits, grammar, rows, output, self._expected_tokens) or output
        else:
            self._sampler.sample(inputs, logits, grammar, output)
        if self._speculation is not None:
            assert executed.hidden is not None, "it is kept for what drafts"
            self._speculation.propose(inputs, executed.hidden, output)
            if self._sampled_tokens is not None and executed.most_kept and len(inputs.sampled):
                proposed = self._speculation.proposed
                self._sampled_tokens.publish_drafts(_drawing_ids(inputs), proposed, executed.most_kept)
        return output

    def _expert_loads(self, routes: ExpertRoutes) -> ExpertLoads:
        """Return how the tokens of all steps were spread over all experts, and what was done to balance the ranks."""
        tokens, imbalance = routes.loads()
        loads = ExpertLoads(tokens.tolist(), imbalance.tolist())
        if (balancer := self._ranks.balancer) is not None:
            stats = balancer.stats
            loads.balance = ExpertBalance(stats.balancedness, stats.num_plans, stats.num_moved)
        return loads

    def _follow(self, inputs: StepInputs, most_kept: int) -> ModelRunnerOutput:
        """End a step whose tokens another rank draws."""
        assert self._sampled_tokens is not None
        if len(inputs.sampled):
            drafted = _drawing_ids(inputs) if most_kept else []
            rows = rows_of(inputs, inputs.sampled)
            self._sampled_tokens.expect(inputs.req_ids, rows, inputs.most_drafts, drafted, most_kept)
        return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])

    @torch.inference_mode()
    def dummy_run(self, query_lens: list[int], block_size: int, num_layers: int | None = None) -> torch.Tensor:
        """Compute prompts of these lengths in separate blocks from block 0 on. Returns the logits of the last token of
        each, [n, vocab]. ``num_layers``: compute only the first layers; None: all.

        This is for profiling and warm-up: no request may hold a block. One prompt of at most a block is computed in
        ``NULL_BLOCK`` alone, and changes nothing that a request has where that block is reserved.
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
        arrays = (cu_query_lens, lengths, tables, slots)
        plan = self._backend.plan(*arrays)
        positions_tensor = self._to_device(positions)
        states = None if self._states is None else self._states.dummy_plan(query_lens)
        hidden = self._model.forward(
            torch.zeros_like(positions_tensor), positions_tensor, self.kv_caches[:num_layers], plan, (), states
        )
        if self._speculation is not None:
            self._speculation.proposer.dummy_run(positions, hidden, arrays)
        return self._model.compute_logits(hidden[self._to_device(cu_query_lens[1:] - 1)])

    def record_ahead(self) -> None:
        """Record the steps whose recordings take long. No request may hold a block. Does nothing while the slots of
        states are dropped."""
        if self._states is not None and not self._states.layers:
            return
        if self._recordings is not None and (self._routes is None or self._recordings.computes_every_step):
            states = None if self._states is None else self._states.dummy_plan([1])
            if self._routes is None:
                self._recordings.record_ahead(self._model, self.kv_caches, states)
                return
            self._routes.begin(keep_choices=False)  # graphs count the tokens of experts, too
            self._recordings.record_ahead(self._model, self.kv_caches, states)
            self._routes.end()

    def dummy_decode(self, num_requests: int, block_size: int) -> torch.Tensor:
        """Compute the first token of so many requests, each in a block of its own, as a step does that decodes: from a
        recording if it can be recorded. Returns the logits [num_requests, vocab]. No request may hold a block."""
        places, num_groups = np.arange(num_requests), self._batch.block_table.num_groups
        tokens, positions = np.zeros((2, num_requests), dtype=np.int64)
        starts, lengths = np.arange(num_requests + 1, dtype=np.int32), np.ones(num_requests, dtype=np.int32)
        tables = np.repeat(places[:, None], num_groups, axis=1).astype(np.int32)
        slots = places * block_size if num_groups == 1 else np.tile(places * block_size, (num_groups, 1))
        for row in range(min(num_requests, self._batch.max_num_seqs)):  # for a device that keeps rows
            self._batch.block_table.replace(row, [row] * num_groups)
        inputs = StepInputs([], places, tokens, positions, starts, lengths, tables, slots, places)
        # Rows of a dummy step would change one state in turn, so that a recording of it never computes the same again.
        computed = None if self._states is not None else self._compute_recorded(inputs)
        return self.dummy_run([1] * num_requests, block_size) if computed is None else computed[1]

    def dummy_sample(self, logits: torch.Tensor, params: CoreSamplingParams) -> None:
        """Draw a token for each row of ``logits`` [n, vocab], as a step would whose requests all have ``params``."""
        rows, indices = [params] * len(logits), np.zeros(len(logits), dtype=np.int64)
        if self._sampler.device_sampler is not None:
            self._sampler.device_sampler.sample(logits, rows, indices)
            self._sampler.device_sampler.prepare(logits[:1])
        self._sampler.draw(logits.cpu().numpy(), rows, indices)


class _Executed(msgspec.Struct, frozen=True):
    """Holds a step whose tokens are not drawn yet."""

    # One is made in each step, and a dataclass's constructor takes 66 opcodes more.
    inputs: StepInputs
    hidden: torch.Tensor | None
    """[T, hidden_size]: the last hidden states; None unless drafts are proposed from them."""
    logits: torch.Tensor
    """[S, vocab]: logits of the rows that draw, on the device. A request with drafts has a row more for each."""
    prompt_logprobs: dict[str, PromptPart]
    routed_experts: dict[str, RoutedExperts]
    pooled: dict[str, Floats]
    sampling_rows: SamplingRows | None
    """What the rows that draw ask for, on the device; None: the host has to send it."""
    most_kept: int
    """Drafts of a request that the workers keep for a step that is planned before they are known; 0: none."""


def _drawing_ids(inputs: StepInputs) -> list[str]:
    """Return the requests of ``inputs.sampled``, [S]."""
    return [inputs.req_ids[index] for index in inputs.sampled.tolist()]
