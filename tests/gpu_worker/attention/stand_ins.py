"""Stands in for FlashInfer and FlashAttention: modules with the signatures of flashinfer-python 0.6.13 and flash-attn-4
4.0.0b36 as far as they are called, which refuse what those would refuse and compute in PyTorch."""

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenloom.gpu_worker.attention import library_backends

INT32 = torch.int32


def attend_paged(
    query: Tensor, keys: Tensor, values: Tensor, query_starts: list[int], pages: list[list[int]], lengths: list[int],
    scale: float, window: int | None, softcap: float, sinks: Tensor | None, out: Tensor,
) -> None:  # fmt: skip
    """Attend from the last positions of each request. ``keys``, ``values``: [pages, kv_heads, block, head]."""
    group = query.shape[1] // keys.shape[1]
    query, keys, values = query.cpu(), keys.cpu(), values.cpu()
    for start, end, ids, length in zip(query_starts, query_starts[1:], pages, lengths, strict=False):
        if start == end:
            continue
        k, v = (each[ids].float().transpose(0, 1).flatten(1, 2)[:, :length] for each in (keys, values))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = torch.einsum("qhd,hkd->hqk", query[start:end].float(), k) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        at, places = torch.arange(length - (end - start), length)[:, None], torch.arange(length)
        sees = places <= at
        if window is not None:
            sees &= places > at - window
        scores = scores.masked_fill(~sees, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, end - start, 1)), -1)
        weights = torch.softmax(scores, -1)[..., :length]
        out[start:end] = torch.einsum("hqk,hkd->qhd", weights, v).to(out.dtype)


class _Wrapper:
    """What both wrappers share. A plan is a copy to the device, which ``run`` reads, and nothing of the host."""

    def __init__(self, module: "FlashInfer", workspace: Tensor, kv_layout: str) -> None:
        assert kv_layout == "HND"
        assert workspace.dtype == torch.uint8
        assert len(workspace) >= 64 << 10
        self._module = module
        self._workspace = workspace
        self.device = workspace.device
        self._graph: tuple[Tensor, Tensor, Tensor] | None = None
        module.made.append(self)

    def _take(self, starts: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, options: dict[str, Any]) -> None:
        for host in (starts, indptr, last):
            assert host.dtype == INT32
            assert host.device.type == "cpu", "a tensor of the device would make the host wait"
        assert indices.dtype == INT32
        assert indices.device == self.device
        assert len(indices) == int(indptr[-1])
        assert len(indptr) == len(starts) == len(last) + 1
        assert ((indptr[1:] == indptr[:-1]) == (last == 0)).all()
        assert int(last.max()) <= options["page_size"]
        if self._graph is not None:
            assert len(last) == len(self._graph[2]), "the batch of a graph is fixed"
            assert len(indices) <= len(self._graph[1])
            assert indices.data_ptr() == self._graph[1].data_ptr(), "the graph reads the list where it lies"
            self._graph[0].copy_(indptr)
            self._graph[2].copy_(last)
            self._arrays = self._graph
        else:
            self._arrays = indptr.to(self.device), indices.to(self.device), last.to(self.device)
        self._starts, self._options = starts.tolist(), options
        self._module.calls["plan"] += 1

    def _run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        options, (keys, values) = self._options, paged_kv_cache
        heads, kv_heads, size = options["heads"], options["kv_heads"], options["size"]
        assert q.shape == out.shape == (self._starts[-1], heads, size)
        assert q.dtype == out.dtype == options["q"]
        assert q.stride(2) == 1
        assert keys.dtype == values.dtype == options["kv"]
        assert keys.shape[1:] == values.shape[1:] == (kv_heads, options["page_size"], size)
        indptr, indices, last = (each.tolist() for each in self._arrays)
        pages = [indices[a:b] for a, b in itertools.pairwise(indptr)]
        lengths = [max(0, len(each) - 1) * options["page_size"] + n for each, n in zip(pages, last, strict=True)]
        window = None if options["window"] < 0 else options["window"] + 1
        rule = options["scale"], window, options["softcap"]
        attend_paged(q, keys, values, self._starts, pages, lengths, *rule, None, out)
        self._module.calls["run"] += 1
        return out


