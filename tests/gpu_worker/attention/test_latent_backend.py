"""Attention over compressed vectors, expanded, absorbed and by the C++ kernel, is that of each head's own keys."""

import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tokenloom.gpu_worker.attention.attention_backend import TOKENWISE
from tokenloom.gpu_worker.attention.latent_backend import LatentBackend, LatentCPUBackend, LatentProjection
from tokenloom.gpu_worker.checkpoint.model_config import LatentSwitches
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.gpu_worker.kernels.levels import available_levels
from tokenloom.gpu_worker.ops.cpu_ops import TokenwiseOps

CPU = torch.device("cpu")
BLOCK_SIZE = 16
RANK, ROPE = 64, 16
LATENT = LatentSwitches(rank=RANK, rope_size=ROPE, key_size=24, value_size=20, query_rank=None, is_interleaved=True)
NEEDS_COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
# Decodes around blocks, chunks of 128 and stretches of 1,024 positions; prompts in chunks; whole prompts.
BATCHES = {
    "decodes": ([1] * 9, [1, 15, 16, 17, 127, 129, 1024, 1025, 2100]),
    "few after many": ([3, 1, 5], [300, 40, 1030]),
    "prompts": ([40, 300, 1], [40, 300, 77]),
    "both": ([1, 200, 2], [60, 500, 90]),
}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


