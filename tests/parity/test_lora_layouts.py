"""Adapters of every layout that peft writes get the tokens of the merged model, several of them in one batch."""

import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.gpu_worker.lora.random_adapter import merge, save_adapter
from tests.gpu_worker.parallel.rank_threads import RankThreads, parallel
from tests.parity.engine import Engine
from tests.parity.identical import Case, assert_identical
from tests.parity.reference import compute_case, save_random
from tokenloom.engine_core.data.config import EngineConfig, LoraConfig
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.gpu_worker.lora.adapter import Layout

LAYOUTS: dict[str, dict[str, Any]] = {
    "patterns": {
        "rank_pattern": {"q_proj": 7, r"layers\.1\.mlp\.(up|gate)_proj": 2},
        "alpha_pattern": {r".*\.down_proj": 3, "layers.0.self_attn.o_proj": 30},
        "target_modules": r".*\.(self_attn|mlp)\.\w+_proj",
    },
    "rslora": {"use_rslora": True, "rank_pattern": {"o_proj": 9}, "alpha_pattern": {"o_proj": 4}},
    "one_layer": {"kinds": ("q_proj", "down_proj"), "layers_to_transform": [1], "layers_pattern": "layers"},
    "dora": {"use_dora": True},
    "dora_and_biases": {"use_dora": True, "bias": "lora_only", "rank_pattern": {"v_proj": 12}},
    "biases": {"bias": "all", "kinds": ("k_proj", "gate_proj")},
    "bias_of_b": {"lora_bias": True, "kinds": ("q_proj", "k_proj", "v_proj")},
    "trained_layers": {"kinds": ("o_proj",), "modules_to_save": ["k_proj", "down_proj"]},
    "trained_ends": {"kinds": ("v_proj",), "modules_to_save": ["embed_tokens", "lm_head"]},
    "trained_embeddings": {"kinds": ("v_proj",), "modules_to_save": ["embed_tokens"]},
    "tied_embeddings": {"kinds": (), "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "embeddings": {"kinds": ("embed_tokens",)},
    "ends": {"kinds": ("embed_tokens", "lm_head", "up_proj"), "save_embedding_layers": False},
}


def draw(count: int, seed: int) -> list[int]:
    return torch.randint(3, 503, (count,), generator=torch.Generator().manual_seed(seed)).tolist()  # type: ignore[no-any-return]


@torch.inference_mode()
def case_of(model: Path, prompt: list[int]) -> Case:
    return compute_case(_load(model), prompt)


@functools.cache
def _load(model: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")


class Layouts:
    """A random model, an adapter of each layout, and what the merged models make of a prompt."""

    def __init__(self, directory: Path, model: Path, layouts: dict[str, dict[str, Any]]) -> None:
        self.model = model
        self.adapters = {
            name: save_adapter(directory / name, model, rank=4 + seed, seed=seed, **entries)
            for seed, (name, entries) in enumerate(layouts.items())
        }
        merged = {name: merge(model, each, directory / f"merged_{name}") for name, each in self.adapters.items()}
        self.cases = {
            name: case_of(merged.get(name, model), draw(20 + 7 * seed, seed=seed))
            for seed, name in enumerate([*layouts, ""])
        }
        common = [tuple(case_of(path, draw(30, seed=99)).tokens) for path in (*merged.values(), model)]
        assert len(set(common)) == len(common), "an adapter changes nothing"

    def engine(self, **options: Any) -> Engine:
        modules = tuple(f"{name}={path}" for name, path in self.adapters.items())
        return Engine(self.model, lora=LoraConfig(enable=True, max_loras=16, modules=modules), **options)

    def check(self, engine: Engine) -> None:
        """Compare all cases in one call of the engine, and in one step."""
        states = engine.core.adapters.answer().adapters  # type: ignore[union-attr]
        digests = {"": b""} | {state.name: state.digest for state in states}
        by_prompt = {tuple(case.prompt): digests[name] for name, case in self.cases.items()}

        def generate(prompts: Sequence[list[int]], max_tokens: Sequence[int]) -> list[list[int]]:
            chosen = [
                next(each for known, each in by_prompt.items() if tuple(prompt[: len(known)]) == known)
                for prompt in prompts
            ]
            return engine.generate(prompts, max_tokens, adapters=chosen)

        assert_identical(list(self.cases.values()), generate)
        assert engine.most_scheduled == len(self.cases)


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Layouts:
    directory = tmp_path_factory.mktemp("layouts")
    model = save_random("qwen2", directory)
    return Layouts(directory, model, LAYOUTS)


def test_every_layout_in_one_batch_equals_merged_weights(layouts: Layouts) -> None:
    engine = layouts.engine()
    layouts.check(engine)
    states = {state.name: state.rank for state in engine.core.adapters.answer().adapters}  # type: ignore[union-attr]
    assert states["dora_and_biases"] == 12, "the largest rank of a pattern is the adapter's"


def test_without_kernels(layouts: Layouts, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenloom.gpu_worker.lora import slots

    monkeypatch.setattr(slots, "_load_kernel", lambda device: (None, Layout()))
    layouts.check(layouts.engine())


@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2)])
def test_over_ranks(shape: tuple[int, int, int], layouts: Layouts, tmp_path: Path) -> None:
    def executor(config: EngineConfig) -> Executor:
        return RankThreads(config, tmp_path)

    engine = layouts.engine(executor=executor, parallel=parallel(*shape))
    layouts.check(engine)
    engine.core.shutdown()


@pytest.mark.parametrize("is_asleep", [False, True])
def test_adapters_follow_weights_that_are_replaced(is_asleep: bool, layouts: Layouts, tmp_path: Path) -> None:
    """Norms and biases are those of the model's own weights, whichever it has."""
    other = tmp_path / "other"
    shutil.copytree(layouts.model, other)
    weights, generator = load_file(other / "model.safetensors"), torch.Generator().manual_seed(8)
    weights = {name: each + 0.1 * torch.randn(each.shape, generator=generator) for name, each in weights.items()}
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    prompt = draw(30, seed=99)
    engine = layouts.engine()
    digests = {state.name: state.digest for state in engine.core.adapters.answer().adapters}  # type: ignore[union-attr]
    worker = engine.core.executor._worker  # type: ignore[attr-defined]
    engine.generate([prompt], [4], adapters=[digests["dora"]])
    if is_asleep:
        worker.sleep(2)
    worker.check_weights(str(other))
    worker.reload_weights(str(other))
    if is_asleep:
        worker.wake_up(["kv_cache"])
    for name in ("dora", "dora_and_biases", "biases"):
        case = case_of(merge(other, layouts.adapters[name], tmp_path / name), prompt)
        assert engine.generate([prompt], [24], adapters=[digests[name]]) == [case.tokens[:24]]
