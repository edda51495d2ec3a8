"""Embeddings of tokens, rows that replace them, and the levels of rows that are added after layers."""

import pytest
import torch
from torch import Tensor

from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.gpu_worker.layers import embedding
from tokenloom.gpu_worker.layers.embedding import CutTable, add_level, embed
from tokenloom.gpu_worker.parallel.group import Alone


def test_rows_replace_embeddings_after_their_scale() -> None:
    table = torch.arange(6, dtype=torch.float32).view(3, 2)
    rows = torch.full((2, 4), 7.0)  # of two levels
    found = embed(table, torch.tensor([1, 0, 0, 2]), [(1, rows)], scale=10.0)
    assert found.tolist() == [[20.0, 30.0], [7.0, 7.0], [7.0, 7.0], [40.0, 50.0]]


def test_a_level_is_added_to_the_tokens_whose_rows_have_it() -> None:
    """A client's rows beside those of an image have one level."""
    deep = torch.arange(12, dtype=torch.float32).view(2, 6)
    embeds = [(0, torch.ones(1, 2)), (2, deep)]
    hidden = torch.zeros(4, 2)
    add_level(hidden, embeds, 1)
    assert hidden.tolist() == [[0.0, 0.0], [0.0, 0.0], [2.0, 3.0], [8.0, 9.0]]
    add_level(hidden, embeds, 2)
    assert hidden.tolist() == [[0.0, 0.0], [0.0, 0.0], [6.0, 8.0], [18.0, 20.0]]
    add_level(hidden, embeds, 3)
    assert hidden[2:].tolist() == [[6.0, 8.0], [18.0, 20.0]]


class Kept(Alone):
    """Keeps what a rank adds to the sum."""

    def all_reduce(self, x: Tensor) -> Tensor:
        self.given = x.clone()
        return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_kernel", [True, False])
def test_a_rank_adds_the_rows_that_it_has(
    has_kernel: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unavailable() -> None:
        raise KernelsUnavailable("no compiler")

    if not has_kernel:
        monkeypatch.setattr(embedding, "load_replay", unavailable)
    whole = torch.randn(11, 24, generator=torch.Generator().manual_seed(2)).to(dtype)
    ids = torch.tensor([0, 3, 4, 7, 8, 10, 5, 1 << 40, -1])
    is_own = (ids >= 4) & (ids < 8)
    group = Kept()
    table = CutTable(whole[4:8], 4, group)
    assert (table._gather is not None) is has_kernel
    found = embed(table, ids, [(0, torch.full((1, 24), 7.0))], scale=2.0)
    expected = torch.where(is_own[:, None], whole[ids.clamp(0, 10)], 0.0).to(dtype)
    assert torch.equal(group.given, expected)
    assert torch.equal(found[1:], 2 * expected[1:])
    assert found[0].tolist() == [7.0] * 24
