"""Computes attention over the rows that stand beside prompts, with another backend of the same blocks.

The keys and values of the rows lie in blocks of the pool, as those of tokens do. To the backend a request of a step
then has so many tokens as rows, of which the step's tokens are the last ones, and each sees all of them.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory

from ..device.device_link import to_device
from .attention_backend import TOKENWISE, AttentionBackend, AttentionPlan, IntArray, KVCache, ScoreRule
from .cache import elements

Int32s = npt.NDArray[np.int32]


class WrittenRows(NamedTuple):
    """Holds the rows beside one prompt, in the step that writes their keys and values."""

    request: int
    """In [0, R)."""
    rows: npt.NDArray[np.float32]
    """[num_rows, hidden_size]"""


class StepCross(NamedTuple):
    """Holds what a step of R requests has beside their prompts."""

    tables: Int32s
    """[R, blocks]: where the keys and values of each request's rows lie."""
    written: Sequence[WrittenRows]
    """What this step writes."""
    attended: dict[int, list[Tensor]]
    """For requests that ask for it, by their index in [0, R): the weights [heads, n, num_rows] with which their tokens
    attend to the rows in chosen heads, a part for each layer that has some. The layers add them."""


class CrossBackend:
    """Fulfils :class:`~.attention_backend.AttentionBackend` for a model that attends to rows beside prompts."""

    def __init__(self, tokens: AttentionBackend, rows: AttentionBackend, num_rows: int, block_size: int) -> None:
        """``tokens`` and ``rows``: two backends of the same model, because each keeps what it found about its last
        step."""
        self._tokens = tokens
        self.rows = rows
        self.num_rows = num_rows
        """Those beside each prompt."""
        self.block_size = block_size

    @property
    def name(self) -> str:
        return self._tokens.name

    @property
    def reads_tails(self) -> bool:
        return self._tokens.reads_tails

    def allocate(self, num_blocks: int, memory: PoolMemory | None = None) -> list[KVCache]:
        return self._tokens.allocate(num_blocks, memory)

    def plan(
        self,
        cu_query_lens: IntArray,
        seq_lens: IntArray,
        block_tables: IntArray,
        slot_mapping: IntArray,
        foreign_tails: IntArray | None = None,
        limits: IntArray | None = None,
    ) -> "CrossPlan":
        plan = self._tokens.plan(cu_query_lens, seq_lens, block_tables, slot_mapping, foreign_tails, limits)
        return CrossPlan(self, plan, cu_query_lens.copy())


class CrossPlan:
    """Holds the plan of a step's tokens, and what lies beside their prompts."""

    def __init__(self, backend: CrossBackend, tokens: AttentionPlan, cu_query_lens: IntArray) -> None:
        self._backend = backend
        self._tokens = tokens
        self._cu_query_lens = cu_query_lens
        self._device = torch.device("cpu")
        self._rows: AttentionPlan | None = None
        self._step: StepCross | None = None
        self._writers: list[AttentionPlan] = []

    def take(self, step: StepCross, device: torch.device) -> None:
        """Let the plan be that of a step with these rows. Without it each token sees what lies in the first block, as
        a step does that only measures memory and time."""
        self._step, self._device = step, device
        self._writers = [self._writer(step.tables[each.request]) for each in step.written]

    def slots_of(self, kv_cache: KVCache) -> Tensor:
        return self._tokens.slots_of(kv_cache)

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: KVCache) -> None:
        self._tokens.write_kv(key, value, kv_cache)

    def attend(self, query: Tensor, kv_cache: KVCache, rule: ScoreRule) -> Tensor:
        return self._tokens.attend(query, kv_cache, rule)

    def attend_rows(self, query: Tensor, kv_cache: KVCache, rule: ScoreRule) -> Tensor:
        """Compute attention of [T, num_heads, head_size] queries over all rows beside their prompts. ``rule`` has
        ``sees_images``. Returns [T, num_heads, head_size]."""
        if self._rows is None:
            self._rows = self._plan_rows()
        return self._rows.attend(query, kv_cache, rule)

    def written(self, dtype: torch.dtype) -> Iterator[tuple[AttentionPlan, Tensor]]:
        """Yield the rows [num_rows, hidden_size] whose keys and values the step writes, and the plan that does. Those
        of one prompt at a time are on the device."""
        written = () if self._step is None else self._step.written
        for writer, each in zip(self._writers, written, strict=True):
            # Copied: arrays from a message are read-only, which torch does not support.
            yield writer, to_device(each.rows.copy(), self._device).to(dtype)

    def note_weights(self, query: Tensor, kv_cache: KVCache, rule: ScoreRule, heads: Sequence[int]) -> None:
        """Add the weights of these heads of a layer for the requests that ask for them."""
        if self._step is None:
            return
        for request, parts in self._step.attended.items():
            begin, end = self._cu_query_lens[request : request + 2].tolist()
            blocks = elements(kv_cache[0][torch.from_numpy(self._step.tables[request]).to(kv_cache.device)])
            keys = blocks.transpose(0, 1).flatten(1, 2)[:, : self._backend.num_rows, : query.shape[2]].float()
            chosen = query[begin:end, heads].transpose(0, 1).float()
            shared = query.shape[1] // len(keys)
            scores = chosen @ keys[[head // shared for head in heads]].transpose(1, 2) * rule.scale
            parts.append(scores.softmax(-1))

    def tables(self) -> Int32s:
        """Return where the keys and values of each request's rows lie, [R, blocks]."""
        num_blocks = -(-self._backend.num_rows // self._backend.block_size)
        if self._step is None:
            return np.zeros((len(self._cu_query_lens) - 1, num_blocks), dtype=np.int32)
        return self._step.tables

    def _plan_rows(self) -> AttentionPlan:
        backend, starts, tables = self._backend, self._cu_query_lens, self.tables()
        if backend.rows.name == TOKENWISE:  # whose tokens are requests of their own
            tables, starts = np.repeat(tables, np.diff(starts), axis=0), np.arange(starts[-1] + 1)
        lengths = np.full(len(tables), backend.num_rows, dtype=np.int32)
        num_tokens = int(starts[-1])
        limits = None if len(tables) == num_tokens else np.full(num_tokens, backend.num_rows - 1, dtype=np.int32)
        # No token writes here; the backends look at places only where they write.
        slots = np.zeros(num_tokens, dtype=np.int64)
        written = () if self._step is None else self._step.written
        fresh = np.array([each.request for each in written], dtype=np.int64)
        return backend.rows.plan(starts, lengths, tables, slots, fresh, limits)

    def _writer(self, table: Int32s) -> AttentionPlan:
        """Return the plan of a request that computes all rows, of which only the writing is used."""
        num_rows, size = self._backend.num_rows, self._backend.block_size
        places = np.arange(num_rows)
        slots = table[places // size].astype(np.int64) * size + places % size
        starts, lengths = np.array([0, num_rows], dtype=np.int32), np.array([num_rows], dtype=np.int32)
        return self._backend.rows.plan(starts, lengths, table[None], slots, np.arange(0))
