"""Runs the decode steps of a model from recordings: one call for a step, instead of one for each of its operations.

The recordings belong to a number of tokens and of threads. The first step of so many tokens is computed as ever, and
recorded; its recording counts only if it computes the same bits once more. A step that cannot be recorded is always
computed as ever. A step of one of several ranks is recorded with what it exchanges with the others: as the call of a
kernel where they share memory, otherwise as a call of Python between two runs of kernels.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..attention.attention_backend import KVCache
from ..attention.states import StatePlan
from ..batch.input_batch import StepInputs
from ..call_recording.recorder import CallRecorder, Entry, RecordedExchange, UnrecordableError, recording
from ..call_recording.recording import Buffers, DryRun, Recording, SharedMemory
from ..kernels.compiler import KernelsUnavailable
from ..kernels.threads import kernel_threads
from ..models.model import StepModel
from .fixed_plan import BoundPlan, FixedPlan, FixedStates

log = logging.getLogger(__name__)

# A step of one request of the demo model takes 277 µs from a recording and 729 operation by operation (bfloat16, one
# thread); for 32 requests it is 4,297 against 4,985, and beyond that calls are lost in the arithmetic.
MOST_TOKENS = 64
"""Larger steps are computed as ever: there the operations take much longer than their calls."""
_MOST_RECORDINGS = 64
_MOST_FAILURES = 4
"""After so many sizes that cannot be recorded, no other one is tried."""


_Size: TypeAlias = tuple[int, int, bool]
"""The number of tokens and of threads, and whether rows have LoRA adapters."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Holds a recording of one size."""

    recording: Recording
    plan: BoundPlan
    hidden: Tensor
    """[T, hidden_size], written by each run."""
    logits: Tensor | None
    """[T, vocab]; None: the model computes them from ``hidden``."""


