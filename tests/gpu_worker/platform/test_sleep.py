"""A real model's engine asleep: its memory is the system's, and awake it says the same."""

import os
from pathlib import Path

import pytest
import torch

from tests.gpu_worker.conftest import SaveCheckpoint
from tokenloom.engine_core.client.core_client import InprocClient
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.errors import UtilityError
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.gpu_worker.devices import CPUWorker
from tokenloom.gpu_worker.layers.weight_memory import weight_memory
from tokenloom.process.control_groups import resident_bytes
from tokenloom.process.memory import return_freed

BLOCK_SIZE = 16
NUM_BLOCKS = 160
# 95 MB of weights in fp32, and 50 MiB of KV.
SHAPES = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def make_client(model: Path, profiler_dir: str = "") -> InprocClient:
    config = EngineConfig(
        worker=WorkerConfig(model=str(model), num_threads=1, profiler_dir=profiler_dir),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512),
    )
    return InprocClient(config, UniProcExecutor(CPUWorker(config)))


def generate(client: InprocClient, prompts: list[list[int]]) -> list[list[int]]:
    for index, prompt in enumerate(prompts):
        client.add_request(
            EngineCoreRequest(str(index), prompt, CoreSamplingParams(max_tokens=8, seed=1, temperature=0.0))
        )
    tokens: list[list[int]] = [[] for _ in prompts]
    left = len(prompts)
    while left:
        for output in client.get_output().outputs:
            assert not output.error
            tokens[int(output.request_id)] += output.new_token_ids
            left -= output.finish_reason is not None
    return tokens


@pytest.mark.parametrize("level", [1, 2])
def test_asleep_the_memory_is_returned_and_awake_the_tokens_are_the_same(
    save_checkpoint: SaveCheckpoint, level: int
) -> None:
    path = save_checkpoint("llama", **SHAPES)
    # A weight of another model of this process, which stays: the first weights follow it in one slab.
    of_another = weight_memory.empty(20 << 20, dtype=torch.uint8).fill_(1)
    client = make_client(path)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 4096, (500,), generator=generator).tolist() for _ in range(5)]
    expected = generate(client, prompts)
    weights = (path / "model.safetensors").stat().st_size
    kv = NUM_BLOCKS * BLOCK_SIZE * 2 * 5 * 512 * 4
    assert weights > 60 << 20
    assert kv == 50 << 20
    return_freed()  # what other tests left does not count
    awake = resident_bytes()
    freed = client.call_utility("sleep", level)
    asleep = resident_bytes()
    assert isinstance(freed, dict)
    assert freed["weights"] >= 0.8 * weights
    assert freed["kv_cache"] >= 0.8 * kv
    assert freed["kept_on_host"] == 0
    returned = (awake - asleep) / (weights + kv)
    print(f"level {level}: {awake >> 20} MiB awake, {asleep >> 20} MiB asleep: {returned:.0%} of weights and KV")
    assert returned >= 0.8
    assert of_another.eq(1).all()
    if level == 2:
        with pytest.raises(UtilityError, match="reload_weights"):
            client.call_utility("wake_up")
        client.call_utility("reload_weights", str(path))
    client.call_utility("wake_up", ["weights"])
    assert client.call_utility("is_sleeping") is True
    client.call_utility("wake_up")
    assert generate(client, prompts) == expected
    client.close()


def test_it_does_not_wake_with_other_weights(save_checkpoint: SaveCheckpoint) -> None:
    path = save_checkpoint("llama")
    client = make_client(path)
    before = generate(client, [[1, 2, 3]])
    client.call_utility("sleep")
    weights = path / "model.safetensors"
    other = save_checkpoint("llama", initializer_range=0.5)
    os.replace(other / "model.safetensors", weights)
    with pytest.raises(UtilityError, match="changed after they were loaded"):
        client.call_utility("wake_up")
    assert client.call_utility("is_sleeping") is True
    client.call_utility("reload_weights", str(path))
    client.call_utility("wake_up")
    assert generate(client, [[1, 2, 3]]) != before
    client.close()