class FlashInfer:
    """The module."""

    def __init__(self) -> None:
        self.calls = Counter[str]()
        self.made: list[Any] = []
        module = self

        class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
            def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
                super().__init__(module, float_workspace_buffer, kv_layout)

            def plan(
                self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor,
                paged_kv_last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int,
                *, causal: bool = False, sm_scale: float | None = None, window_left: int = -1,
                logits_soft_cap: float | None = None, q_data_type: Any = "float16", kv_data_type: Any = None,
            ) -> None:  # fmt: skip
                assert causal
                module.calls["prefill"] += 1
                self._take(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, {
                    "heads": num_qo_heads, "kv_heads": num_kv_heads, "size": head_dim_qk, "page_size": page_size,
                    "scale": sm_scale, "window": window_left, "softcap": logits_soft_cap, "q": q_data_type,
                    "kv": kv_data_type,
                })  # fmt: skip

            def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
                return self._run(q, paged_kv_cache, out)

        class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
            def __init__(
                self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
                use_tensor_cores: bool = False, paged_kv_indptr_buffer: Tensor | None = None,
                paged_kv_indices_buffer: Tensor | None = None, paged_kv_last_page_len_buffer: Tensor | None = None,
            ) -> None:  # fmt: skip
                super().__init__(module, float_workspace_buffer, kv_layout)
                assert use_tensor_cores
                if use_cuda_graph:
                    buffers = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
                    assert all(each is not None and each.device == self.device for each in buffers)
                    self._graph = buffers  # type: ignore[assignment]

            def plan(
                self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
                head_dim: int, page_size: int, *, window_left: int = -1, logits_soft_cap: float | None = None,
                q_data_type: Any = "float16", kv_data_type: Any = None, sm_scale: float | None = None,
            ) -> None:  # fmt: skip
                module.calls["decode"] += 1
                self._take(torch.arange(len(indptr), dtype=INT32), indptr, indices, last_page_len, {
                    "heads": num_qo_heads, "kv_heads": num_kv_heads, "size": head_dim, "page_size": page_size,
                    "scale": sm_scale, "window": window_left, "softcap": logits_soft_cap, "q": q_data_type,
                    "kv": kv_data_type,
                })  # fmt: skip

            def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
                return self._run(q, paged_kv_cache, out)

        self.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
        self.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper


class FlashAttn:
    """The module ``flash_attn.cute``."""

    def __init__(self) -> None:
        self.calls = Counter[str]()

    def flash_attn_varlen_func(
        self, q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, max_seqlen_q: int, seqused_k: Tensor,
        page_table: Tensor, softmax_scale: float, causal: bool, window_size: tuple[int | None, int | None],
        learnable_sink: Tensor | None, softcap: float,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert causal
        for each in (cu_seqlens_q, seqused_k, page_table):
            assert each.dtype == INT32
            assert each.device == q.device
            assert each.stride(-1) == 1
        count, (_, block, kv_heads, size) = len(seqused_k), k.shape
        assert cu_seqlens_q.shape == (count + 1,)
        assert page_table.dim() == 2
        assert len(page_table) == count
        assert q.dtype == k.dtype == v.dtype
        assert q.shape[2] == size
        assert q.shape[1] % kv_heads == 0
        assert k.shape == v.shape
        assert k.stride(3) == v.stride(3) == 1
        starts, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
        assert max(b - a for a, b in itertools.pairwise(starts)) <= max_seqlen_q
        left, right = window_size
        assert right == (None if left is None else 0)
        pages = [row[: -(-n // block)] for row, n in zip(page_table.tolist(), lengths, strict=True)]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        by_head = k.transpose(1, 2), v.transpose(1, 2)
        window = None if left is None else left + 1
        attend_paged(q, *by_head, starts, pages, lengths, softmax_scale, window, softcap, learnable_sink, out)
        self.calls["run"] += 1
        return out, None


def install(monkeypatch: pytest.MonkeyPatch) -> tuple[FlashInfer, FlashAttn]:
    """Let the backends find both libraries. Returns the modules."""
    inferring, attending = FlashInfer(), FlashAttn()
    modules = {"flashinfer": inferring, "flash_attn.cute": attending}
    # Not in sys.modules, where transformers would look for them, too.
    monkeypatch.setattr(library_backends, "importlib", SimpleNamespace(import_module=modules.__getitem__))
    return inferring, attending
