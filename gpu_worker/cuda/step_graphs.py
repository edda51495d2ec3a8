"""Replays steps as CUDA graphs: one call launches all kernels of a step.

A graph belongs to a size, and a step takes the next larger one. Decode steps have graphs of up to all requests, and
steps with prompts or drafts of up to 512 tokens. What lies behind a step's requests is padding: its tokens have no
slot, so they write no KV, and no entry in the list of the attention kernel, so they read none. All graphs share one
pool of memory, because only the results of the latest step are needed. Where requests may read shared keys together,
each size of decodes that is large enough has a second graph, for steps that do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tokenloom.process.fall_backs import OF_PROCESS

from ..attention.attention_backend import (
    AttentionBackend,
    AttentionPlan,
    DeviceBackend,
    HostedPlan,
    IntArray,
    KVCache,
    PlanTensors,
    WorkList,
)
from ..attention.grouped_backend import GroupedBackend, GroupedPlan
from ..attention.shared_prefix import SharedPrefixes, SharedRoom, SharingBackend
from ..models.model import LanguageModel, routes_of
from .step_tensors import Capture, DecodedStates, Graph, StepSize, StepTensors

# Steps with prompts have graphs too: a short chunk next to decodes made the whole step many single launches.
MOST_TOKENS = 512
"""Larger steps are computed operation by operation: the device takes longer than the calls."""
_NO_GRAPH = "no_graph"
_TOKEN_BUCKETS = (32, 64, 96, 128, 192, 256, 384, MOST_TOKENS)


@dataclass(frozen=True, slots=True)
class GraphSize:
    """Says what a graph holds."""

    step: StepSize
    is_decode: bool
    """Whether every request has one token and draws; otherwise the logits are not part of the graph."""
    num_wide: int = 0
    """For how many entries of longer queries there is room, before those of single ones."""
    shared: SharedRoom | None = None
    """For how many entries of keys that are read together there is room, before the others; None: none are."""


class _OneByOne:
    """Fulfils ``Graph`` for a step that the device did not capture: each replay calls its operations again."""

    def __init__(self, compute: Callable[[], Sequence[Tensor]]) -> None:
        """Compute the step. Raises what it raises."""
        self._compute = compute
        self.results = compute()

    def replay(self) -> None:
        self.results = self._compute()


def row_buckets(most: int) -> list[int]:
    """Return the sizes of decode graphs: 1, 2, 4, the multiples of 8 up to 64, and then those of 32; the last is
    ``most``."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(96, most + 1, 32)]
    return [size for size in sizes if size < most] + [most]


def token_buckets(most: int) -> list[int]:
    """Return the sizes, in tokens, of graphs of steps that compute prompts. ``most``: tokens of the largest step."""
    largest = min(most, MOST_TOKENS)
    return [size for size in _TOKEN_BUCKETS if size < largest] + [largest]