class RecordedModel:
    """Holds the recordings of a model over one attention backend. Belongs to one thread."""

    computes_every_step = False
    sampling_rows: None = None

    def __init__(self, plan: FixedPlan) -> None:
        """``plan`` holds the arrays from which every recorded step computes."""
        self._plan, self._states = plan, FixedStates(plan.most_tokens)
        self._ids, self._places = plan.token_ids, plan.positions
        self._token_ids, self._positions = torch.from_numpy(self._ids), torch.from_numpy(self._places)
        self._memory = SharedMemory()
        self._steps: dict[_Size, _Step] = {}
        self._failed: set[_Size] = set()

    @property
    def num_recordings(self) -> int:
        """Return how many sizes of steps are recorded."""
        return len(self._steps)

    def record_ahead(self, model: StepModel, kv_caches: list[KVCache], states: StatePlan | None = None) -> None:
        """Record nothing: the first step of a size takes hardly longer than others."""

    def event(self) -> None:
        """Return None: a step has ended when it was computed."""

    def forget(self) -> None:
        """Drop all recordings: the weights or the KV caches are others from now on."""
        self._steps.clear()
        self._failed.clear()
        self._memory = SharedMemory()

    def compute(
        self,
        model: StepModel,
        inputs: StepInputs,
        kv_caches: list[KVCache],
        *,
        adapted: bool = False,
        every_row: bool = False,
    ) -> tuple[Tensor, Tensor] | None:
        """Compute a step in which every token's logits are needed. Returns the last hidden states [T, hidden_size] and
        the logits [T, vocab], which hold until the next step; None: the step must be computed as ever. ``adapted``:
        rows have LoRA adapters, so that other kernels are called. ``every_row``: compute all logits although not every
        token draws."""
        num_tokens, num_drawn = len(inputs.token_ids), len(inputs.sampled)
        states = inputs.states
        if states is not None and len(states.read) != num_tokens:
            return None
        if inputs.drafts:
            num_drawn += sum(map(len, inputs.drafts.values()))
        if num_tokens > self._plan.most_tokens or inputs.embeds or not (every_row or num_drawn == num_tokens):
            return None
        if inputs.rope is not None and inputs.rope.ndim > 1:
            return None  # tokens inside of images, which only a drafter computes without their rows
        # The number of threads is a part: attention cuts its work by it, and a recorded plan holds the cut.
        size = (num_tokens, kernel_threads(), adapted)
        step = self._steps.get(size)
        if step is None and (size in self._failed or len(self._failed) >= _MOST_FAILURES):
            return None
        if inputs.token_ids.base is not self._ids:
            self._ids[:num_tokens] = inputs.token_ids
            self._places[:num_tokens] = inputs.positions
        if inputs.rope is not None:
            self._places[:num_tokens] = inputs.rope
        arrays = (inputs.cu_query_lens, inputs.seq_lens, inputs.block_tables, inputs.slot_mapping)
        self._plan.fill(*arrays, inputs.rows)
        if states is not None:
            self._states.fill(states, on_trial=step is None)
        if step is None:
            with torch.inference_mode():
                found = self._record(size, model, kv_caches, states)
            if states is None or (step := self._steps.get(size)) is None:
                return found if states is None else None
            self._states.fill(states)
        step.plan.adapt()
        step.recording.run()
        if step.logits is not None:
            return step.hidden, step.logits
        with torch.inference_mode():
            return step.hidden, model.compute_logits(step.hidden)

    def _record(
        self, size: _Size, model: StepModel, kv_caches: list[KVCache], states: StatePlan | None
    ) -> tuple[Tensor, Tensor]:
        """Compute a step call by call and record the calls; keep the recording if it computes the same. Of ``states``
        nothing that counts is written."""
        num_tokens = size[0]
        ids, positions = self._token_ids[:num_tokens], self._positions[:num_tokens]
        plan = self._plan.plan()
        slots: tuple[Any, ...] = () if states is None else ((), self._states.plan(states))
        with recording() as recorder:
            hidden = model.forward(ids, positions, kv_caches, plan, *slots)
            num_calls = len(recorder.calls) if recorder is not None and recorder.failure is None else 0
            logits = model.compute_logits(hidden)
        if recorder is None:
            return hidden, logits
        try:
            if not num_calls:
                raise UnrecordableError(recorder.failure or "no kernel was called")
            step = self._make_step(recorder, num_calls, hidden, logits)
        except (UnrecordableError, KernelsUnavailable) as reason:
            log.debug("steps of %d tokens are not recorded: %s", num_tokens, reason)
            self._failed.add(size)
            return hidden, logits
        if len(self._steps) == _MOST_RECORDINGS:
            del self._steps[next(iter(self._steps))]
        self._steps[size] = step
        return hidden, logits

    def _make_step(self, recorder: CallRecorder, num_calls: int, hidden: Tensor, logits: Tensor) -> _Step:
        """Make a recording of the first ``num_calls`` calls, or of all if those behind them could be recorded."""
        is_whole = recorder.failure is None and len(recorder.calls) > num_calls
        results = [hidden, logits] if is_whole else [hidden]
        calls = recorder.calls if is_whole else recorder.calls[:num_calls]
        buffers = Buffers(recorder.tensors, calls, results)
        if not all(map(buffers.holds, results)):
            raise UnrecordableError("a result is no tensor of the step")
        # Recordings hold addresses, so all of them end when the memory moves. It doubles, which bounds how often.
        if self._memory.reserve(buffers.nbytes):
            self._steps.clear()
        made = Recording(calls, buffers, self._memory.bytes, results)
        plan = self._plan.bind(made.structs)
        # A recording counts only if it computes the same bits once more: that finds operations with a state, and arrays
        # that were read at an address which a later step does not fill.
        exchanged = [each for each in recorder.exchanged if each.number < len(calls)]  # others exchange logits
        self._try(made, plan, calls, exchanged, buffers, results)
        return _Step(made, plan, made.results[0], made.results[1] if is_whole else None)

    def _try(
        self,
        made: Recording,
        plan: BoundPlan,
        calls: Sequence[Entry],
        exchanged: Sequence[RecordedExchange],
        buffers: Buffers,
        results: Sequence[Tensor],
    ) -> None:
        """Run ``made`` once, without other ranks. Raises :class:`UnrecordableError` if it computes something else."""
        dry_run = DryRun(calls, exchanged)
        if exchanged:
            made = Recording(dry_run.calls, buffers, self._memory.bytes, results)
            plan = self._plan.bind(made.structs)
        plan.adapt()
        made.run()
        same = (_are_same(found, each) for found, each in zip(made.results, results, strict=True))
        if not (dry_run.was_right() and all(same)):
            raise UnrecordableError("the recording computes something else")


def _are_same(first: Tensor, second: Tensor) -> bool:
    """Return whether tensors have the same bits, those of NaN included."""
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))
