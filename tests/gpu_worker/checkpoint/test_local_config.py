"""Tests the configuration of a rank's part of a model, and what is refused with several workers."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.gpu_worker.checkpoint.published_configs import CONFIGS, LLAMA_4_SCOUT
from tests.gpu_worker.parallel.rank_threads import parallel
from tests.parity.reference import save_random
from tests.parity.state_checkpoints import write_model
from tokenloom import demo_model
from tokenloom.engine_core.data.config import (
    CacheConfig,
    EngineConfig,
    KVConfig,
    ParallelConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from tokenloom.gpu_worker.checkpoint.load_config import load_model_config
from tokenloom.gpu_worker.checkpoint.local_config import LIBRARIES, check_chunks, check_options, local_config
from tokenloom.gpu_worker.checkpoint.model_config import ModelConfig
from tokenloom.gpu_worker.model_worker import ModelWorker
from tokenloom.gpu_worker.parallel.ranks import place_of
from tokenloom.gpu_worker.parallel.sharding import ONLY_PLACE, RankPlace, ShardedDimension
from tokenloom.gpu_worker.platform.platform import CPUPlatform

DEMO = Path(demo_model.__file__).parent


@pytest.fixture
def config() -> ModelConfig:
    return load_model_config(DEMO, "float32")


def test_one_rank_has_the_configuration_of_the_model(config: ModelConfig) -> None:
    assert local_config(config, ONLY_PLACE) is config


def test_a_rank_has_its_heads_and_layers(config: ModelConfig) -> None:
    part = local_config(config, place_of(replace(parallel(2, 2), rank=3)))
    assert (part.num_heads, part.num_kv_heads, part.intermediate_size) == (2, 1, 320)
    assert (part.num_layers, part.first_layer, part.is_last_stage, part.samples) == (2, 2, True, False)
    assert len(part.ropes) == len(part.sliding_windows) == len(part.attention_scales) == 2
    assert part.kv_bytes_per_token * 4 == config.kv_bytes_per_token


def test_ranks_of_the_last_stage_compute_logits_of_their_tokens(config: ModelConfig) -> None:
    parts = [local_config(config, place_of(replace(parallel(2, 2), rank=rank))) for rank in range(4)]
    assert [part.computes_logits for part in parts] == [False, False, True, True]
    half = config.vocab_size // 2
    assert [part.vocabulary for part in parts[:2]] == [
        ShardedDimension(config.vocab_size, ((0, half),)),
        ShardedDimension(config.vocab_size, ((half, config.vocab_size),)),
    ]
    whole = [local_config(config, RankPlace(rank, 2, cuts_vocabulary=False)) for rank in range(2)]
    assert [part.computes_logits for part in whole] == [True, False]
    assert [part.vocabulary for part in whole] == [config.vocab_size] * 2


def test_a_vocabulary_of_fewer_tokens_than_workers_is_refused(config: ModelConfig) -> None:
    few = dataclasses.replace(config, vocab_size=1)
    with pytest.raises(ValueError, match="tensor_parallel_size: 2 workers for a vocabulary of 1 tokens"):
        local_config(few, RankPlace(0, 2))


def test_kv_heads_are_repeated_where_there_are_fewer_than_ranks(config: ModelConfig) -> None:
    part = local_config(config, RankPlace(3, 4))
    assert (part.num_heads, part.num_kv_heads) == (1, 1)


def test_compressed_vectors_are_not_spread(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["deepseek-ai/DeepSeek-V3"]))
    config = load_model_config(tmp_path)
    with pytest.raises(ValueError, match="decode_context_parallel_size: compressed vectors"):
        local_config(config, RankPlace(0, 2, spreads_context=True))
    assert local_config(config, RankPlace(0, 2)).kv_bytes_per_token == config.kv_bytes_per_token


def test_chunks_are_not_spread(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_4_SCOUT))
    config = load_model_config(tmp_path)
    with pytest.raises(ValueError, match="decode_context_parallel_size: attention in chunks"):
        local_config(config, RankPlace(0, 2, spreads_context=True))
    part = local_config(config, place_of(replace(parallel(1, 3), rank=1)))
    assert part.attention_chunks == config.attention_chunks[16:32]


def test_blocks_end_where_chunks_end() -> None:
    config = dataclasses.replace(load_model_config(DEMO), attention_chunks=(None, 40))
    check_chunks(config, 8)
    with pytest.raises(ValueError, match="block_size: 16 tokens do not divide the model's attention chunks of 40"):
        check_chunks(config, 16)


def test_compressed_vectors_are_not_rounded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["deepseek-ai/DeepSeek-V2-Lite"]))
    config = EngineConfig(worker=WorkerConfig(model=str(tmp_path)), cache=CacheConfig(dtype="int8"))
    worker = ModelWorker(config, CPUPlatform())
    # Before it looks for weights, of which there are none.
    with pytest.raises(ValueError, match="kv_cache_dtype: int8 is not supported for compressed vectors"):
        worker.load_model()


def test_a_rank_keeps_the_states_of_its_heads_and_layers(tmp_path: Path) -> None:
    config = load_model_config(write_model("qwen3_5_text", tmp_path))
    assert config.states is not None
    half = local_config(config, RankPlace(1, 2))
    assert half.state_bytes * 2 == config.state_bytes
    first, last = (local_config(config, RankPlace(0, 1, stage, 4)) for stage in (0, 3))
    assert first.states is not None
    assert first.states.layers == config.states.layers[:1]
    assert first.num_layers == 1, "its KV blocks name prefixes"
    assert (last.states, last.num_layers, last.first_layer) == (None, 1, 3)


@pytest.mark.parametrize(
    ("kind", "entries", "place", "message"),
    [
        ("qwen3_next", {}, RankPlace(0, 4), "does not divide the model's 2 groups of those heads"),
        ("mamba2", {}, RankPlace(0, 3), "does not divide the model's 128 rows of an MLP"),
        ("granitemoehybrid", {"mamba_n_heads": 2, "mamba_d_head": 64}, RankPlace(0, 4), "2 heads of layers that keep"),
        ("lfm2", {}, RankPlace(0, 1, 0, 5), "pipeline_parallel_size: 5 stages for 4 layers"),
    ],
)
def test_what_cannot_be_divided_of_states_is_named(
    kind: str, entries: dict[str, Any], place: RankPlace, message: str, tmp_path: Path
) -> None:
    config = load_model_config(write_model(kind, tmp_path, **entries))
    with pytest.raises(ValueError, match=message):
        local_config(config, place)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (RankPlace(0, 3), "tensor_parallel_size: 3 does not divide the model's 4 attention heads"),
        (RankPlace(0, 1, 0, 5), "pipeline_parallel_size: 5 stages for 4 layers"),
    ],
)
def test_what_cannot_be_divided_is_named(config: ModelConfig, place: RankPlace, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        local_config(config, place)


def test_places_of_experts_are_a_multiple_of_the_workers_and_engines_round_up(tmp_path: Path) -> None:
    """The number of engines may change while they serve."""
    config = load_model_config(save_random("qwen3_moe", tmp_path, num_experts=8))
    local_config(config, RankPlace(data_size=3, num_redundant_experts=0))
    with pytest.raises(ValueError, match="8 experts and 0 copies are not a multiple of 3"):
        local_config(config, RankPlace(0, 3, spreads_experts=True, num_redundant_experts=0))


@pytest.mark.parametrize(
    "others",
    [
        {"decode_context_parallel_size": 2, "tensor_parallel_size": 2},
        {"enable_expert_parallel": True, "data_parallel_size": 2},
        {"enable_eplb": True, "enable_expert_parallel": True, "tensor_parallel_size": 2},
    ],
)
def test_ranks_that_divide_prompts_spread_no_context_and_no_experts(others: dict[str, Any]) -> None:
    config = ParallelConfig(prefill_context_parallel_size=2, **others)
    with pytest.raises(ValueError, match=f"prefill_context_parallel_size: is not supported with {next(iter(others))}"):
        check_options(EngineConfig(parallel=config))


def test_copies_of_a_model_that_is_divided(config: ModelConfig) -> None:
    """Each copy has stages of tensor parallel ranks; the first one draws."""
    divided = ParallelConfig(
        prefill_context_parallel_size=2,
        pipeline_parallel_size=2,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
    )
    check_options(EngineConfig(parallel=divided))
    places = [place_of(replace(divided, rank=rank)) for rank in range(8)]
    assert [(each.prefill_rank, each.stage, each.tensor_rank) for each in places] == [
        (copy, stage, rank) for copy in range(2) for stage in range(2) for rank in range(2)
    ]
    assert [each.samples for each in places] == [rank == divided.output_rank == 2 for rank in range(8)]
    assert [each.rank_of_stage(1) for each in places] == [2, 3, 2, 3, 6, 7, 6, 7]
    assert [local_config(config, each).computes_logits for each in places] == [rank in (2, 3) for rank in range(8)]


def test_ranks_that_divide_prompts_move_no_kv_of_drafts() -> None:
    draft = SpeculativeConfig(method="draft_model", model="x", num_speculative_tokens=2)
    config = EngineConfig(speculative=draft, parallel=ParallelConfig(prefill_context_parallel_size=2))
    check_options(config)
    with pytest.raises(ValueError, match="prefill_context_parallel_size: KV does not move where"):
        check_options(replace(config, kv=KVConfig(transports=("shm",))))


def test_ranks_that_divide_prompts_have_the_whole_model(config: ModelConfig, tmp_path: Path) -> None:
    places = [place_of(ParallelConfig(prefill_context_parallel_size=3, rank=rank)) for rank in range(3)]
    assert [place.prefill_rank for place in places] == [0, 1, 2]
    assert [place.output_rank for place in places] == [0, 0, 0]
    assert [local_config(config, place) == config for place in places] == [True, False, False]
    assert dataclasses.replace(local_config(config, places[1]), samples=True) == config
    states = load_model_config(write_model("qwen3_next", tmp_path))
    with pytest.raises(ValueError, match="prefill_context_parallel_size: layers of this model keep a state"):
        local_config(states, places[0])


def test_the_page_says_what_libraries_of_attention_lack() -> None:
    text = (Path(__file__).parents[3] / "docs/understand/decisions.md").read_text()
    rows = {
        "package": lambda each: each.distribution,
        "heads of": lambda each: ", ".join(map(str, each.head_sizes)),
        "blocks of at most": lambda each: str(each.most_block),
        "compute capability from": lambda each: ".".join(map(str, each.capability)),
        "sinks": lambda each: "yes" if each.has_sinks else "no",
        "KV in 8-bit floats": lambda each: "yes" if each.has_fp8_cache else "no",
    }
    assert f"| | {' | '.join(LIBRARIES)} |" in text
    for name, value in rows.items():
        assert f"| {name} | {' | '.join(map(value, LIBRARIES.values()))} |" in text