class StepPlans:
    """Makes attention plans that read the arrays of a step from the device."""

    def __init__(self, backend: AttentionBackend, parts: Sequence[DeviceBackend], *, shares: bool = False) -> None:
        """``parts``: the backends of the groups of layers. ``shares``: whether requests may read shared keys together,
        in the layers of the first group: those that see all tokens are there."""
        self._backend = backend
        self._parts = parts
        self._sharing = parts[0] if shares and isinstance(parts[0], SharingBackend) else None
        self.block_size = parts[0].block_size
        self.num_groups = len(parts)
        self.plans_on_host = any(part.plans_on_host for part in parts)
        self.captures_prompts = all(part.captures_prompts for part in parts)

    def work(self, query_lens: IntArray, seq_lens: IntArray, most_queries: int, room: int) -> WorkList:
        """Return the list of the attention kernel, as :meth:`DeviceBackend.work` does."""
        return self._parts[0].work(query_lens, seq_lens, most_queries, room)

    def room(self, tokens: int, requests: int) -> tuple[int, int]:
        """Return how many entries the list may have at most, as :meth:`DeviceBackend.room` does."""
        return self._parts[0].room(tokens, requests)

    def most_entries(self, tokens: int, requests: int) -> int:
        """Return how many entries the list of any step of at most so many tokens and requests has at most."""
        rooms = [self.room(1, requests), self.room(tokens, requests)]
        if (shared := self.shared_room(requests)) is not None:
            rooms.append((sum(shared), rooms[0][1]))
        return max(map(sum, rooms))

    def shared_room(self, requests: int) -> SharedRoom | None:
        """Return the room for keys that are read together in a step of so many requests; None: there are none."""
        return None if self._sharing is None else self._sharing.shared_room(requests)

    def find_shared(self, seq_lens: IntArray, block_tables: IntArray) -> SharedPrefixes | None:
        """Return what requests that each decode a token read together; None: nothing for which that pays.
        ``block_tables``: of all groups of layers."""
        if self._sharing is None:
            return None
        return self._sharing.find_shared(seq_lens, block_tables[:, :: self.num_groups])

    def shared_work(self, prefixes: SharedPrefixes, seq_lens: IntArray, room: SharedRoom) -> npt.NDArray[np.int32]:
        """Return the list of a step with keys that are read together, as :meth:`SharingBackend.shared_work` does."""
        assert self._sharing is not None, "the prefixes come from it"
        return self._sharing.shared_work(prefixes, seq_lens, room)

    def plan(
        self,
        tensors: StepTensors,
        most_queries: int,
        num_wide: int,
        limits: Tensor | None = None,
        *,
        in_graph: bool = False,
        shared: SharedRoom | None = None,
    ) -> AttentionPlan:
        """Return the plan of a step, of whose entries the first ``num_wide`` are of longer queries. ``limits`` [T]
        int32: as :meth:`..attention.attention_backend.AttentionBackend.plan` has them, of a step without a graph.
        ``shared``: the room for keys that are read together, at the beginning of the list."""
        plans = list[AttentionPlan]()
        for index, part in enumerate(self._parts):
            reads_together = shared is not None and index == 0
            arrays = PlanTensors(
                tensors.slots[index],
                tensors.work if shared is None or reads_together else tensors.work[sum(shared) :],
                tensors.query_starts,
                tensors.seq_lens,
                tensors.tables[index],
                limits,
            )
            if reads_together:
                assert self._sharing is not None, "the room comes from it"
                assert shared is not None, "the first group has it"
                plans.append(self._sharing.shared_plan_of(arrays, shared))
            else:
                plans.append(part.plan_of(arrays, most_queries, num_wide, in_graph=in_graph))
        return self._backend.join(plans) if isinstance(self._backend, GroupedBackend) else plans[0]

    def begin(self, plan: AttentionPlan, query_starts: IntArray, seq_lens: IntArray) -> None:
        """Prepare a plan for a step, as :class:`HostedPlan` says. Called if some backend ``plans_on_host``."""
        for part in plan.plans if isinstance(plan, GroupedPlan) else [plan]:
            if isinstance(part, HostedPlan):
                part.begin(query_starts, seq_lens)


