"""Computes steps of a device that keeps the rows of the batch and gets all arrays of a step with one copy: from graphs,
or operation by operation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..attention.attention_backend import AttentionBackend, AttentionPlan, DeviceBackend, KVCache
from ..attention.grouped_backend import GroupedBackend
from ..attention.states import StatePlan
from ..batch.input_batch import InputBatch, StepInputs
from ..device.device_link import DeviceLink, Event, to_device
from ..models.model import LanguageModel, routes_of
from ..sampler.device.sampling_arrays import SamplingRows
from ..sampler.host.sampler import REAL_PARAMETERS, Purpose, real_parameters, uniform
from .step_graphs import GraphSize, StepGraphs, StepPlans
from .step_tensors import Capture, DecodedStates, RowKernels, SentStep, StepSize, StepTensors, StepTools

Ints = npt.NDArray[np.int64]


class DeviceRows:
    """Holds block tables, sampling parameters and the last drawn token of every row of a batch.

    The number of a request's tokens changes in every step; it is sent with the step.
    """

    def __init__(self, batch: InputBatch, kernels: RowKernels, device: torch.device) -> None:
        self._batch = batch
        self._kernels = kernels
        self._changes = batch.watch()
        count = batch.max_num_seqs
        self.tables = torch.zeros(batch.block_table.block_ids.shape, dtype=torch.int32, device=device)
        """[rows, blocks * groups]"""
        self.last_tokens = torch.zeros(count, dtype=torch.int64, device=device)
        """[rows]: the token that each drew last."""
        self.shifts = torch.zeros(count, dtype=torch.int64, device=device)
        """[rows]: what is added to the index of a token to get its rotary position, behind the images of the row."""
        self._sent_shifts = np.zeros(count, dtype=np.int64)
        # An odd number of rows would begin at an address for which a kernel compiles again.
        self._params = torch.zeros((len(REAL_PARAMETERS), count + count % 2), dtype=torch.float64, device=device)
        self._top_ks = torch.zeros(count, dtype=torch.int32, device=device)
        self._seeds = np.zeros(count, dtype=np.uint64)

    def changes(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays that bring the copies up to date, by name; :meth:`apply` gets them on the device."""
        arrays: dict[str, npt.NDArray[Any]] = {}
        places, block_ids = self._changes.take_blocks()
        if len(places):
            arrays |= {"changed places": places, "changed blocks": block_ids}
        rows = [row for row in self._changes.take_rows() if self._batch.has_row(row)]
        if rows:
            params = [self._batch.params_of(row) for row in rows]
            self._seeds[rows] = [each.seed for each in params]
            at = np.array(rows, dtype=np.int64)
            values = [real_parameters(each) for each in params]
            arrays["new rows"] = at
            arrays["new places"] = (at + self._params.shape[1] * np.arange(len(self._params))[:, None]).reshape(-1)
            arrays["new params"] = np.array(values, dtype=np.float64).T.reshape(-1)
            arrays["new top ks"] = np.array([max(0, each.top_k) for each in params], dtype=np.int32)
            shifts = self._batch.media.shifts[at]
            if (shifts != self._sent_shifts[at]).any():
                arrays["new shifts"] = self._sent_shifts[at] = shifts
        return arrays

    def apply(self, sent: Mapping[str, Tensor]) -> None:
        """Write the changes that were sent."""
        if "changed places" in sent:
            self._kernels.scatter(self.tables, sent["changed places"], sent["changed blocks"])
        if "new rows" in sent:
            self._kernels.scatter(self._params, sent["new places"], sent["new params"])
            self._kernels.scatter(self._top_ks, sent["new rows"], sent["new top ks"])
        if "new shifts" in sent:
            self._kernels.scatter(self.shifts, sent["new rows"], sent["new shifts"])

    def write_again(self) -> None:
        """Write what the first place of each copy holds once more: each kind of copy has a kernel of its own, which is
        compiled then."""
        place = torch.zeros(1, dtype=torch.int64, device=self.tables.device)
        for kept in (self.tables, self._params, self._top_ks, self.shifts):
            self._kernels.scatter(kept, place, kept.view(-1)[:1].clone())

    def numbers(self, rows: Ints) -> npt.NDArray[np.float64]:
        """Return the uniform numbers [S] of the next draws of these rows, by the rule of the host's sampler."""
        indices = self._batch.output_indices(rows).astype(np.uint64)
        return uniform(self._seeds[rows], indices, Purpose.SAMPLE)

    def draws(self, rows: Tensor, numbers: Tensor) -> SamplingRows:
        """Return what these rows [S] ask for in a step, with the ``numbers`` [S] of their draws."""
        return SamplingRows((*self._params, numbers, self._top_ks, rows), rows, self.last_tokens)


