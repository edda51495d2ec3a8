"""Defines what a model asks of attention over a paged KV cache.

A backend owns the cache's layout. Once per step it turns the batch into a plan, which all layers then share: each
writes the new keys and values of all rows through the plan before any row attends, so that a request may read blocks
that another request fills in the same step.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory


@dataclass(frozen=True, eq=False)
# One object and not arguments: softcap, sinks and windows each change the softmax, and the next feature changes this
# class and the backends, but no call of attend.
class ScoreRule:
    """Holds what one layer does to its attention scores. A model makes it once for each layer, when it loads."""

    scale: float
    """The factor on query times key."""
    sliding_window: int | None = None
    """A token at position p sees (p - sliding_window, p]; None: it sees all positions up to its own."""
    softcap: float | None = None
    """A scaled score s becomes softcap * tanh(s / softcap), before any mask; None: it stays s."""
    sinks: Tensor | None = None
    """[num_heads] float32: a score of each head that enters the sum of the softmax and weighs no value; None: none."""
    chunk: int | None = None
    """A token at position p sees [p // chunk * chunk, p]; None: what the window says. Only ``varied_backend`` reads
    it."""
    sees_images: bool = False
    """Whether a token of an image sees the image's later tokens, as the plan's limits say; a window counts from its own
    position all the same."""

    @property
    def is_plain(self) -> bool:
        """Return whether a scaled, masked softmax is all there is."""
        return self.softcap is None and self.sinks is None


IntArray = npt.NDArray[np.signedinteger[Any]]

TOKENWISE = "tokenwise"
"""Names the attention and the operations of batch-invariant engines: the sums of a token are in an order that no other
token changes. The option ``batch_invariant`` chooses it, not ``attention_backend``."""

FP8_KV = torch.float8_e4m3fn
"""The dtype of a KV cache of 8-bit floats."""

KVCache = Tensor
"""Holds one layer's keys and values, [2, num_blocks, num_kv_heads, block_size, cache_head_size] ("HND"). What lies
behind the head size is zero.

A cache of compressed vectors has one plane and one head: [1, num_blocks, 1, block_size, cache_head_size].

In int8 the last dimension has 4 more bytes. The bytes of a head's block are then its numbers, [block_size,
cache_head_size], and behind all of them its scales, [block_size] float32; see ``attention.cache``."""


class AttentionPlan(Protocol):
    """Holds one step's batch, prepared: T tokens of n requests, with the tokens of one request next to each other."""

    def slots_of(self, kv_cache: KVCache) -> Tensor:
        """Return the slot of each token's keys and values in this layer's cache, block id * block_size + offset.

        [T] int64.
        """

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: KVCache) -> None:
        """Store [T, num_kv_heads, head_size] keys and values in the slots of their tokens."""

    def attend(self, query: Tensor, kv_cache: KVCache, rule: ScoreRule) -> Tensor:
        """Compute causal attention, but for what ``rule.sees_images`` says, of [T, num_heads, head_size] queries over
        the cached tokens of their requests.

        Returns [T, num_heads, head_size].
        """


class AttentionBackend(Protocol):
    """Makes the caches and the plans of one model."""

    @property
    def name(self) -> str:
        """The name under which ``attention_backends`` knows it."""

    def allocate(self, num_blocks: int, memory: PoolMemory | None = None) -> list[KVCache]:
        """Allocate one zeroed cache per layer, in fresh ``memory`` of the host if it is given."""

    @property
    def reads_tails(self) -> bool:
        """Whether ``attend`` reads the slots behind a request's tokens in its last block, and thus zeroes them first:
        an earlier owner of the block may have left NaN there, which a mask does not stop, because 0 * NaN is NaN."""

    def plan(
        self,
        cu_query_lens: IntArray,
        seq_lens: IntArray,
        block_tables: IntArray,
        slot_mapping: IntArray,
        foreign_tails: IntArray | None = None,
        limits: IntArray | None = None,
    ) -> AttentionPlan:
        """Prepare a step.

        ``cu_query_lens`` [n + 1]: where each request's tokens begin, from 0 to T. ``seq_lens`` [n]: tokens of each
        request in the cache once this step's are written. ``block_tables`` [n, ≥ blocks of the longest]: block ids in
        order of position; entries past a request's last block are not read. ``slot_mapping`` [T]:
        block id * block_size + offset of each token. ``foreign_tails``: indices of the requests behind whose tokens
        earlier plans have zeroed nothing, if ``reads_tails``; None: all requests. ``limits`` [T]: the last position
        that each token sees in layers whose rule has ``sees_images``: at least its own, growing in a request, and
        before the request's seq_len; None: its own. The arrays may be reused after the call.
        """


class WorkList(NamedTuple):
    """Lists what the programs of Triton's kernel compute in a step; other backends have an empty one."""

    entries: npt.NDArray[np.int32]
    """[entries, 4], see ``triton_backend.work_entries``."""
    num_wide: int
    """The first so many are of programs of the shape for the longest queries, the others of that for one query."""


@dataclass(frozen=True, slots=True)
class PlanTensors:
    """Holds the arrays of a step on the device; see ``kernels.triton.paged_attention.attend``."""

    slots: Tensor
    """[T] int64."""
    work: Tensor
    """[entries, 4] int32."""
    query_starts: Tensor
    """[n + 1] int32."""
    seq_lens: Tensor
    """[n] int32."""
    block_tables: Tensor
    """[n, blocks of the longest] int32."""
    limits: Tensor | None = None


@runtime_checkable
class DeviceBackend(AttentionBackend, Protocol):
    """Also makes plans of arrays that lie on the device, so that a step is one copy and a graph can hold it. Padding
    behind a step's requests are requests of one cached token and no query."""

    block_size: int
    plans_on_host: bool
    """Whether its plans are :class:`HostedPlan`."""
    captures_prompts: bool
    """Whether graphs hold steps with prompts, and not only decodes."""

    def room(self, tokens: int, requests: int) -> tuple[int, int]:
        """Return how many entries the list of a step of so many tokens and requests has at most: those of longer
        queries, and others."""

    def work(self, query_lens: IntArray, seq_lens: IntArray, most_queries: int, room: int = 0) -> WorkList:
        """Return the list for a step whose requests have at most so many queries each. ``room``: for how many wide
        entries there is room, which padding fills; 0: for those that there are."""

    def plan_of(
        self, tensors: PlanTensors, most_queries: int, num_wide: int, *, in_graph: bool = False
    ) -> AttentionPlan:
        """Return a plan of arrays that are on the device, or that will be when a layer reads them. The first
        ``num_wide`` entries of the list are wide. ``in_graph``: whether a graph holds what layers do with it."""


@runtime_checkable
class HostedPlan(AttentionPlan, Protocol):
    """Needs the lengths of a step on the host, too: a library divides the work there."""

    def begin(self, query_starts: IntArray, seq_lens: IntArray) -> None:
        """Prepare for a step of requests whose tokens begin at ``query_starts`` [n + 1] and which have ``seq_lens`` [n]
        tokens in the cache, before its first layer or the replay of its graph."""