class StepGraphs:
    """Holds the graphs of a model. Belongs to one thread."""

    def __init__(self, plans: StepPlans, tensors: StepTensors, capture: Capture, most: StepSize) -> None:
        """``tensors``: what the graphs read, with room for ``most``."""
        self._plans = plans
        self._tensors = tensors
        self._capture = capture
        self._most_requests = min(most.requests, most.tokens)
        self._rows = row_buckets(self._most_requests)
        self._tokens = token_buckets(most.tokens)
        self._graphs: dict[GraphSize, Graph] = {}
        """Each results in the last hidden states [tokens, hidden_size], and of a decode in logits [tokens, vocab]."""
        self._begun: dict[GraphSize, AttentionPlan] = {}
        """The plans of graphs that begin on the host; empty, if none does."""
        self.states: DecodedStates | None = None
        """What graphs of decodes read where layers keep a state. Other steps have no graphs there, because their runs
        are as many as their requests need."""

    @property
    def sizes(self) -> list[GraphSize]:
        """Return all sizes, the largest first, whose memory the others then share."""
        has_mixed = self.states is None and self._plans.captures_prompts
        mixed = [self._mixed(tokens) for tokens in self._tokens[::-1]] if has_mixed else []
        decodes = [size for rows in self._rows[::-1] for size in (self._shared(rows), self._decode(rows))]
        return mixed + [size for size in decodes if size is not None]

    def size_for(self, num_tokens: int, num_requests: int, *, is_decode: bool) -> GraphSize | None:
        """Return the least size for a step; None: it is larger than any, or has prompts that graphs do not hold."""
        if not is_decode and not self._plans.captures_prompts:
            return None
        buckets = self._rows if is_decode else self._tokens
        if not 0 < num_tokens <= buckets[-1] or num_requests > self._most_requests:
            return None
        bucket = next(size for size in buckets if size >= num_tokens)
        return self._decode(bucket) if is_decode else self._mixed(bucket)

    def _decode(self, rows: int) -> GraphSize:
        _, entries = self._plans.room(1, rows)
        return GraphSize(StepSize(rows, rows, entries), is_decode=True)

    def shared_size(self, num_requests: int) -> GraphSize | None:
        """Return the least size for a step that decodes and reads shared keys together, of no more requests than there
        may be; None: there is no such graph of its size."""
        return self._shared(next(size for size in self._rows if size >= num_requests))

    def _shared(self, rows: int) -> GraphSize | None:
        room = self._plans.shared_room(rows)
        if room is None:
            return None
        _, entries = self._plans.room(1, rows)
        return GraphSize(StepSize(rows, rows, sum(room) + entries), is_decode=True, shared=room)

    def _mixed(self, tokens: int) -> GraphSize:
        wide, narrow = self._plans.room(tokens, min(tokens, self._most_requests))
        return GraphSize(StepSize(tokens, self._most_requests, wide + narrow), is_decode=False, num_wide=wide)

    def forget(self) -> None:
        """Drop all graphs: the weights or the KV caches are others from now on."""
        self._graphs.clear()
        self._begun.clear()
        self.states = None
        self._capture.forget()
        OF_PROCESS.end(_NO_GRAPH)

    def record(self, size: GraphSize, model: LanguageModel, kv_caches: list[KVCache]) -> None:
        """Capture the graph of a size, if there is none. The tensors must hold a step of it, which may be padding."""
        if size not in self._graphs:
            if self.states is not None:
                self.states.clear()  # a capture computes the step, and the replay would then begin behind its tokens
            self._graphs[size] = self._record(size, model, kv_caches)

    def begin(self, size: GraphSize, query_starts: IntArray, seq_lens: IntArray) -> None:
        """Prepare the plan of a recorded size for a step, as :meth:`StepPlans.begin` says."""
        self._plans.begin(self._begun[size], query_starts, seq_lens)

    def run(self, size: GraphSize, slots: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Compute the step in the tensors, padded to ``size``, which is recorded. Returns the last hidden states
        [tokens, hidden_size] and the logits, if it is a decode, [tokens, vocab]; both hold until the next step.
        ``slots``: of its states, as :meth:`DecodedStates.fill` takes them."""
        if self.states is not None:
            assert slots is not None, "the step has states"
            self.states.fill(slots)
        graph = self._graphs[size]
        graph.replay()
        return graph.results[0], graph.results[1] if size.is_decode else None

    def _record(self, size: GraphSize, model: LanguageModel, kv_caches: list[KVCache]) -> Graph:
        tensors, routes = self._tensors.part(size.step), routes_of(model)
        most_queries = 1 if size.is_decode else size.step.tokens
        plan = self._plans.plan(tensors, most_queries, size.num_wide, in_graph=True, shared=size.shared)
        if self._plans.plans_on_host:
            # A full step of one token each: a library chooses its grid by the first step that it divides.
            every = np.arange(size.step.requests + 1, dtype=np.int32)
            self._plans.begin(plan, every, np.ones(size.step.requests, dtype=np.int32))
            self._begun[size] = plan
        states = None if self.states is None else self.states.part(size.step.requests)

        def compute() -> list[Tensor]:
            if routes is not None:
                # Behind the last request stands how many tokens the step has: experts compute none of the padding.
                routes.num_real = tensors.query_starts[-1:]
            try:
                hidden = model.forward(tensors.token_ids, tensors.positions, kv_caches, plan, (), states)
            finally:
                if routes is not None:
                    routes.num_real = None
            return [hidden, model.compute_logits(hidden)] if size.is_decode else [hidden]

        try:
            return self._capture(compute)
        except RuntimeError as error:  # PyTorch's, and the driver's
            # One size without a graph is slower, and no reason to serve nothing. What keeps the step itself from being
            # computed is raised by the next call.
            graph = _OneByOne(compute)
            kind = "decodes" if size.is_decode else "tokens"
            OF_PROCESS.add(_NO_GRAPH, f"{size.step.tokens} {kind}: {type(error).__name__}: {error!s:.200}")
            return graph