_ALIGNMENT = 16
"""Kernels load 16 bytes at once from addresses that are multiples of it."""
_TWINS = 3
"""Copies that may be under way before the host waits for the oldest: those of two steps in flight and of a next one."""
_LEAST_BYTES = 1 << 16


class StepBuffers:
    """Holds memory of the device for what one step sends, with twins on the host. Belongs to one thread.

    There are several twins: the next step is written while the copy of the last one waits for its turn on the device.
    """

    def __init__(self, device: torch.device, link: DeviceLink) -> None:
        self._device = device
        self._link = link
        self._turn = 0
        self._reserve(_LEAST_BYTES)

    def _reserve(self, num_bytes: int) -> None:
        self._on_device = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._twins = [_Twin(self._link.host_memory(num_bytes)) for _ in range(_TWINS)]

    def send(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
        """Return the arrays on the device, whose one copy begins after what the device has been given so far.

        They hold until the next call. The arrays may be reused at once.
        """
        sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values()]
        total = sum(sizes)
        if total > len(self._on_device):
            self._reserve(1 << (total - 1).bit_length())
        self._turn = (self._turn + 1) % _TWINS
        twin, begin, sent = self._twins[self._turn], 0, dict[str, Tensor]()
        packed = twin.begin()
        for (name, array), size in zip(arrays.items(), sizes, strict=True):
            end = begin + array.nbytes
            packed[begin:end].view(array.dtype)[:] = array.reshape(-1)
            sent[name] = self._on_device[begin:end].view(_DTYPES[array.dtype]).view(array.shape)
            begin += size
        self._link.send(self._on_device[:total], twin.memory[:total])
        twin.copied = self._link.event()
        return sent


@dataclass(slots=True)
class _Twin:
    """Holds memory of the host that the device copies from."""

    memory: Tensor
    copied: Event | None = None

    def begin(self) -> npt.NDArray[np.uint8]:
        """Return the memory to write to, once its last copy has ended."""
        if self.copied is not None and not self.copied.query():
            self.copied.synchronize()
        packed: npt.NDArray[np.uint8] = self.memory.numpy()
        return packed


_OF_RUNS = tuple(f"runs of states, {index}" for index in range(10))
"""What is sent of the runs of states, in the order of ``StatePlan.arrays``."""
_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float64): torch.float64,
}