class Step:
    """A batch over a cache of random vectors, in which what no request owns is NaN."""

    def __init__(self, query_lens: list[int], seq_lens: list[int], num_heads: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(sum(seq_lens))
        width, total = -(-max(seq_lens) // BLOCK_SIZE), sum(query_lens)
        num_blocks = len(seq_lens) * width
        self.tables = torch.randperm(num_blocks, generator=generator).view(-1, width).numpy()
        ends = zip(query_lens, seq_lens, self.tables, strict=True)
        positions = [(np.arange(end - count, end), table) for count, end, table in ends]
        self.arrays: dict[str, Any] = {
            "cu_query_lens": np.cumsum([0, *query_lens]).astype(np.int32),
            "seq_lens": np.array(seq_lens, dtype=np.int32),
            "block_tables": self.tables.astype(np.int32),
            "slot_mapping": np.concatenate([t[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p, t in positions]),
        }

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(dtype)

        self.cache = normal(1, num_blocks, 1, BLOCK_SIZE, RANK + ROPE)
        for length, table in zip(seq_lens, self.tables, strict=True):
            rows = self.cache[0, table.tolist(), 0].flatten(0, 1)
            rows[length:] = torch.nan
            self.cache[0, table.tolist(), 0] = rows.view(width, BLOCK_SIZE, -1)
        self.latents = normal(total, RANK + ROPE)
        self.query, self.rotated = normal(total, num_heads, 24), normal(total, num_heads, ROPE)
        self.weight = normal(num_heads * 44, RANK) / 8
        self.projection = LatentProjection(self.weight, LATENT, 0.3)

    def run(self, backend: LatentBackend) -> Tensor:
        plan, cache = backend.plan(**self.arrays), self.cache.clone()
        plan.write_latents(self.latents, cache)
        return plan.attend_latents(self.query, self.rotated, cache, self.projection)

    def by_hand(self) -> Tensor:
        """What each head's own keys and values give, in float64."""
        cache = self.cache.clone()
        LatentBackend(CONFIG, BLOCK_SIZE, CPU).plan(**self.arrays).write_latents(self.latents, cache)
        matrices = self.weight.view(-1, 44, RANK).double()
        parts = []
        starts = self.arrays["cu_query_lens"].tolist()
        for request, (length, table) in enumerate(zip(self.arrays["seq_lens"].tolist(), self.tables, strict=True)):
            rows = cache[0, table.tolist(), 0].flatten(0, 1)[:length].double()
            both = torch.einsum("sr,hor->hso", rows[:, :RANK], matrices)
            keys = torch.cat((both[..., :24], rows[None, :, RANK:].expand(len(matrices), -1, -1)), dim=2)
            chosen = slice(starts[request], starts[request + 1])
            query = torch.cat((self.query[chosen], self.rotated[chosen]), dim=2).double()
            scores = torch.einsum("qhd,hsd->hqs", query, keys) * 0.3
            count = chosen.stop - chosen.start
            hidden = torch.arange(length) > torch.arange(length - count, length)[:, None]
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            parts.append(torch.einsum("hqs,hsd->qhd", weights, both[..., 24:]).flatten(1))
        return torch.cat(parts)


CONFIG: Any = SimpleNamespace(latent=LATENT, mixer=None)


def assert_near(found: Tensor, expected: Tensor) -> None:
    limit = TOLERANCE[found.dtype] * float(expected.abs().max())
    assert float((found.double() - expected).abs().max()) < limit


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["torch", "reference"])
def test_equals_heads_with_keys_of_their_own(name: str, dtype: torch.dtype, batch: str) -> None:
    step = Step(*BATCHES[batch], 4, dtype)
    assert_near(step.run(LatentBackend(CONFIG, BLOCK_SIZE, CPU, name)), step.by_hand())


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_token_of_a_batch_invariant_engine_has_the_same_bits_alone(dtype: torch.dtype) -> None:
    """Also where a prompt's keys would be expanded."""
    query_lens, seq_lens = [300, 1, 40], [300, 1400, 90]
    step = Step(query_lens, seq_lens, 5, dtype)
    step.projection = LatentProjection(step.weight, LATENT, 0.3, TokenwiseOps().per_head)
    backend = LatentCPUBackend(CONFIG, BLOCK_SIZE, CPU, name=TOKENWISE)
    whole = step.run(backend)
    assert_near(whole, step.by_hand())
    backend.plan(**step.arrays).write_latents(step.latents, step.cache)
    for request, (end, length) in enumerate(zip(np.cumsum(query_lens).tolist(), seq_lens, strict=True)):
        for count in (1, min(17, query_lens[request])):
            rows = slice(end - count, end)
            tables, slots = step.arrays["block_tables"][request, None], step.arrays["slot_mapping"][rows]
            plan = backend.plan(np.array([0, count]), np.array([length]), tables, slots)
            found = plan.attend_latents(step.query[rows], step.rotated[rows], step.cache, step.projection)
            assert torch.equal(found, whole[rows])


@NEEDS_COMPILER
@pytest.mark.parametrize("march", ["native", *sorted({level.flags[0][7:] for level in available_levels()})])
def test_the_kernel_of_each_level(march: str) -> None:
    for dtype in TOLERANCE:
        for batch, num_heads in (("decodes", 5), ("few after many", 20), ("both", 70)):
            step = Step(*BATCHES[batch], num_heads, dtype)
            found = step.run(LatentCPUBackend(CONFIG, BLOCK_SIZE, CPU, march))
            assert_near(found, step.by_hand())


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_request_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    backend, step = LatentCPUBackend(CONFIG, BLOCK_SIZE, CPU), Step([1, 1], [1500, 2100], 4, dtype)
    queries = torch.cat((step.projection.absorb(step.query), step.rotated), dim=2)
    cache = step.cache.nan_to_num()  # the steps' own tokens are not written
    found = []
    for first in (0, 1):
        lengths, tables = (step.arrays[name][first:] for name in ("seq_lens", "block_tables"))
        plan = backend.plan(np.arange(3 - first), lengths, tables, step.arrays["slot_mapping"][first:])
        found.append(plan.attend_absorbed(queries[first:], plan.spans, cache, step.projection)[-1])
    assert torch.equal(*found)


@NEEDS_COMPILER
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_what_is_not_finite_stays_with_its_request(dtype: torch.dtype, value: float) -> None:
    step = Step([1, 1], [200, 140], 4, dtype)
    step.cache[0, int(step.tables[0, 3]), 0, 5, 7] = value
    found = step.run(LatentCPUBackend(CONFIG, BLOCK_SIZE, CPU))
    assert not found[0].isfinite().any()
    assert found[1].isfinite().all()


@pytest.mark.parametrize(("rank", "block_size", "reason"), [(40, 16, "40 elements"), (64, 8, "block size 8")])
def test_shapes_that_the_kernel_does_not_take(rank: int, block_size: int, reason: str) -> None:
    latent = LatentSwitches(rank=rank, rope_size=8, key_size=8, value_size=8, query_rank=None, is_interleaved=True)
    with pytest.raises(KernelsUnavailable, match=reason):
        LatentCPUBackend(SimpleNamespace(latent=latent, mixer=None), block_size, CPU)  # type: ignore[arg-type]
