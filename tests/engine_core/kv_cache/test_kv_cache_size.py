import msgspec
import pytest

from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.data.kv_groups import KVCacheConfig, KVGroup
from tokenloom.engine_core.data.model_info import MediaTraits, ModelInfo
from tokenloom.engine_core.kv_cache.kv_cache_size import has_waves, size_kv_cache

MODEL = ModelInfo(vocab_size=10, max_model_len=1000, kv_bytes_per_token=100, kv_layout="", numerics="")


def size(max_model_len: int | None = None, available: int = 10**9, **cache: object) -> KVCacheConfig:
    config = EngineConfig(
        worker=WorkerConfig(model=""),
        cache=msgspec.structs.replace(CacheConfig(block_size=16), **cache),
        scheduler=SchedulerConfig(max_num_seqs=4),
        max_model_len=max_model_len,
    )
    return size_kv_cache(config, MODEL, lambda: available)


def test_memory_decides_the_number_of_blocks() -> None:
    assert size(available=16 * 100 * 70 + 1) == KVCacheConfig(num_blocks=70, max_model_len=1000)


def test_no_more_than_could_be_in_use() -> None:
    assert size().num_blocks == 4 * 63
    assert size(max_model_len=160).num_blocks == 4 * 10


def test_the_context_shrinks_to_what_fits() -> None:
    assert size(available=16 * 100 * 7) == KVCacheConfig(num_blocks=7, max_model_len=112)


def test_a_smaller_step_is_named_where_it_leaves_more_for_the_cache() -> None:
    with pytest.raises(ValueError, match=r"lower max_model_len or max_num_batched_tokens$"):
        size(max_model_len=113, available=16 * 100 * 7)
    for fixed in ({"num_blocks": 7}, {"memory_bytes": 16 * 100 * 7}):
        with pytest.raises(ValueError, match=r"lower max_model_len$"):
            size(max_model_len=113, **fixed)


def test_a_context_that_was_asked_for_does_not_shrink() -> None:
    with pytest.raises(ValueError, match=r"holds 112 tokens \(7 blocks of 16\), fewer than max_model_len 113"):
        size(max_model_len=113, available=16 * 100 * 7)
    assert size(max_model_len=112, available=16 * 100 * 7).max_model_len == 112


@pytest.mark.parametrize("max_model_len", [-1, 0, 1, 1001])
def test_a_context_that_makes_no_sense_is_refused(max_model_len: int) -> None:
    with pytest.raises(ValueError, match=rf"max_model_len is {max_model_len}; .*at least 2 .*at most .* 1000"):
        size(max_model_len=max_model_len)


def test_a_block_holds_at_least_a_token() -> None:
    with pytest.raises(ValueError, match="block_size is 0"):
        size(block_size=0)


def test_no_room_at_all() -> None:
    with pytest.raises(ValueError, match="holds 0 tokens"):
        size(available=-5)


def test_fixed_sizes_need_no_profile_run() -> None:
    config = EngineConfig(worker=WorkerConfig(model=""), cache=CacheConfig(num_blocks=9))
    assert size_kv_cache(config, MODEL, pytest.fail).num_blocks == 9
    config = EngineConfig(worker=WorkerConfig(model=""), cache=CacheConfig(memory_bytes=16 * 100 * 9))
    assert size_kv_cache(config, MODEL, pytest.fail).num_blocks == 9


def test_groups_of_layers_need_fewer_bytes() -> None:
    groups = [KVGroup(None, [0]), KVGroup(17, [1]), KVGroup(17, [2])]
    model = msgspec.structs.replace(MODEL, kv_groups=groups, kv_bytes_per_token=300)
    assert model.block_bytes(16) == 1600
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32)
    config = EngineConfig(worker=WorkerConfig(model=""), scheduler=scheduler)
    # 63 blocks of the first group, and 4 of each other one: a window and a chunk of 32 tokens.
    size = size_kv_cache(config, model, lambda: 10**9)
    assert size == KVCacheConfig(num_blocks=4 * (63 + 2 * 4) + 1, max_model_len=1000, groups=groups)
    assert size_kv_cache(config, model, lambda: 1600 * 72).max_model_len == 1000
    assert size_kv_cache(config, model, lambda: 1600 * 71).max_model_len == 62 * 16


