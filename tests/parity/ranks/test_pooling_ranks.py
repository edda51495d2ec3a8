"""Several ranks pool what one pools: vectors, classes and scores of decoders and of encoders, each rank with its part
of the weights."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.gpu_worker.parallel.rank_threads import RankThreads, parallel
from tests.gpu_worker.pooling.small_models import PROMPTS, make_checkpoint, make_core, pool, save_pooling
from tests.parity.ranks.test_ranks_mp import in_processes
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import EngineConfig, PoolerConfig
from tokenloom.engine_core.data.core_params import (
    DRAWS_NOTHING,
    CorePoolingParams,
    CoreSamplingParams,
    PoolingTask,
)
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.gpu_worker.encoders.encoder_worker import EncoderWorker
from tokenloom.gpu_worker.model_slot import tensors_of

SHAPES = [(2, 1), (1, 2), (2, 2)]
DECODER_SHAPES = [*SHAPES, (2, 1, 2)]
MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
ENCODERS = ("BertModel", "XLMRobertaModel", "ModernBertModel")


def in_threads(directory: Path) -> Callable[[EngineConfig], Executor]:
    directory.mkdir()
    return lambda config: RankThreads(config, directory)


def ranks(path: Path, shape: tuple[int, ...], **settings: Any) -> EngineCore:
    directory = path / "-".join(map(str, shape))
    given = {"num_blocks": 60, **settings}
    return make_core(path, executor=in_threads(directory), parallel=parallel(*shape), **given)


def same(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def check(
    path: Path,
    shapes: Sequence[tuple[int, ...]],
    asked: Sequence[tuple[PoolingTask, Mapping[str, Any]]],
    **settings: Any,
) -> None:
    """Compare the results of ranks with those of one worker, twice: the prefix cache holds prompts the second time."""
    alone = make_core(path, num_blocks=60, **settings)
    expected = [pool(alone, PROMPTS, task, **params) for task, params in asked]
    for shape in shapes:
        core = ranks(path, shape, **settings)
        assert core.ready.pooling == alone.ready.pooling
        for _ in range(2):
            for (task, params), of_one in zip(asked, expected, strict=True):
                same(pool(core, PROMPTS, task, **params), of_one)
        core.shutdown()


def test_vectors_of_a_decoder(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Qwen3ForCausalLM", matryoshka_dimensions=[4, 8])
    dense = {"in_features": 32 * len(MODES), "out_features": 12, "bias": True}
    modules = [{"type": "Pooling", "config": {"pooling_mode": MODES}}, {"type": "Dense", "config": dense}]
    save_pooling(tmp_path, *modules, {"type": "Normalize", "config": {}})
    weights = {"linear.weight": torch.randn(12, 32 * len(MODES)), "linear.bias": torch.randn(12)}
    save_file(weights, tmp_path / "2_Dense" / "model.safetensors")
    asked = [
        (PoolingTask.EMBED, {}),
        (PoolingTask.EMBED, {"dimensions": 4}),
        (PoolingTask.EMBED, {"skipped_tokens": 2}),
    ]
    check(tmp_path, DECODER_SHAPES, asked, budget=8)  # the longest prompt takes several steps


@pytest.mark.parametrize("pooling", ["LAST", "MEAN", "CLS"])
def test_chosen_pooling_and_states_of_tokens(pooling: Any, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Qwen3ForCausalLM")
    asked = [(PoolingTask.EMBED, {}), (PoolingTask.TOKEN_EMBED, {"use_activation": False})]
    chosen = PoolerConfig(pooling_type=pooling)
    check(tmp_path, DECODER_SHAPES, asked, budget=12, runner="pooling", pooler_config=chosen)


@pytest.mark.parametrize("num_labels", [1, 3])
def test_classes_of_a_decoder(num_labels: int, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Qwen3ForSequenceClassification", num_labels=num_labels)
    tasks = [PoolingTask.CLASSIFY, PoolingTask.TOKEN_CLASSIFY, *[PoolingTask.SCORE] * (num_labels == 1)]
    check(tmp_path, DECODER_SHAPES, [(task, {}) for task in tasks], budget=12)


@pytest.mark.parametrize("name", ENCODERS)
def test_vectors_of_an_encoder(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, name)
    asked = [(PoolingTask.EMBED, {}), (PoolingTask.TOKEN_EMBED, {}), (PoolingTask.EMBED, {"first_part_tokens": 2})]
    check(tmp_path, SHAPES, asked)


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "ModernBertForSequenceClassification"])
def test_scores_of_an_encoder(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, name, num_labels=1)
    check(tmp_path, SHAPES, [(PoolingTask.SCORE, {}), (PoolingTask.CLASSIFY, {"use_activation": False})])


def test_tokens_stay_the_same_next_to_embeddings(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "Qwen3ForCausalLM")
    text = EngineCoreRequest("text", PROMPTS[2], CoreSamplingParams(max_tokens=20, seed=3, temperature=1.0))
    results = []
    for shape in [(1, 1), *DECODER_SHAPES]:
        settings: dict[str, Any] = {"budget": 12, "pooler_config": PoolerConfig(), "num_blocks": 60}
        core = make_core(tmp_path, **settings) if shape == (1, 1) else ranks(tmp_path, shape, **settings)
        core.add_request(text)
        for index, prompt in enumerate(PROMPTS):
            pooling = CorePoolingParams(PoolingTask.EMBED)
            core.add_request(EngineCoreRequest(str(index), prompt, DRAWS_NOTHING, pooling_params=pooling))
        tokens, vectors = list[int](), dict[str, Any]()
        while core.has_work():
            for output in core.step().outputs:
                tokens += output.new_token_ids if output.request_id == "text" else []
                vectors |= {output.request_id: output.pooled} if output.pooled is not None else {}
        core.shutdown()
        results.append((tokens, [vectors[str(index)] for index in range(len(PROMPTS))]))
    (expected, of_one), *others = results
    assert len(expected) == 20
    for tokens, found in others:
        assert tokens == expected
        same(found, of_one)


@pytest.mark.parametrize("name", ENCODERS)
def test_each_rank_has_its_part_of_an_encoder(name: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, name, hidden_size=128, intermediate_size=256, num_hidden_layers=4)
    whole = layer_bytes(make_core(tmp_path))
    for shape in SHAPES:
        core = ranks(tmp_path, shape)
        parts = layer_bytes(core)
        core.shutdown()
        # Norms and the biases behind a sum are whole on several ranks.
        assert all(0.95 <= part * len(parts) / sum(whole) <= 1.05 for part in parts), (shape, parts, whole)


def layer_bytes(core: EngineCore) -> list[int]:
    """Return the bytes of each worker's layers."""
    executor: Any = core.executor
    workers = executor.workers if isinstance(executor, RankThreads) else [executor._worker]
    assert all(isinstance(worker, EncoderWorker) for worker in workers)
    models: list[Any] = [SimpleNamespace(layers=worker._model._layers) for worker in workers]
    return [sum(each.nbytes for each in tensors_of(model)) for model in models]


