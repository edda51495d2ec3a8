"""Attention over the arrays that a device holds, in operations of torch that read nothing on the host."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.gpu_worker.attention.attention_backend import AttentionPlan, KVCache, PlanTensors, ScoreRule
from tokenloom.gpu_worker.attention.triton_backend import TritonBackend


class TensorBackend(TritonBackend):
    """Makes the plans of the Triton backend without its kernels. Its caches have a block that no request gets."""

    def allocate(self, num_blocks: int, memory: PoolMemory | None = None) -> list[KVCache]:
        return super().allocate(num_blocks + 1, memory)

    def plan_of(
        self, tensors: PlanTensors, most_queries: int, num_wide: int, *, in_graph: bool = False
    ) -> AttentionPlan:
        return TensorPlan(tensors, self.block_size)


@dataclass(frozen=True, slots=True)
class TensorPlan:
    tensors: PlanTensors
    block_size: int

    def slots_of(self, kv_cache: KVCache) -> Tensor:
        return self.tensors.slots

    def write_kv(self, key: Tensor, value: Tensor, kv_cache: KVCache) -> None:
        """Padding writes to the block that no request has."""
        slots, last = self.tensors.slots, kv_cache.shape[1] - 1
        blocks = torch.where(slots < 0, last, slots // self.block_size)
        places = torch.where(slots < 0, 0, slots % self.block_size)
        for cache, values in zip(kv_cache.unbind(), (key, value), strict=True):
            cache[blocks, :, places] = torch.nn.functional.pad(values, (0, cache.shape[3] - values.shape[2]))

    def attend(self, query: Tensor, kv_cache: KVCache, rule: ScoreRule) -> Tensor:
        tensors, (num_tokens, num_heads, head) = self.tensors, query.shape
        tokens = torch.arange(num_tokens)
        request = torch.searchsorted(tensors.query_starts[1:].contiguous(), tokens.to(torch.int32), right=True)
        request = request.clamp(max=len(tensors.seq_lens) - 1)
        ends = tensors.query_starts[1:][request]
        positions = tensors.seq_lens[request] - (ends - tokens)
        keys, values = (self._rows(cache, request)[..., :head] for cache in kv_cache.unbind())
        num_kv_heads = keys.shape[1]
        grouped = query.float().reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head)
        scores = torch.einsum("tghd,tgkd->tghk", grouped, keys.float()) * rule.scale
        if rule.softcap:
            scores = torch.tanh(scores / rule.softcap) * rule.softcap
        places = torch.arange(scores.shape[3])
        seen = places <= positions[:, None]
        if rule.sees_images and tensors.limits is not None:
            seen = places <= tensors.limits[:, None]
        if rule.sliding_window is not None:
            seen &= places > positions[:, None] - rule.sliding_window
        weights = torch.softmax(scores.masked_fill(~seen[:, None, None], float("-inf")), -1).nan_to_num(0.0)
        return torch.einsum("tghk,tgkd->tghd", weights, values.float()).reshape(query.shape).to(query.dtype)

    def _rows(self, cache: Tensor, request: Tensor) -> Tensor:
        """The keys or values of each token's request, [T, num_kv_heads, blocks * block size, head]."""
        blocks = self.tensors.block_tables[request].long().clamp(max=len(cache) - 1)  # those behind are not read
        return cache[blocks].transpose(1, 2).flatten(2, 3)
