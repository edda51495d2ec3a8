"""Compressed vectors (MLA) move between engines and files, and give the tokens of one engine."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.gpu_worker.kv_connector import engine_pair
from tests.gpu_worker.kv_connector.engine_pair import MAKE, Pair
from tests.parity.engine import Engine
from tests.parity.reference import SMALL_CONFIGS, save_random
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.gpu_worker.models.load_model import load_model

LENGTHS = (1, 16, 33, 120, 270)
WEIGHTS = "model.safetensors"
_NUM_TOKENS = 12
PARAMS = CoreSamplingParams(max_tokens=_NUM_TOKENS, seed=0, temperature=0.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random("deepseek_v3", tmp_path_factory.mktemp("checkpoints"), **SMALL_CONFIGS["deepseek_v3"])


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Some begin with each other."""
    longest, other = np.random.default_rng(3).integers(3, 503, (2, max(LENGTHS))).tolist()
    return [longest[:length] for length in LENGTHS] + [longest[:200] + [5] * 60, other]


@pytest.fixture(scope="module")
def expected(checkpoint: Path, prompts: list[list[int]]) -> list[list[int]]:
    tokens = Engine(checkpoint).generate(prompts, [_NUM_TOKENS] * len(prompts))
    assert len(set(map(tuple, tokens))) == len(tokens)
    return tokens


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_prefill_and_decode_on_two_engines(
    transport: str, checkpoint: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    pair = Pair(MAKE[transport], model=str(checkpoint), num_blocks=300)
    assert pair.decode.core.ready.kv_layout == "latent/fp32/2x64+8/16"
    for number, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True)):
        assert pair.ask(f"{number}", prompt, PARAMS) == tokens
    stats = pair.decode.core.scheduler.stats()
    assert stats.kv_recomputes == {}
    assert stats.kv_blocks_received > 0
    assert sum(stats.kv_bytes_received.values()) == stats.kv_blocks_received * 16 * 2 * (64 + 8) * 4
    pair.close()


@pytest.mark.parametrize("tier", ["offload", "folder"])
def test_evicted_blocks_come_back_from_a_file(
    tmp_path: Path, checkpoint: Path, prompts: list[list[int]], expected: list[list[int]], tier: str
) -> None:
    engine = engine_pair.Engine([], model=str(checkpoint), num_blocks=24, **engine_pair.tier(tier, tmp_path))
    for number in range(2):
        for index, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True)):
            engine.add(f"{number}-{index}", prompt, PARAMS)
            assert [token for output in engine.run(f"{number}-{index}") for token in output.new_token_ids] == tokens
    stats = engine.core.scheduler.stats()
    assert stats.kv_bytes_received[tier] > 0
    assert stats.kv_recomputes == {}
    engine.core.shutdown()


@pytest.mark.parametrize("backend", ["torch", "reference", "cpu"])
def test_backends(backend: str, checkpoint: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    engine = Engine(checkpoint, attention_backend=backend, budget=50, prefix_caching=True)
    assert engine.attention_backend == backend
    assert engine.generate(prompts, [_NUM_TOKENS] * len(prompts)) == expected


def test_log_probabilities_are_those_of_transformers(checkpoint: Path, prompts: list[list[int]]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    engine = Engine(checkpoint, budget=50)
    for prompt in prompts:
        with torch.inference_mode():
            logprobs = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        found = engine.next_logprobs(prompt, [])
        differences = [abs(float(logprobs[token]) - value) for token, value in found.items()]
        assert len(differences) > 1
        assert max(differences) < 1e-4


def test_the_layer_of_mtp_is_skipped_by_name(
    tmp_path: Path, checkpoint: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """The names are those of deepseek-ai/DeepSeek-V3 (model.safetensors.index.json), whose layer 61 is behind the last
    one that ``num_hidden_layers`` counts."""
    tensors = load_file(checkpoint / WEIGHTS)
    names = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "input_layernorm")
    save_file(tensors | {f"model.layers.2.{name}.weight": torch.ones(4) for name in names}, tmp_path / WEIGHTS)
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Engine(tmp_path).generate(prompts, [_NUM_TOKENS] * len(prompts)) == expected
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ValueError, match=r"unsupported feature: model\.layers\.2\.eh_proj\.weight"):
        load_model(tmp_path)