def test_states_and_blocks_share_one_budget() -> None:
    # A state as large as the KV of 3,000 tokens: one part in five of the memory.
    model = msgspec.structs.replace(MODEL, state_bytes=300_000, state_chunk=64)
    scheduler = SchedulerConfig(max_num_seqs=4)
    config = EngineConfig(worker=WorkerConfig(model=""), scheduler=scheduler)
    size = size_kv_cache(config, model, lambda: 12 * 10**6)
    assert (size.num_state_slots, size.state_chunk) == (8, 64)
    assert size.num_blocks == 4 * 63, "the rest holds more than four requests can use"
    assert size_kv_cache(config, model, lambda: 2_100_000).num_state_slots == 3, "a slot for each row, of half of it"
    assert size_kv_cache(config, model, lambda: 10**12).num_state_slots == 2 * 4 + 16 * 4
    with pytest.raises(ValueError, match="holds 1 states of 300000 bytes, and a request needs 2; increase state_mem"):
        size_kv_cache(config, model, lambda: 600_000)


def test_memory_for_states_is_taken_from_that_of_the_kv_cache() -> None:
    model = msgspec.structs.replace(MODEL, state_bytes=1000)
    cache = CacheConfig(memory_bytes=1600 * 20 + 7_000, state_memory_bytes=7_999)
    config = EngineConfig(worker=WorkerConfig(model=""), cache=cache)
    assert size_kv_cache(config, model, pytest.fail) == KVCacheConfig(
        20, 320, num_state_slots=7, keeps_every_state=True
    )


def test_small_states_get_a_slot_for_each_block() -> None:
    model = msgspec.structs.replace(MODEL, state_bytes=1600)
    config = EngineConfig(worker=WorkerConfig(model=""), cache=CacheConfig(memory_bytes=3200 * 100))
    size = size_kv_cache(config, model, pytest.fail)
    assert (size.num_blocks, size.num_state_slots, size.keeps_every_state) == (100, 100, True)


def test_blocks_without_bytes_leave_all_memory_to_states() -> None:
    """No layer attends: blocks only name prefixes."""
    model = msgspec.structs.replace(MODEL, state_bytes=1600, kv_bytes_per_token=0)
    config = EngineConfig(worker=WorkerConfig(model=""), scheduler=SchedulerConfig(max_num_seqs=4))
    size = size_kv_cache(config, model, lambda: 1600 * 50)
    assert (size.num_blocks, size.num_state_slots) == (4 * 63, 50)


def test_a_rank_of_a_data_parallel_group_with_experts_reserves_the_null_block() -> None:
    parallel = ParallelConfig(data_parallel_size=2)
    config = EngineConfig(cache=CacheConfig(block_size=4, num_blocks=5), parallel=parallel)
    experts = msgspec.structs.replace(MODEL, experts_per_token=8)
    assert size_kv_cache(config, experts, lambda: 0) == KVCacheConfig(5, 16, has_null_block=True)
    assert size_kv_cache(config, MODEL, lambda: 0) == KVCacheConfig(5, 20), "a dense model computes no dummy batches"


def test_stages_whose_experts_are_spread_compute_in_waves_although_none_knows_all_choices() -> None:
    """Without waves their workers never joined, and each computed its own experts' rows only: wrong tokens."""
    stage = msgspec.structs.replace(MODEL, has_experts=True)
    parallel = ParallelConfig(data_parallel_size=2, pipeline_parallel_size=2, enable_expert_parallel=True)
    assert has_waves(EngineConfig(parallel=parallel), stage)
    assert not has_waves(EngineConfig(parallel=parallel), MODEL)
    whole = msgspec.structs.replace(parallel, enable_expert_parallel=False)
    assert not has_waves(EngineConfig(parallel=whole), stage)


def test_rows_beside_prompts_take_blocks_of_the_same_pool() -> None:
    model = msgspec.structs.replace(MODEL, media=MediaTraits(("audio",), cross_rows=100))  # 7 blocks
    config = EngineConfig(
        worker=WorkerConfig(model=""), cache=CacheConfig(block_size=16), scheduler=SchedulerConfig(max_num_seqs=4)
    )
    assert size_kv_cache(config, model, lambda: 10**9).num_blocks == 4 * (63 + 7)
    few = size_kv_cache(config, model, lambda: 16 * 100 * 12)
    assert (few.num_blocks, few.cross_blocks, few.max_model_len) == (12, 7, 80)
    with pytest.raises(ValueError, match=r"holds 0 tokens \(6 blocks of 16, beside the 7 of a sound\)"):
        size_kv_cache(config, model, lambda: 16 * 100 * 6)
