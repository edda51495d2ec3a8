import pytest

from tests.engine_core.kv_cache.grouped_hash_worker import groups_of
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, KVConfig
from tokenloom.engine_core.data.kv_groups import (
    KVGroup,
    KVNeed,
    describe_groups,
    first_seen_block,
    layers_per_group,
    model_groups,
    partition_layers,
)


def gemma3(num_layers: int, window: int = 1024) -> list[int | None]:
    return [None if (layer + 1) % 6 == 0 else window for layer in range(num_layers)]


@pytest.mark.parametrize("windows", [(), (None,) * 4, (512,) * 4, (None, 4096), (5000, 4096)])
def test_layers_of_one_kind_need_no_groups(windows: tuple[int | None, ...]) -> None:
    assert partition_layers(windows, max_model_len=4096) == []


def test_full_attention_comes_first_and_each_layer_has_a_place() -> None:
    groups = partition_layers([8, None, 4, 8, None, 8, 4, 8], max_model_len=100)
    assert groups == [KVGroup(None, [1, 4]), KVGroup(8, [0, 3]), KVGroup(8, [5, 7]), KVGroup(4, [2, 6])]


@pytest.mark.parametrize(
    ("num_layers", "size", "num_groups"),
    [(26, 4, 7), (34, 5, 7), (48, 8, 6), (62, 11, 6), (12, 2, 6)],
)
def test_few_places_stay_empty(num_layers: int, size: int, num_groups: int) -> None:
    groups = partition_layers(gemma3(num_layers), max_model_len=1 << 17)
    assert (layers_per_group(groups), len(groups)) == (size, num_groups)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(num_layers))


def test_more_kinds_than_groups_share_one_table() -> None:
    assert partition_layers(range(10, 40), max_model_len=100) == []


def test_pools_have_the_same_name_if_their_blocks_mean_the_same() -> None:
    assert describe_groups(groups_of((None, 9, 9))) == "full,9,9"


def test_one_table_where_groups_are_unwanted() -> None:
    unwanted = EngineConfig(cache=CacheConfig(disable_hybrid_kv_cache_manager=True))
    assert model_groups((None, 9), 100, unwanted) == []
    offloads = EngineConfig(kv=KVConfig(offload_path="/tmp", offload_bytes=1))
    assert model_groups((None, 9), 100, offloads) == model_groups((None, 9), 100, EngineConfig()) != []


def test_a_token_sees_its_window() -> None:
    assert [first_seen_block(8, position, 4) for position in (0, 7, 10, 11, 15)] == [0, 0, 0, 1, 2]
    assert first_seen_block(None, 1000, 4) == 0


def test_the_need_grows_with_full_attention_only() -> None:
    need = KVNeed(groups_of((None, 9, 20)), block_size=4, max_chunk=8, lends=False)
    assert need.of_blocks(2) == 6
    # 16 tokens may begin within a block, and so may 27.
    assert need.of_blocks(100) == 100 + 5 + 8
    assert need.capacity(need.of_blocks(100)) == 100
    assert need.capacity(need.of_blocks(100) - 1) == 99
    assert need.capacity(0) == 0


def test_a_lender_keeps_the_last_window_as_well() -> None:
    need = KVNeed(groups_of((None, 9)), block_size=4, max_chunk=8, lends=True)
    assert need.of_blocks(100) == 100 + 5 + 4
