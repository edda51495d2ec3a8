"""Models of transformers over paged attention, compared with the library itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.gpu_worker.conftest import EditConfig, RunModel, SaveCheckpoint
from tokenloom.gpu_worker.checkpoint.weights import Checkpoint
from tokenloom.gpu_worker.model_slot import tensors_of
from tokenloom.gpu_worker.models.load_model import ModelLoader, load_model
from tokenloom.gpu_worker.ops.cpu_ops import make_ops

CPU = torch.device("cpu")
PROMPTS = [torch.arange(length) * 7 % 190 + 3 for length in (5, 40)]
CHUNKS = [[0, 16], [5, 0], [0, 23], [0, 1]]


def load(path: Path, **settings: Any) -> Any:
    return load_model(path, ops=make_ops("auto", CPU), model_impl="transformers", **settings)


@torch.no_grad()
def logits_of(path: Path) -> list[Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    return [model(ids[None]).logits[0] for ids in PROMPTS]


@pytest.mark.parametrize(
    ("model_type", "entries"),
    [
        ("llama", {}),
        ("gpt2", {}),
        ("gemma", {"head_dim": 16}),
        ("phi3", {"pad_token_id": 0, "sliding_window": 20}),
        ("cohere", {"logit_scale": 0.5}),
        ("mixtral", {"num_local_experts": 4}),
    ],
)
@torch.inference_mode()
def test_logits_equal_those_of_transformers(
    model_type: str, entries: dict[str, Any], save_checkpoint: SaveCheckpoint, run_model: RunModel
) -> None:
    path = save_checkpoint(model_type, **entries)
    model = load(path)
    for found, expected in zip(run_model(model, PROMPTS, CHUNKS, "cpu"), logits_of(path), strict=True):
        torch.testing.assert_close(found, expected[: len(found)], rtol=1e-4, atol=1e-4)


def test_the_layers_say_what_attention_is_asked_for(save_checkpoint: SaveCheckpoint) -> None:
    config = load(save_checkpoint("gemma3_text", head_dim=32, sliding_window=20, query_pre_attn_scalar=64)).config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_size) == (3, 4, 2, 32)
    assert config.attention_scales == (64**-0.5,) * 3
    assert config.sliding_windows == (20, 20, 20)


def test_a_window_that_only_the_mask_has_is_found(save_checkpoint: SaveCheckpoint) -> None:
    assert load(save_checkpoint("phimoe", sliding_window=24)).config.sliding_windows == (24,) * 3


@torch.inference_mode()
def test_embeddings_replace_token_ids(save_checkpoint: SaveCheckpoint, run_model: RunModel) -> None:
    model = load(save_checkpoint("gemma", head_dim=16))
    table = model._parts.model.get_input_embeddings()
    ids = torch.tensor([9, 8, 7, 6])
    forward = model.forward
    expected = run_model(model, [ids], [[4]])[0]
    wrong = torch.tensor([9, 1, 1, 6])
    rows = [(1, table(ids[1:3]).float())]
    model.forward = lambda *arguments: forward(*arguments, embeds=rows)
    torch.testing.assert_close(run_model(model, [wrong], [[4]])[0], expected)


_BY_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 199, "num_kv_shared_layers": 0}
_SLIDING_FIRST = {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "head_dim": 16}


@pytest.mark.parametrize(
    ("model_type", "entries"),
    [
        ("gemma4_text", {"global_head_dim": 16}),
        ("gemma3n_text", {"laurel_rank": 8, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 3}),
    ],
)
@torch.inference_mode()
def test_embeddings_leave_the_inputs_of_each_layer_to_other_tokens(
    model_type: str, entries: dict[str, Any], save_checkpoint: SaveCheckpoint, run_model: RunModel
) -> None:
    """The classes look such inputs up by token ids, which rows that replace ids do not have."""
    model = load(save_checkpoint(model_type, vocab_size=199, **_BY_LAYER, **_SLIDING_FIRST, **entries))
    ids, forward = torch.tensor([9, 8, 7, 6]), model.forward
    expected = run_model(model, [ids], [[4]])[0]
    rows = [(1, torch.randn(2, model.config.hidden_size))]
    model.forward = lambda *arguments: forward(*arguments, embeds=rows)
    found = run_model(model, [torch.tensor([9, 0, 0]), ids], [[3, 4]])
    torch.testing.assert_close(found[1], expected, rtol=1e-4, atol=1e-4)
    assert found[0].isfinite().all()


@torch.inference_mode()
def test_fewer_caches_end_the_pass_early(save_checkpoint: SaveCheckpoint) -> None:
    import numpy as np

    from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend

    model = load(save_checkpoint("llama"))
    backend = make_attention_backend("cpu", model.config, 16, CPU)
    ones = np.array([1])
    plan = backend.plan(np.array([0, 1]), ones, np.array([[0]]), np.array([0]))
    hidden = model.forward(torch.tensor([1]), torch.tensor([0]), backend.allocate(1)[:2], plan)
    assert hidden.shape == (1, 64)
    assert model.num_attention_calls == 2


@torch.inference_mode()
def test_int8_rounds_every_linear_layer_but_the_head(save_checkpoint: SaveCheckpoint, run_model: RunModel) -> None:
    path = save_checkpoint("mixtral", num_local_experts=4)
    plain, rounded = (run_model(load(path, quantization=how), PROMPTS[1:], [[40]])[0] for how in (None, "int8-dynamic"))
    assert 0 < (plain - rounded).norm() / plain.norm() < 0.1


@torch.inference_mode()
def test_weights_are_replaced(save_checkpoint: SaveCheckpoint, run_model: RunModel) -> None:
    first, second = save_checkpoint("phi"), save_checkpoint("phi", initializer_range=0.05)
    loader = ModelLoader(model_impl="auto")
    model = loader.load(first)
    loader.check(second)
    assert loader.read_config(second) == loader.read_config(first)
    loader.replace_weights(model, second)
    for found, expected in zip(run_model(model, PROMPTS, CHUNKS), logits_of(second), strict=True):
        torch.testing.assert_close(found, expected[: len(found)], rtol=1e-4, atol=1e-4)


def test_weights_of_another_shape_are_refused(save_checkpoint: SaveCheckpoint, edit_config: EditConfig) -> None:
    path = save_checkpoint("phi")
    edit_config(path, intermediate_size=112)
    with pytest.raises(ValueError, match=r"fc1.* has shape|another shape"):
        ModelLoader().check(path)
    with pytest.raises(ValueError, match=r"phi.*config.json.*cannot load PhiForCausalLM|another shape"):
        load(path)


def test_another_model_does_not_replace_the_loaded_one(save_checkpoint: SaveCheckpoint) -> None:
    model = load(save_checkpoint("phi"))
    other = save_checkpoint("phi", num_hidden_layers=2)
    with Checkpoint(other, torch.float32, CPU) as checkpoint, pytest.raises(ValueError, match=r"num_layers 2.* 3"):
        model.load_weights(checkpoint)


def test_no_weight_is_held_twice(save_checkpoint: SaveCheckpoint) -> None:
    """Packed layers hold copies; what is left of the modules is small."""
    model = load(save_checkpoint("phi"))
    left = [parameter.shape for parameter in model._parts.model.parameters() if parameter.device.type != "meta"]
    assert sorted(len(shape) for shape in left) == [1] * 8 + [2]  # norms, and the embeddings


def test_a_gpus_sleep_finds_the_tensors(save_checkpoint: SaveCheckpoint) -> None:
    model = load(save_checkpoint("phi"))
    embeddings = model._parts.model.get_input_embeddings().weight
    assert any(tensor is embeddings for tensor in tensors_of(model))