@pytest.mark.parametrize("level", [1, 2])
def test_an_encoder_of_ranks_sleeps_and_gets_other_weights(level: int, tmp_path: Path) -> None:
    for seed in ("one", "other"):
        make_checkpoint(tmp_path / seed, "BertModel", initializer_range=0.02 if seed == "one" else 0.5)
    expected = {name: pool(make_core(tmp_path / name), PROMPTS, PoolingTask.EMBED) for name in ("one", "other")}
    core = ranks(tmp_path / "one", (2, 2))
    core.executor.collective_rpc("sleep", level)
    if level == 1:
        core.executor.collective_rpc("wake_up", ["weights"])
        same(pool(core, PROMPTS, PoolingTask.EMBED), expected["one"])
    core.executor.collective_rpc("reload_weights", str(tmp_path / "other"))
    same(pool(core, PROMPTS, PoolingTask.EMBED), expected["other"])
    core.shutdown()


@pytest.mark.parametrize(
    ("name", "shape"), [("Qwen3ForCausalLM", (2, 2)), ("Qwen3ForCausalLM", (2, 1, 2)), ("BertModel", (2, 2))]
)
def test_processes_pool_what_one_pools(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    make_checkpoint(tmp_path, name)
    settings: dict[str, Any] = {"runner": "pooling", "num_blocks": 60}
    expected = pool(make_core(tmp_path, **settings), PROMPTS, PoolingTask.EMBED)
    core = make_core(tmp_path, executor=in_processes, parallel=parallel(*shape), **settings)
    same(pool(core, PROMPTS, PoolingTask.EMBED), expected)
    core.shutdown()