class DeviceSteps:
    """Fulfils :class:`~..step_recordings.StepRecordings`: computes every step that fits. Belongs to one thread.

    A step costs one copy to the device, the kernels that make its arrays there from the rows that the device keeps, and
    then a graph, or the kernels of the model one after the other.
    """

    computes_every_step = True

    def __init__(
        self,
        batch: InputBatch,
        plans: StepPlans,
        most_tokens: int,
        device: torch.device,
        tools: StepTools,
        capture: Capture | None,
    ) -> None:
        """``batch``: whose steps these are; ``most_tokens``: of a step; ``capture``: None: there are no graphs."""
        self._most_requests = requests = min(batch.max_num_seqs, most_tokens)
        most = StepSize(most_tokens, requests, plans.most_entries(most_tokens, requests))
        self._plans = plans
        self._device = device
        self._kernels = tools.kernels
        self._link = tools.link
        self._rows = DeviceRows(batch, tools.kernels, device)
        self._buffers = StepBuffers(device, tools.link)
        most_blocks = self._rows.tables.shape[1] // plans.num_groups
        self._tensors = StepTensors.allocate(most, plans.num_groups, most_blocks, device)
        self._most_tokens = most_tokens
        self._graphs = None if capture is None else StepGraphs(plans, self._tensors, capture, most)
        self.sampling_rows: SamplingRows | None = None
        """What the rows that draw in the latest step ask for; None: none does."""

    def event(self) -> Event:
        """Return what occurs when the device has computed what it was given so far."""
        return self._link.event()

    def forget(self) -> None:
        """Drop all graphs: the weights or the KV caches are others from now on."""
        if self._graphs is not None:
            self._graphs.forget()

    @torch.inference_mode()
    def record_ahead(self, model: LanguageModel, kv_caches: list[KVCache], states: StatePlan | None = None) -> None:
        """Compile the kernels that make the arrays of steps, and capture all graphs, over padding alone: compiling or
        capturing one takes seconds."""
        self._rows.write_again()
        nothing = {name: np.zeros(0, dtype=np.int32) for name in ("rows", "lengths", "token_ids")}
        starts, work = np.zeros(1, dtype=np.int32), np.zeros((0, 4), dtype=np.int32)
        routes = routes_of(model)
        can_capture = self._graphs is not None and (routes is None or routes.stay_on_device)
        if states is not None:
            can_capture = can_capture and self._lays_out(model, states)
        sizes = self._graphs.sizes if self._graphs is not None and can_capture else []
        self._prepare(self._buffers.send({**nothing, "starts": starts, "work": work}), StepSize(1, 1, 1))
        for size in sizes:
            assert self._graphs is not None, "a size comes from the graphs"
            # Over padding, which has no slot and no entry in the kernel's list: capturing needs no block, and no
            # request can be hurt.
            self._prepare(self._buffers.send({**nothing, "starts": starts, "work": work}), size.step)
            self._graphs.record(size, model, kv_caches)

    @torch.inference_mode()
    def compute(
        self, model: LanguageModel, inputs: StepInputs, kv_caches: list[KVCache], *, adapted: bool = False
    ) -> tuple[Tensor, Tensor] | None:
        """Compute a step. Returns the last hidden states [T, hidden_size] and the logits of the rows that draw, which
        hold until the next step; None: the step has more requests or tokens than fit, as warm-up steps may.
        ``adapted``: the step is not computed from a graph, because its rows have LoRA adapters, its experts are
        reported, or the host sorts tokens by their experts."""
        self.sampling_rows = None
        num_tokens, num_requests = len(inputs.token_ids), len(inputs.rows)
        if num_requests > self._most_requests or num_tokens > self._most_tokens:
            return None
        query_lens = np.diff(inputs.cu_query_lens)
        is_decode = num_tokens == num_requests == len(inputs.sampled)
        size = None
        # The device has one shift of a row, which holds behind its images; what is among them is sent.
        is_turned = inputs.rope is not None and inputs.rope.ndim > 1
        has_graph = not (adapted or inputs.embeds or is_turned)
        if inputs.states is not None:
            has_graph = has_graph and is_decode and self._lays_out(model, inputs.states)
        if self._graphs is not None and has_graph:
            size = self._graphs.size_for(num_tokens, num_requests, is_decode=is_decode)
        most_queries = size.step.tokens if size is not None and not is_decode else int(query_lens.max(initial=1))
        if is_decode and size is not None and (shared := self._shared_work(inputs)) is not None:
            (size, work), num_wide = shared, 0
        else:
            work, num_wide = self._plans.work(
                query_lens, inputs.seq_lens, most_queries, 0 if size is None else size.num_wide
            )
        sent = self._send(inputs, work, None if is_decode else _logit_rows(inputs), size)
        exact = StepSize(num_tokens, num_requests, len(work))
        self._prepare(sent, exact if size is None else size.step)
        if len(inputs.sampled):
            self.sampling_rows = self._rows.draws(sent["drawn rows"], sent["numbers"])
        if size is None:
            plan = self._plans.plan(self._tensors.part(exact), most_queries, num_wide, sent.get("limits"))
            if self._plans.plans_on_host:
                self._plans.begin(plan, inputs.cu_query_lens, inputs.seq_lens)
            hidden = self._forward(model, inputs, sent, kv_caches, plan)
            logits = None
        else:
            assert self._graphs is not None, "a size comes from the graphs"
            self._graphs.record(size, model, kv_caches)
            if self._plans.plans_on_host:
                self._graphs.begin(size, inputs.cu_query_lens, inputs.seq_lens)
            hidden, logits = self._graphs.run(size, sent.get("state slots"))
            hidden, logits = hidden[:num_tokens], None if logits is None else logits[:num_tokens]
        if logits is None:
            logits = _logits(model, hidden, sent.get("logit rows"))
        return hidden, logits

    def _shared_work(self, inputs: StepInputs) -> tuple[GraphSize, npt.NDArray[np.int32]] | None:
        """Return the graph and the list of a step that decodes, if its requests read shared keys together; None: they
        do not."""
        prefixes = self._plans.find_shared(inputs.seq_lens, inputs.block_tables)
        if prefixes is None:
            return None
        assert self._graphs is not None, "the step has a graph"
        size = self._graphs.shared_size(len(inputs.rows))
        if size is None or size.shared is None:
            return None
        return size, self._plans.shared_work(prefixes, inputs.seq_lens, size.shared)

    def _lays_out(self, model: LanguageModel, states: StatePlan) -> bool:
        """Return whether decodes of a model whose layers keep a state have graphs, and make what these read."""
        # transformers' modules divide a step by its runs on the host, which no graph can repeat.
        if self._graphs is None or model.config.mixer is None:
            return False
        if self._graphs.states is None:
            self._graphs.states = DecodedStates.allocate(states, self._most_requests, self._device)
        return True

    def _send(
        self, inputs: StepInputs, work: npt.NDArray[np.int32], logit_rows: Any, size: GraphSize | None
    ) -> dict[str, Tensor]:
        """Send a step, and what has changed in the rows, with one copy. ``size``: of the graph that computes it."""
        drawing = inputs.rows[inputs.sampled]
        arrays: dict[str, npt.NDArray[Any]] = self._rows.changes()
        arrays |= {
            "rows": inputs.rows.astype(np.int32),
            "starts": inputs.cu_query_lens,
            "lengths": inputs.seq_lens,
            "token_ids": inputs.token_ids.astype(np.int32),
            "work": work,
            "drawn rows": drawing,
            "numbers": self._rows.numbers(drawing),
        }
        if logit_rows is not None:
            arrays["logit rows"] = logit_rows
        if inputs.rope is not None and inputs.rope.ndim > 1:
            arrays["rope"] = inputs.rope
        if inputs.limits is not None:
            arrays["limits"] = inputs.limits.astype(np.int32)
        if inputs.states is not None:
            arrays |= self._state_arrays(inputs.states, size)
        # One copy: block tables, slots, ids and parameters went in up to six, some of them blocking.
        sent = self._buffers.send(arrays)
        self._rows.apply(sent)
        return sent

    def _state_arrays(self, states: StatePlan, size: GraphSize | None) -> dict[str, npt.NDArray[np.int32]]:
        """Return what is sent of the slots that a step reads and writes."""
        if size is None:
            return dict(zip(_OF_RUNS, states.arrays(), strict=False))
        assert self._graphs is not None
        assert self._graphs.states is not None, "a step with states has a graph only over slots that lie still"
        slots = np.full((2, size.step.requests), self._graphs.states.spare, dtype=np.int32)
        slots[:, : len(states.read)] = states.read.numpy(), states.written.numpy()
        return {"state slots": slots}

    def _prepare(self, sent: dict[str, Tensor], padded: StepSize) -> None:
        step = SentStep(sent["rows"], sent["starts"], sent["lengths"], sent["token_ids"], sent["work"])
        rows = self._rows
        kept = (rows.tables, rows.last_tokens, rows.shifts)
        self._kernels.prepare(step, *kept, self._tensors, padded, self._plans.block_size)

    def _forward(
        self,
        model: LanguageModel,
        inputs: StepInputs,
        sent: Mapping[str, Tensor],
        kv_caches: list[KVCache],
        plan: AttentionPlan,
    ) -> Tensor:
        tensors, num_tokens = self._tensors, len(inputs.token_ids)
        # Copied: arrays from a message are read-only, which torch does not support.
        embeds = [(start, to_device(rows.copy(), self._device)) for start, rows in inputs.embeds]
        positions, states = sent.get("rope", tensors.positions[:num_tokens]), inputs.states
        if states is not None:
            most_tokens = int(np.diff(inputs.cu_query_lens).max(initial=0))
            states = states.sent_as([sent[name] for name in _OF_RUNS if name in sent], most_tokens)
        return model.forward(tensors.token_ids[:num_tokens], positions, kv_caches, plan, embeds, states)


