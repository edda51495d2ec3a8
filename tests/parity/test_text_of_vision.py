"""The text of models that read images is that of transformers' whole classes, from files as they are published."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity.engine import Engine
from tests.parity.identical import assert_identical
from tests.parity.reference import compute_case, small_prompts
from tests.parity.vision_checkpoints import CONFIGS, load_vision, write_vision


@pytest.mark.parametrize("kind", CONFIGS)
def test_text_alone_gives_the_tokens_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    path = write_vision(kind, tmp_path)
    model = load_vision(path)
    cases = [compute_case(model, prompt) for prompt in small_prompts(503)]
    assert len({tuple(case.tokens) for case in cases}) >= len(cases) - 2
    engine = Engine(path, language_model_only=True, budget=64, num_blocks=400, prefix_caching=True)
    assert_identical(cases, engine.generate)
    hits = engine.stats.prefix_cache_hits
    assert_identical(cases, engine.generate)
    assert engine.stats.prefix_cache_hits > hits


def test_experts_are_read_as_transformers_5_saves_them(tmp_path: Path) -> None:
    model = load_vision(write_vision("qwen3_vl_moe", tmp_path / "published"))
    model.save_pretrained(tmp_path / "saved")
    cases = [compute_case(model, prompt) for prompt in small_prompts(503)]
    assert_identical(cases, Engine(tmp_path / "saved", language_model_only=True).generate)


def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    path = write_vision("llava", tmp_path)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"language_model.model.odd.weight": torch.ones(2)}, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"unsupported feature: model\.odd\.weight"):
        Engine(path, language_model_only=True)


def test_modules_compute_the_text_too(tmp_path: Path) -> None:
    path = write_vision("gemma3", tmp_path)
    model = load_vision(path)
    cases = [compute_case(model, prompt) for prompt in small_prompts(503, 64)]
    engine = Engine(path, language_model_only=True, model_impl="transformers", max_num_seqs=4, num_blocks=100)
    assert_identical(cases, engine.generate)
