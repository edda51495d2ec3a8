"""The self-check finds what would answer nonsense, and accepts what is right."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu_worker.conftest import SaveCheckpoint
from tests.parity.vision_checkpoints import write_vision
from tokenloom.gpu_worker.attention.attention_backend import ScoreRule
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend
from tokenloom.gpu_worker.models.load_model import load_model
from tokenloom.gpu_worker.models.self_check import CheckedModel, check_model

CPU = torch.device("cpu")


def load(path: Path, **settings: Any) -> Any:
    model = load_model(path, model_impl="transformers", **settings)
    assert isinstance(model, CheckedModel)
    return model


def check(model: Any) -> None:
    check_model(model, make_attention_backend("cpu", model.config, 16, CPU), 16, CPU)


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"quantization": "int8-dynamic"}])
@pytest.mark.parametrize("kind", ["llama", "phimoe"])
def test_a_right_model_passes(kind: str, settings: dict[str, Any], save_checkpoint: SaveCheckpoint) -> None:
    check(load(save_checkpoint(kind, initializer_range=0.05), **settings))


def test_native_models_are_not_checked(save_checkpoint: SaveCheckpoint) -> None:
    assert not isinstance(load_model(save_checkpoint("llama")), CheckedModel)


def wrong_scale(rules: list[Any]) -> None:
    _replace(rules, ScoreRule(0.5))


def wrong_window(rules: list[Any]) -> None:
    _replace(rules, ScoreRule(rules[0].scores.scale, sliding_window=8))


def _replace(rules: list[Any], scores: ScoreRule) -> None:
    rules[1] = replace(rules[1], scores=scores)


def another_order(rules: list[Any]) -> None:
    rules[0], rules[1] = rules[1], rules[0]


@pytest.mark.parametrize("spoil", [wrong_scale, wrong_window])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wrong_attention_is_refused(
    spoil: Callable[[list[Any]], None], dtype: str, save_checkpoint: SaveCheckpoint
) -> None:
    model = load(save_checkpoint("llama"), dtype=dtype)
    spoil(model._parts.attention._rules)
    with pytest.raises(ValueError, match="LlamaForCausalLM is not supported: it has logits over the paged KV cache"):
        check(model)


def test_rounding_that_sends_tokens_to_other_experts_is_no_difference(tmp_path: Path) -> None:
    """Of this model transformers' own ways to attend differ by 9e-2 in bfloat16, and what is wrong differs by more."""
    model = load(write_vision("gemma4_26b_a4b", tmp_path), dtype="bfloat16")
    check(model)
    for spoil in (wrong_scale, wrong_window):
        rules = list(model._parts.attention._rules)
        spoil(model._parts.attention._rules)
        with pytest.raises(
            ValueError, match="Gemma4ForCausalLM is not supported: it has logits over the paged KV cache"
        ):
            check(model)
        model._parts.attention._rules[:] = rules


def test_layers_in_another_order_are_refused(save_checkpoint: SaveCheckpoint) -> None:
    model = load(save_checkpoint("llama"))
    another_order(model._parts.attention._rules)
    with pytest.raises(ValueError, match=r"it fails in the self-check .*attends in another order"):
        check(model)


def test_what_mixes_tokens_outside_attention_is_refused(save_checkpoint: SaveCheckpoint) -> None:
    """As a convolution would: over the flattened batch it also mixes the tokens of different requests."""
    model = load(save_checkpoint("llama"))

    def mix(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return output + 0.1 * torch.nn.functional.pad(output, (0, 0, 1, 0))[:, :-1]

    model._parts.body.layers[1].mlp.register_forward_hook(mix)
    with pytest.raises(ValueError, match=r"config.json: LlamaForCausalLM .* differ from transformers' own"):
        check(model)


def test_logits_that_are_not_finite_are_refused(save_checkpoint: SaveCheckpoint) -> None:
    model = load(save_checkpoint("llama"))
    model._parts.model.get_input_embeddings().weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="it computes logits that are not finite"):
        check(model)
