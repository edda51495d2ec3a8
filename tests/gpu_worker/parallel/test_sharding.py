"""Tests which part of tensors, heads and layers a rank gets."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.gpu_worker.checkpoint.weights import take_part
from tokenloom.gpu_worker.parallel.sharding import (
    WHOLE,
    RankPlace,
    Shard,
    ShardedDimension,
    joined,
    length,
    total,
)


def test_one_rank_has_plain_numbers() -> None:
    assert WHOLE.part(12) == 12
    assert WHOLE.kv_part(2, 8) == 16
    assert joined((12, 16, 16)) == 44
    weight = torch.ones(4, 3)
    assert take_part(weight, (4, 3)) is weight


def test_rows_are_a_view_of_the_file_and_columns_a_copy() -> None:
    weight = torch.arange(24.0).view(6, 4)
    rows = take_part(weight, (Shard(1, 2).part(3), 4))
    assert rows.equal(weight[3:])
    assert rows.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    columns = take_part(weight, (6, Shard(1, 2).part(2)))
    assert columns.equal(weight[:, 2:])
    assert columns.is_contiguous()
    assert columns.untyped_storage().nbytes() == 12 * 4


def test_parts_of_a_fused_tensor_lie_apart() -> None:
    shard = Shard(1, 2, num_kv_heads=2)
    query, kv = shard.part(8), shard.kv_part(1, 4)
    fused = joined((query, kv, kv))
    assert fused == ShardedDimension(32, ((8, 16), (20, 24), (28, 32)))
    assert (length(fused), total(fused)) == (16, 32)
    assert take_part(torch.arange(32), (fused,)).tolist() == [*range(8, 16), *range(20, 24), *range(28, 32)]


@given(st.integers(1, 300_000), st.integers(2, 16))
def test_every_token_is_on_one_rank(num_tokens: int, size: int) -> None:
    parts = [Shard(rank, size).vocabulary(num_tokens) for rank in range(size)]
    firsts, ends = zip(*(part.ranges[0] for part in parts if isinstance(part, ShardedDimension)), strict=True)
    assert (0, *ends) == (*firsts, num_tokens)
    sizes = [length(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert Shard(1, size, cuts_vocabulary=False).vocabulary(num_tokens) == num_tokens
    assert WHOLE.vocabulary(num_tokens) == num_tokens


@pytest.mark.parametrize(("rank", "head"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_ranks_share_kv_heads_if_there_are_fewer(rank: int, head: int) -> None:
    assert Shard(rank, 4, num_kv_heads=2).kv_part(1, 8) == ShardedDimension(16, ((head * 8, head * 8 + 8),))


@given(st.integers(1, 60), st.integers(1, 8))
def test_stages_have_all_layers_once_in_order(num_layers: int, num_stages: int) -> None:
    stages = [RankPlace(stage=stage, num_stages=num_stages).layers(num_layers) for stage in range(num_stages)]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


def test_the_first_rank_of_the_last_stage_draws() -> None:
    places = [RankPlace(rank % 2, 2, rank // 2, 3) for rank in range(6)]
    assert [place.samples for place in places] == [False, False, False, False, True, False]
    assert {place.output_rank for place in places} == {4}