def _logit_rows(inputs: StepInputs) -> npt.NDArray[np.int64]:
    """Return the rows [S] of a step whose logits are needed."""
    last: npt.NDArray[np.int64] = inputs.cu_query_lens[1:][inputs.sampled].astype(np.int64) - 1
    return inputs.rows_to_verify(last) if inputs.drafts else last


def _logits(model: LanguageModel, hidden: Tensor, rows: Tensor | None) -> Tensor:
    """Return the logits [S, vocab] of these rows, or of all."""
    if rows is None:
        return model.compute_logits(hidden)
    return model.compute_logits(hidden.index_select(0, rows)) if len(rows) else torch.empty(0, 0)


def make_device_steps(
    backend: AttentionBackend,
    batch: InputBatch,
    most_tokens: int,
    device: torch.device,
    tools: StepTools,
    capture: Capture | None,
    *,
    shares: bool = False,
) -> DeviceSteps | None:
    """Return what computes the steps of a device, see :class:`DeviceSteps`; None: the backend's plans keep on the host
    what differs between steps. ``shares``: whether requests may read shared keys together, where graphs are."""
    every = backend.parts if isinstance(backend, GroupedBackend) else [backend]
    parts = [part for part in every if isinstance(part, DeviceBackend)]
    if len(parts) < len(every):
        return None
    plans = StepPlans(backend, parts, shares=shares and capture is not None)
    return DeviceSteps(batch, plans, most_tokens, device, tools, capture)
