"""Requests with LoRA adapters get the tokens of a model into whose weights the adapter is merged."""

import functools
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.gpu_worker.lora.random_adapter import KINDS, merge, save_adapter
from tests.gpu_worker.models.test_mixers import FACTORS
from tests.gpu_worker.parallel.rank_threads import RankThreads, parallel
from tests.parity.engine import Engine
from tests.parity.identical import Case, assert_identical
from tests.parity.reference import compute_case, save_random
from tests.parity.state_checkpoints import write_model
from tests.parity.test_states import draw
from tokenloom.engine_core.data.config import EngineConfig, LoraConfig
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.gpu_worker.lora.adapter import Layout
from tokenloom.request.adapter_names import adapter_salt

RANKS = (16, 3, 64, 8)


class Adapted:
    """A random model, four adapters, and what the merged models make of some prompts."""

    def __init__(self, directory: Path) -> None:
        self.model = save_random("qwen3", directory, head_dim=24)
        self.adapters = [
            save_adapter(directory / f"adapter{i}", self.model, rank=rank, seed=i, use_rslora=i == 1)
            for i, rank in enumerate(RANKS)
        ]
        merged = [merge(self.model, each, directory / f"merged{i}") for i, each in enumerate(self.adapters)]
        rng = random.Random(5)
        lengths = (3, 40, 16, 90, 17, 5, 64, 33)
        self.prompts = [[rng.randrange(3, 503) for _ in range(length)] for length in lengths]
        self.numbers = [0, 1, 2, 3, None, 0, 1, None]
        self.cases = [
            _case(self.model if number is None else merged[number], prompt)
            for prompt, number in zip(self.prompts, self.numbers, strict=True)
        ]

    def engine(self, max_loras: int = 8, **options: Any) -> Engine:
        modules = tuple(f"{number}={path}" for number, path in enumerate(self.adapters))
        return Engine(self.model, lora=LoraConfig(enable=True, max_loras=max_loras, modules=modules), **options)

    def check(self, engine: Engine) -> None:
        """Compare all cases in one call of the engine."""
        digests = {state.name: state.digest for state in engine.core.adapters.answer().adapters}  # type: ignore[union-attr]
        adapters = [b"" if number is None else digests[str(number)] for number in self.numbers]
        by_prompt = {tuple(case.prompt): adapter for case, adapter in zip(self.cases, adapters, strict=True)}

        def generate(prompts: Sequence[list[int]], max_tokens: Sequence[int]) -> list[list[int]]:
            chosen = [
                next(each for known, each in by_prompt.items() if tuple(prompt[: len(known)]) == known)
                for prompt in prompts
            ]
            return engine.generate(prompts, max_tokens, adapters=chosen)

        assert_identical(self.cases, generate)


@torch.inference_mode()
def _case(model: Path, prompt: list[int]) -> Case:
    return compute_case(_load(model), prompt)


@functools.cache
def _load(model: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("adapted"))


def test_adapters_and_the_base_in_one_batch_equal_merged_weights(adapted: Adapted) -> None:
    engine = adapted.engine()
    adapted.check(engine)
    assert engine.most_scheduled == len(adapted.cases)


def test_chunked_and_preempted(adapted: Adapted) -> None:
    engine = adapted.engine(budget=24, num_blocks=20, max_num_seqs=8, max_model_len=160)
    adapted.check(engine)
    assert engine.stats.num_preemptions
    assert engine.most_scheduled > 2


def test_fewer_slots_than_adapters(adapted: Adapted) -> None:
    engine = adapted.engine(max_loras=2)
    adapted.check(engine)


@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2)])
def test_matrices_are_divided_among_ranks(shape: tuple[int, int, int], adapted: Adapted, tmp_path: Path) -> None:
    def executor(config: EngineConfig) -> Executor:
        return RankThreads(config, tmp_path)

    engine = adapted.engine(executor=executor, parallel=parallel(*shape), budget=48)
    adapted.check(engine)
    engine.core.shutdown()


def test_a_layer_that_no_stage_has_is_refused(adapted: Adapted, tmp_path: Path) -> None:
    def executor(config: EngineConfig) -> Executor:
        return RankThreads(config, tmp_path)

    path = tmp_path / "adapter"
    shutil.copytree(adapted.adapters[0], path)
    tensors = load_file(path / "adapter_model.safetensors")
    named = {name.replace(".layers.1.", ".layers.2."): tensor for name, tensor in tensors.items()}
    save_file(named, path / "adapter_model.safetensors")
    lora = LoraConfig(enable=True, modules=(f"a={path}",))
    with pytest.raises(ValueError, match=r"layers\.2\..* cannot have an adapter"):
        Engine(adapted.model, lora=lora, executor=executor, parallel=parallel(1, 2))


def test_without_kernels(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenloom.gpu_worker.lora import slots

    monkeypatch.setattr(slots, "_load_kernel", lambda device: (None, Layout()))
    adapted.check(adapted.engine())


def test_prefix_hits_of_another_adapter_are_never_taken(adapted: Adapted) -> None:
    engine = adapted.engine(prefix_caching=True)
    digests = [state.digest for state in engine.core.adapters.answer().adapters]  # type: ignore[union-attr]
    prompt = adapted.prompts[3]
    hits = []
    for adapter in (digests[3], b"", digests[0], digests[3]):
        before = engine.stats.prefix_cache_hits
        (tokens,) = engine.generate([prompt], [8], adapters=[adapter])
        hits.append(engine.stats.prefix_cache_hits - before)
        if adapter == digests[3]:
            assert tokens == adapted.cases[3].tokens[:8]
    assert hits[:3] == [0, 0, 0]
    assert hits[3] == 80, "those of the same adapter are"
    assert adapter_salt(b"", digests[0]) != adapter_salt(b"", digests[3])


STATEFUL_KINDS = (
    *KINDS,
    *("in_proj", "out_proj", "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"),
    *("input_linear", "output_linear", "w1", "w2", "w3"),
    *("f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "gate"),
)
"""What the files of models with states call their linear layers."""


@pytest.mark.parametrize(
    "kind",
    ["qwen3_next", "qwen3_5_text", "granitemoehybrid", "lfm2", "mamba2", "nemotron_h", "falcon_h1", "kimi_linear"],
)
def test_models_with_states(kind: str, tmp_path: Path) -> None:
    """Gates that are stored with queries, and rows in another order, get those rows of an adapter's matrices."""
    model = write_model(kind, tmp_path / "model", **(FACTORS if kind == "falcon_h1" else {}))
    adapters = [save_adapter(tmp_path / str(seed), model, seed=seed, kinds=STATEFUL_KINDS) for seed in (1, 2)]
    merged = [merge(model, each, tmp_path / f"merged{each.name}") for each in adapters]
    prompts = [draw(40, seed=seed) for seed in range(3)]
    cases = [_case(path, prompt) for path, prompt in zip((*merged, model), prompts, strict=True)]
    assert len({tuple(_case(path, prompts[0]).tokens) for path in (*merged, model)}) == 3
    modules = tuple(f"{path.name}={path}" for path in adapters)
    engine = Engine(model, lora=LoraConfig(enable=True, modules=modules), prefix_caching=True, budget=48)
    digests = [state.digest for state in engine.core.adapters.answer().adapters]  # type: ignore[union-attr]
    for _ in range(2):
        tokens = engine.generate(prompts, [24] * 3, adapters=[*digests, b""])
        assert tokens == [case.tokens[:24] for case in cases]
    assert engine.stats.prefix_cache_hits > 0
