"""Computes attention with kernels of libraries, FlashInfer and FlashAttention, over the same caches as Triton's.

``checkpoint.local_config.LIBRARIES`` says what each of them lacks. Their calls follow flashinfer-python 0.6.13 and
flash-attn-4 4.0.0b36, read and not run: no GPU was at hand. The tests call stand-ins of the same signatures.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..checkpoint.model_config import ModelConfig
from ..device.device_link import Event, copy_packed, link_of
from ..kernels.triton import launch, power_of_2
from ..kernels.triton.rows import list_pages
from .attention_backend import AttentionPlan, HostedPlan, IntArray, KVCache, PlanTensors, ScoreRule, WorkList
from .cache import LocalBackend, token_rows
from .triton_backend import write_rows

_NO_WORK = WorkList(np.zeros((0, 4), dtype=np.int32), 0)


class LibraryBackend(LocalBackend):
    """Holds what the backends of libraries share: plans of arrays on the device, whose keys and values are written by
    Triton's kernel."""

    name: str
    plans_on_host: bool
    captures_prompts: bool

    def room(self, tokens: int, requests: int) -> tuple[int, int]:
        return 0, 1  # the kernel that pads the list takes no array without elements

    def work(self, query_lens: IntArray, seq_lens: IntArray, most_queries: int, room: int = 0) -> WorkList:
        return _NO_WORK

    def plan(
        self,
        cu_query_lens: IntArray,
        seq_lens: IntArray,
        block_tables: IntArray,
        slot_mapping: IntArray,
        foreign_tails: IntArray | None = None,
        limits: IntArray | None = None,
    ) -> AttentionPlan:
        """Prepare a step as :class:`~.attention_backend.AttentionBackend` says, with one copy to the device."""
        assert limits is None, "the model shows no image whole"
        arrays: list[IntArray] = [slot_mapping.astype(np.int64), _NO_WORK.entries]
        arrays += [np.ascontiguousarray(each, dtype=np.int32) for each in (cu_query_lens, seq_lens, block_tables)]
        tensors = PlanTensors(*copy_packed(arrays, self.device))
        plan = self.plan_of(tensors, int(np.diff(cu_query_lens).max(initial=1)), 0)
        if isinstance(plan, HostedPlan):
            plan.begin(cu_query_lens, seq_lens)
        return plan

    def plan_of(
        self, tensors: PlanTensors, most_queries: int, num_wide: int, *, in_graph: bool = False
    ) -> AttentionPlan:
        raise NotImplementedError


class FlashAttnBackend(LibraryBackend):
    """Makes plans for FlashAttention 4, whose kernels take the arrays of a step as they lie on the device."""

    name = "flash-attn"
    plans_on_host = False
    captures_prompts = True

    def __init__(self, config: ModelConfig, block_size: int, device: torch.device) -> None:
        super().__init__(config, block_size, device)
        self.attend: Callable[..., Any] = importlib.import_module("flash_attn.cute").flash_attn_varlen_func

    def plan_of(
        self, tensors: PlanTensors, most_queries: int, num_wide: int, *, in_graph: bool = False
    ) -> AttentionPlan:
        return FlashAttnPlan(tensors, self.attend, most_queries)


@dataclass(frozen=True, slots=True)
class FlashAttnPlan:
    """Fulfils :class:`~.attention_backend.AttentionPlan`."""

    tensors: PlanTensors
    call: Callable[..., Any]
    """``flash_attn_varlen_func``."""
    most_queries: int

    def slots_of(self, kv_cache: KVCache) -> Tensor:
        return self.tensors.slots

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: KVCache) -> None:
        write_rows(key, value, kv_cache, self.tensors.slots)

    def attend(self, query: Tensor, kv_cache: KVCache, rule: ScoreRule) -> Tensor:
        tensors = self.tensors
        # Pages of [tokens, heads, head size]: another view of ours, whose heads come first.
        keys, values = (plane.transpose(1, 2) for plane in kv_cache.unbind())
        found, _ = self.call(
            q=token_rows(query),
            k=keys,
            v=values,
            cu_seqlens_q=tensors.query_starts,
            max_seqlen_q=self.most_queries,
            seqused_k=tensors.seq_lens,
            page_table=tensors.block_tables,
            softmax_scale=rule.scale,
            causal=True,
            window_size=(None, None) if rule.sliding_window is None else (rule.sliding_window - 1, 0),
            learnable_sink=rule.sinks,
            softcap=rule.softcap or 0.0,
        )
        result: Tensor = found
        return result


