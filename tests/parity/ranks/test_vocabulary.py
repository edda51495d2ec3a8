"""Each of several ranks has some tokens of embeddings and output layer: the answers are those of one rank, and its
weights take half of the memory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu_worker.checkpoint.gguf.files import write_demo
from tests.gpu_worker.parallel.rank_threads import RankThreads, parallel
from tests.parity.engine import Engine
from tests.parity.identical import Case
from tests.parity.reference import save_random
from tests.parity.test_logprobs import run
from tokenloom.bench.random_model import SHAPES
from tokenloom.engine_core.data.config import EngineConfig, SpeculativeConfig
from tokenloom.engine_core.data.messages import Logprobs
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.gpu_worker.layers.embedding import CutOutput, CutTable
from tokenloom.gpu_worker.model_slot import tensors_of
from tokenloom.gpu_worker.model_worker import ModelWorker
from tokenloom.gpu_worker.models.model import LanguageModel
from tokenloom.model_files.model_path import DEMO_MODEL

LENGTHS = (1, 17, 70, 130)
LIMITS = [10] * len(LENGTHS)
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "bias": {"logit_bias": {3: 4.0, 5: 6.0}},
}


def prompts(vocab: int) -> list[list[int]]:
    generator = np.random.default_rng(3)
    return [generator.integers(0, vocab, length).tolist() for length in LENGTHS]


def make(path: Path, directory: Path, *shape: int, **options: Any) -> tuple[Engine, list[LanguageModel]]:
    """Return an engine of ranks, and their parts of the model."""
    directory.mkdir()
    made: list[RankThreads] = []

    def executor(config: EngineConfig) -> Executor:
        made.append(RankThreads(config, directory))
        return made[0]

    engine = Engine(path, budget=64, num_blocks=80, executor=executor, parallel=parallel(*shape), **options)
    workers = [worker for worker in made[0].workers if isinstance(worker, ModelWorker)]
    return engine, [worker._model for worker in workers]


def rows_of(model: LanguageModel) -> int | None:
    """Return how many tokens a rank embeds; None: all."""
    table = vars(model).get("_embedding", vars(model).get("_token_embedding"))
    return len(table._rows) if isinstance(table, CutTable) else None


def computes_part(model: LanguageModel) -> bool:
    return isinstance(vars(model)["_lm_head"], CutOutput)


def assert_close(found: Logprobs | None, expected: Logprobs | None) -> None:
    assert found is not None
    assert expected is not None
    assert found.token_ids == expected.token_ids
    assert found.rank == expected.rank
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)
    np.testing.assert_allclose(found.sampled, expected.sampled, atol=1e-4)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("llama", {}),
    "tied": ("qwen2", {"tie_word_embeddings": True}),
    "two tokens more than ranks": ("qwen3", {"vocab_size": 6, "head_dim": 16}),
    "a soft cap, a scale": ("gemma2", {"head_dim": 16, "pad_token_id": 0, "final_logit_softcapping": 4.0}),
    "positions": ("gpt2", {"vocab_size": 503, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024}),
    "another size": ("opt", {"vocab_size": 503, "hidden_size": 64, "word_embed_proj_dim": 32, "ffn_dim": 96}),
}
SIZES = {"opt": {"num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 1}}


@pytest.mark.parametrize("shape", [(2, 1), (4, 1), (2, 2), (2, 1, 2)])
@pytest.mark.parametrize("name", CASES)
def test_tokens_and_log_probabilities(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    kind, entries = CASES[name]
    heads = {} if kind in ("gpt2", "opt") else {"num_key_value_heads": 4}
    path = save_random(kind, tmp_path, **SIZES.get(kind, {}), **heads, **entries)
    vocab = json.loads((path / "config.json").read_text())["vocab_size"]
    alone = Engine(path, budget=64, num_blocks=80)
    engine, models = make(path, tmp_path / "ranks", *shape)
    given, size = prompts(vocab), shape[0]
    borders = [vocab * rank // size for rank in range(size + 1)]
    assert [rows_of(model) for model in models[:size]] == np.diff(borders).tolist()
    assert all(map(computes_part, models[-size:]))
    for asked in ASKED.values():
        assert engine.generate(given, LIMITS, **asked) == alone.generate(given, LIMITS, **asked)
    cases = [Case(prompt, [], np.zeros((0, vocab), np.float32)) for prompt in given]
    top = min(5, vocab - 1)
    found, expected = (run(each, cases, logprobs=top, prompt_logprobs=top) for each in (engine, alone))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[0] == theirs[0]
        assert_close(ours[1], theirs[1])
        assert_close(ours[2], theirs[2])
    engine.core.shutdown()


@pytest.mark.parametrize("kind", ["int4", "gguf"])
def test_few_bits(kind: str, tmp_path: Path) -> None:
    """A GGUF file has embeddings of few bits, of which a rank unpacks its own."""
    path = DEMO_MODEL
    options: dict[str, Any] = {"quantization": "int4"} if kind == "int4" else {}
    if kind == "gguf":
        from gguf import GGMLQuantizationType

        path = tmp_path / "demo.gguf"
        write_demo(path, GGMLQuantizationType.Q4_0)
    alone = Engine(path, budget=64, num_blocks=80, **options)
    given = prompts(alone.core.ready.vocab_size)
    expected = alone.generate(given, LIMITS)
    engine, models = make(path, tmp_path / "ranks", 2, **options)
    assert engine.generate(given, LIMITS) == expected
    for model in models:
        (table,) = [each for each in vars(model).values() if isinstance(each, CutTable)]
        is_mapped = kind == "int4"
        assert is_mapped or table._rows.untyped_storage().nbytes() == table._rows.nbytes, "the whole table is kept"
    engine.core.shutdown()


def test_a_head_that_shares_embeddings_and_output_layer_finds_them_whole(tmp_path: Path) -> None:
    eagle = SpeculativeConfig(method="eagle", model=str(DEMO_MODEL / "eagle"), num_speculative_tokens=3)
    engine, models = make(DEMO_MODEL, tmp_path / "ranks", 2, speculative=eagle)
    assert [rows_of(model) for model in models] == [None, None]
    assert [vars(model)["_lm_head"] is None for model in models] == [False, True]
    engine.core.shutdown()


@pytest.mark.parametrize("quantization", ["int4", None])
def test_weights_and_kv_of_a_rank_take_half_of_the_memory(quantization: str | None, tmp_path: Path) -> None:
    """In the proportions of Qwen3-0.6B, whose embeddings are a quarter of its weights."""
    shape = SHAPES["qwen3-0.6b"]
    small = {"vocab_size": 18_993, "hidden_size": 128, "intermediate_size": 384, "head_dim": 16}
    entries = {key: value for key, value in shape.items() if key not in ("architectures", "model_type", "torch_dtype")}
    path = save_random("qwen3", tmp_path, torch.bfloat16, **entries | small)
    options: dict[str, Any] = {"quantization": quantization, "dtype": "bfloat16"}
    whole = Engine(path, budget=64, num_blocks=80, **options)
    worker = whole.core.executor._worker  # type: ignore[attr-defined]
    of_one = bytes_of(worker._model) + kv_bytes(worker)
    engine, models = make(path, tmp_path / "ranks", 2, **options)
    assert isinstance(engine.core.executor, RankThreads)
    for rank, model in zip(engine.core.executor.workers, models, strict=True):
        assert isinstance(rank, ModelWorker)
        assert bytes_of(model) + kv_bytes(rank) <= 0.52 * of_one
    engine.core.shutdown()


def bytes_of(model: LanguageModel) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(model))


def kv_bytes(worker: ModelWorker) -> int:
    return sum(cache.nbytes for cache in worker._require_runner().kv_caches)