class FlashInferBackend(LibraryBackend):
    """Makes plans for FlashInfer, which divides the work of each step on the host and copies the division itself: for
    each kind of layer, two short arrays and its own, beside the one copy of the step."""

    name = "flashinfer"
    plans_on_host = True
    # Its graphs of several queries would need a workspace for every tile that the largest step may have.
    captures_prompts = False

    def __init__(self, config: ModelConfig, block_size: int, device: torch.device) -> None:
        super().__init__(config, block_size, device)
        self.library = importlib.import_module("flashinfer")
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_size, self.dtype, self.kv_dtype = config.head_size, config.dtype, config.kv_dtype
        self.eager: dict[bool, dict[_Kind, _Wrapper]] = {False: {}, True: {}}
        """For steps without a graph, of prompts (False) and of decodes."""
        self._workspaces: list[Tensor] = []
        self._pages: list[Tensor] = []

    def workspace(self, num_decodes: int) -> Tensor:
        """Return memory for what parts of keys find, in steps of so many decodes, or of prompts."""
        # Of a split step there are at most two programs for each multiprocessor and KV head; a graph of decodes has one
        # for each of them at least. Each keeps its rows, with a sum, in float32.
        group = self.num_heads // self.num_kv_heads
        rows = max((_MOST_PROGRAMS // self.num_kv_heads + 1) * _MOST_ROWS, num_decodes * (16 if group <= 16 else 128))
        needed = self.num_heads * rows * (self.head_size + 1) * 4 + (1 << 20)
        return _at_least(self._workspaces, needed, torch.uint8, self.device)

    def pages(self, count: int) -> Tensor:
        """Return room for the block ids of a step."""
        return _at_least(self._pages, count, torch.int32, self.device)

    def plan_of(
        self, tensors: PlanTensors, most_queries: int, num_wide: int, *, in_graph: bool = False
    ) -> AttentionPlan:
        return FlashInferPlan(self, tensors, is_decode=most_queries == 1, in_graph=in_graph)


_MOST_PROGRAMS = 2 * 192
"""For more multiprocessors than any GPU has."""
_MOST_ROWS = 128
"""Queries times query heads that a program computes."""


def _at_least(kept: list[Tensor], count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the largest of these arrays, or a larger one if ``count`` elements do not fit."""
    if not kept or len(kept[-1]) < count:  # graphs hold the addresses of those before, which stay where they are
        kept.append(torch.zeros(power_of_2(count), dtype=dtype, device=device))
    return kept[-1]


class _Kind(NamedTuple):
    """Says what FlashInfer must know of a layer when it divides a step."""

    scale: float
    window: int | None
    softcap: float | None


class _Lengths(NamedTuple):
    """Holds the lengths of a step as FlashInfer takes them: int32, on the host."""

    query_starts: Tensor
    """[n + 1]."""
    page_starts: Tensor
    """[n + 1]: where the pages of each request begin in the list of all."""
    in_last: Tensor
    """[n]: the tokens in the last page of each; 0 for padding, which has none."""
    num_pages: int


def _lengths(query_starts: IntArray, seq_lens: IntArray, padded: int, block_size: int) -> _Lengths:
    """Return the lengths of a step, padded to so many requests by ones without queries and pages."""
    count, has_queries = len(seq_lens), np.diff(query_starts) > 0
    starts = np.full(padded + 1, query_starts[-1], dtype=np.int32)
    starts[: count + 1] = query_starts
    in_last = np.zeros(padded, dtype=np.int32)
    in_last[:count] = np.where(has_queries, (seq_lens - 1) % block_size + 1, 0)
    page_starts = np.zeros(padded + 1, dtype=np.int32)
    np.cumsum(np.where(has_queries, -(-seq_lens // block_size), 0), out=page_starts[1 : count + 1])
    page_starts[count + 1 :] = page_starts[count]
    arrays = torch.from_numpy(starts), torch.from_numpy(page_starts), torch.from_numpy(in_last)
    return _Lengths(*arrays, int(page_starts[-1]))


class _Wrapper:
    """Holds a wrapper of FlashInfer for one kind of layer: divides steps, and computes with the latest division."""

    def __init__(self, backend: FlashInferBackend, kind: _Kind, num_decodes: int, graph_pages: Tensor | None) -> None:
        """``num_decodes``: of a graph; 0: steps have prompts. ``graph_pages``: the list that a graph reads; None: the
        wrapper has no graph, and steps any number of requests."""
        self._backend = backend
        self._kind = kind
        self._is_decode = num_decodes > 0
        self._copied: Event | None = None
        self._link = link_of(backend.device)
        options: dict[str, Any] = {}
        if self._is_decode:
            options["use_tensor_cores"] = True  # its other kernels know few ratios of query heads to KV heads
        if graph_pages is not None:
            starts = torch.zeros(num_decodes + 1, dtype=torch.int32, device=backend.device)
            in_last = torch.zeros(num_decodes, dtype=torch.int32, device=backend.device)
            options |= {"use_cuda_graph": True, "paged_kv_indptr_buffer": starts}
            options |= {"paged_kv_indices_buffer": graph_pages, "paged_kv_last_page_len_buffer": in_last}
        make = "BatchDecodeWithPagedKVCacheWrapper" if self._is_decode else "BatchPrefillWithPagedKVCacheWrapper"
        self._wrapper = getattr(backend.library, make)(backend.workspace(num_decodes), "HND", **options)

    def plan(self, lengths: "_Lengths", pages: Tensor) -> None:
        """Divide a step, whose list of ``pages`` the device has once it has done what it was given so far."""
        if self._copied is not None and not self._copied.query():
            # The division is copied from pinned memory that the wrapper has once, and the last copy may wait for its
            # turn: with steps one ahead the next division would overwrite it.
            self._copied.synchronize()
        backend, kind = self._backend, self._kind
        arrays = (lengths.page_starts, pages[: lengths.num_pages], lengths.in_last)
        shape = (backend.num_heads, backend.num_kv_heads, backend.head_size)
        options = {
            "sm_scale": kind.scale,
            "window_left": -1 if kind.window is None else kind.window - 1,
            "logits_soft_cap": kind.softcap or 0.0,
            "q_data_type": backend.dtype,
            "kv_data_type": backend.kv_dtype,
        }
        if self._is_decode:
            self._wrapper.plan(*arrays, *shape, backend.block_size, **options)
        else:
            self._wrapper.plan(lengths.query_starts, *arrays, *shape, backend.block_size, causal=True, **options)
        self._copied = self._link.event()

    def run(self, query: Tensor, kv_cache: KVCache) -> Tensor:
        """Return [T, num_heads, head_size] of the step that was divided last."""
        keys, values = kv_cache.unbind()
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        result: Tensor = self._wrapper.run(query, (keys, values), out=out)
        return result


class FlashInferPlan:
    """Fulfils :class:`~.attention_backend.HostedPlan`."""

    def __init__(self, backend: FlashInferBackend, tensors: PlanTensors, *, is_decode: bool, in_graph: bool) -> None:
        self._backend = backend
        self._tensors = tensors
        self._num_decodes = len(tensors.seq_lens) if is_decode else 0
        self._in_graph = in_graph
        self._pages = backend.pages(tensors.block_tables.numel())
        if in_graph:
            self._pages.zero_()  # a capture reads it: whatever it has had may be no block of the pool any more
        # A graph has wrappers of its own, whose arrays it reads; other steps share them.
        self._wrappers: dict[_Kind, _Wrapper] = {} if in_graph else backend.eager[is_decode]
        self._planned = set[_Kind]()
        self._lengths: _Lengths | None = None

    def begin(self, query_starts: IntArray, seq_lens: IntArray) -> None:
        tensors, backend = self._tensors, self._backend
        padded, block_size = len(tensors.seq_lens), backend.block_size
        self._lengths = _lengths(query_starts, seq_lens, padded, block_size)
        launch(
            list_pages,
            (padded,),
            tensors.block_tables,
            tensors.query_starts,
            tensors.seq_lens,
            self._pages,
            tensors.block_tables.stride(0),
            BLOCK=block_size,
            WIDTH=_WIDTH,
            num_warps=4,
        )
        for kind in self._planned:
            self._wrappers[kind].plan(self._lengths, self._pages)

    def slots_of(self, kv_cache: KVCache) -> Tensor:
        return self._tensors.slots

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: KVCache) -> None:
        write_rows(key, value, kv_cache, self._tensors.slots)

    def attend(self, query: Tensor, kv_cache: KVCache, rule: ScoreRule) -> Tensor:
        kind = _Kind(rule.scale, rule.sliding_window, rule.softcap)
        if kind not in self._planned:
            assert rule.sinks is None, "models with sinks are refused"
            self._plan(kind)
        return self._wrappers[kind].run(token_rows(query), kv_cache)

    def _plan(self, kind: _Kind) -> None:
        """Divide the step for the first layer of a kind: of a graph before its capture, which computes the step once
        without capturing it."""
        assert self._lengths is not None, "begin comes first"
        if kind not in self._wrappers:
            pages = self._pages if self._in_graph else None
            self._wrappers[kind] = _Wrapper(self._backend, kind, self._num_decodes, pages)
        self._wrappers[kind].plan(self._lengths, self._pages)
        self._planned.add(kind)


_WIDTH = 256
"""Requests or blocks that one turn of the kernel reads."""
_BACKENDS: dict[str, type[LibraryBackend]] = {each.name: each for each in (FlashInferBackend, FlashAttnBackend)}


def make_library_backend(name: str, config: ModelConfig, block_size: int, device: torch.device) -> LibraryBackend:
    """Return the backend of a library that is installed and has what the model needs. Raises ``ValueError`` if it
    cannot be imported, or is of a version without what is called."""
    try:
        return _BACKENDS[name](config, block_size, device)
    except (ImportError, OSError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"attention_backend {name}: the library does not work here ({reason}); choose auto") from error
