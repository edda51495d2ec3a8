"""What is read of a peft directory, and what is refused by name."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.gpu_worker.lora.random_adapter import save_adapter
from tokenloom.gpu_worker.checkpoint.weights import Checkpoint
from tokenloom.gpu_worker.lora.adapter import AdaptedModel, Adapter, Layout, read_adapter

SHAPES = {"model.layers.0.mlp.up_proj": (6, 4), "model.layers.0.mlp.down_proj": (4, 6)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tensors = {f"{name}.weight": torch.zeros(shape) for name, shape in SHAPES.items()}
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    return tmp_path / "model"


def read(path: Path, max_rank: int = 8) -> Adapter:
    return read_adapter(path, AdaptedModel(SHAPES, torch.float32, Layout(8)), max_rank)


@pytest.mark.parametrize(("entries", "scaling"), [({}, 2.0), ({"use_rslora": True, "lora_alpha": 3}, 1.5)])
def test_matrices_are_arranged_and_scaled(
    checkpoint: Path, tmp_path: Path, entries: dict[str, object], scaling: float
) -> None:
    path = save_adapter(tmp_path / "adapter", checkpoint, rank=4, **entries)
    adapter = read(path)
    stored = load_file(path / "adapter_model.safetensors")
    assert adapter.rank == 4
    assert set(adapter.layers) == set(SHAPES)
    for name, matrices in adapter.layers.items():
        a, b = (stored[f"base_model.model.{name}.lora_{kind}.weight"] for kind in "AB")
        assert torch.equal(matrices.down[:, :4], a.t())
        assert matrices.down.shape[1] == 8
        assert not matrices.down[:, 4:].any()
        torch.testing.assert_close(matrices.up, b.t() * scaling)


def test_the_digest_is_that_of_both_files(checkpoint: Path, tmp_path: Path) -> None:
    one, same, other = (
        save_adapter(tmp_path / name, checkpoint, seed=seed) for name, seed in (("one", 0), ("same", 0), ("other", 1))
    )
    assert read(one).digest == read(same).digest != read(other).digest
    config = same / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 9'))
    assert read(one).digest != read(same).digest


@pytest.mark.parametrize(
    ("entries", "wanted"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"bias": "some"}, "bias is 'some'; it must be one of none, all, lora_only"),
        ({"use_dora": True, "lora_bias": True}, "lora_bias is set together with use_dora"),
        (
            {"modules_to_save": ["lm_head"]},
            r"holds no weight of the layers .* \['lm_head'\]",
        ),
        (
            {"rank_pattern": {"up_proj": 9}},
            "rank_pattern 'up_proj' is 9; .* ranks from 1 to 8",
        ),
        ({"rank_pattern": {"up_proj": "2"}}, "rank_pattern 'up_proj' is '2'"),
        ({"rank_pattern": {"up_proj": True}}, "rank_pattern 'up_proj' is True"),
        ({"rank_pattern": ["up_proj"]}, "rank_pattern must be an object"),
        ({"rank_pattern": {"(": 2}}, r"rank_pattern: '\(' is no regular expression"),
        ({"alpha_pattern": {"[": 2}}, r"alpha_pattern: '\[' is no regular expression"),
        ({"alpha_pattern": {"up_proj": "2"}}, "lora_alpha of model.layers.0.mlp.up_proj must be a finite number"),
        ({"lora_alpha": math.nan}, "must be a finite number, not nan"),
        ({"lora_alpha": 10**400}, "must be a finite number, not 1000"),
        ({"target_parameters": 3}, "target_parameters must be a list of names, not 3"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"r": 9}, "ranks from 1 to 8"),
        ({"r": "4"}, "ranks from 1 to 8"),
        ({"r": 2}, "has shape"),
        ({"lora_alpha": "8"}, "lora_alpha"),
    ],
)
def test_a_configuration_that_is_not_supported_is_named(
    checkpoint: Path, tmp_path: Path, entries: dict[str, object], wanted: str
) -> None:
    path = save_adapter(tmp_path / "adapter", checkpoint)
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | entries))
    with pytest.raises(ValueError, match=wanted):
        read(path)


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", "model.embed_tokens has only one of its two"),
        ("base_model.model.model.embed_tokens.lora_A.weight", "embed_tokens alone has lora_embedding_A"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_embedding_A", "embed_tokens alone has lora_embedding_A"),
        ("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", "tensor .*trainable_tokens_delta"),
        ("base_model.model.lm_head.weight", "layer lm_head cannot have an adapter"),
        ("base_model.model.model.layers.0.mlp.experts.gate_up_proj", "tensor .*experts.gate_up_proj is not supported"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector", "up_proj has a magnitude vector"),
        ("base_model.model.model.layers.9.mlp.up_proj.lora_A.weight", "only one of its two"),
        ("base_model.model.model.layers.9.mlp.up_proj.lora_magnitude_vector", "up_proj has a magnitude vector"),
        ("base_model.model.model.layers.9.mlp.up_proj.lora_B.bias", "bias of B, but no matrices"),
        ("base_model.model.model.layers.0.mlp.up_proj.bias", "bias of model.layers.0.mlp.up_proj has shape"),
        ("base_model.model.model.norm.bias", "layer model.norm cannot have an adapter"),
    ],
)
def test_a_tensor_that_is_not_supported_is_named(checkpoint: Path, tmp_path: Path, key: str, wanted: str) -> None:
    file = save_adapter(tmp_path / "adapter", checkpoint) / "adapter_model.safetensors"
    save_file(load_file(file) | {key: torch.ones(4, 4)}, file)
    with pytest.raises(ValueError, match=wanted):
        read(file.parent)


UP = "base_model.model.model.layers.0.mlp.up_proj"
EMBEDDINGS = "base_model.model.model.embed_tokens"


@pytest.mark.parametrize(
    ("tensors", "wanted"),
    [
        ({f"{UP}.lora_A.weight": torch.full((4, 4), 1e200, dtype=torch.float64)}, "does not consist of finite numbers"),
        ({f"{UP}.lora_A.weight": torch.full((4, 4), 1e6)}, "up_proj has numbers that are not finite in float16"),
        ({f"{EMBEDDINGS}.weight": torch.tensor(1.0)}, r"weight of model.embed_tokens has shape \[\]; expected two dim"),
        (
            {f"{EMBEDDINGS}.lora_embedding_A": torch.ones(4, 9, 1), f"{EMBEDDINGS}.lora_embedding_B": torch.ones(4, 4)},
            r"matrix A of model.embed_tokens has shape \[4, 9, 1\]; expected two dimensions",
        ),
        (
            {
                key.replace(".model.", ".", 1): torch.ones(4, 4)
                for key in (f"{UP}.lora_A.weight", f"{UP}.lora_B.weight")
            },
            "up_proj is there twice, under two names",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    checkpoint: Path, tmp_path: Path, tensors: dict[str, torch.Tensor], wanted: str
) -> None:
    file = save_adapter(tmp_path / "adapter", checkpoint, ensure_weight_tying=True) / "adapter_model.safetensors"
    save_file(load_file(file) | tensors, file)
    shapes = SHAPES | {"model.embed_tokens": (4, 9)}
    with pytest.raises(ValueError, match=wanted):
        read_adapter(file.parent, AdaptedModel(shapes, torch.float16, Layout(8), is_tied=True), 8)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e8m0fnu"])
def test_floats_of_8_bits_are_read_or_named(checkpoint: Path, tmp_path: Path, dtype: str) -> None:
    file = save_adapter(tmp_path / "adapter", checkpoint) / "adapter_model.safetensors"
    matrix = torch.ones(4, 4).to(getattr(torch, dtype))
    save_file(load_file(file) | {f"{UP}.lora_A.weight": matrix}, file)
    if dtype == "float8_e8m0fnu":
        with pytest.raises(ValueError, match="the dtype 'F8_E8M0' is not supported"):
            read(file.parent)
    else:
        assert bool((read(file.parent).layers["model.layers.0.mlp.up_proj"].down[:, :4] == 1).all())


def test_a_layer_without_its_magnitudes_is_named(checkpoint: Path, tmp_path: Path) -> None:
    file = save_adapter(tmp_path / "adapter", checkpoint, use_dora=True) / "adapter_model.safetensors"
    tensors = load_file(file)
    del tensors["base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector"]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"up_proj has no magnitude vector, and .* says use_dora True"):
        read(file.parent)


EXPERTS = {f"model.layers.0.mlp.experts.{i}.{kind}_proj": (6, 4) for i in range(3) for kind in ("gate", "up")}
EXPERTS |= {f"model.layers.0.mlp.experts.{i}.down_proj": (4, 6) for i in range(3)}


@pytest.mark.parametrize(
    ("shapes", "wanted"),
    [
        (((12, 4), (12, 8)), r"shapes \[12, 4\] and \[12, 8\]; expected matrices of rank 4 for 3 experts"),
        (((12, 5), (12, 12)), "maps 5 inputs to 12 outputs; expected 4 to 12"),
    ],
)
def test_matrices_of_all_experts_that_do_not_fit_are_named(
    checkpoint: Path, tmp_path: Path, shapes: tuple[tuple[int, int], tuple[int, int]], wanted: str
) -> None:
    path = save_adapter(tmp_path / "adapter", checkpoint, target_parameters=["gate_up_proj"])
    prefix = "base_model.model.model.layers.0.mlp.experts.lora_"
    tensors = {f"{prefix}{kind}.weight": torch.ones(shape) for kind, shape in zip("AB", shapes, strict=True)}
    save_file(tensors, path / "adapter_model.safetensors")
    model = AdaptedModel(EXPERTS, torch.float32, Layout(), num_experts=3)
    with pytest.raises(ValueError, match=f"gate_up_proj .*{wanted}"):
        read_adapter(path, model, 8)


def test_gates_and_ups_that_take_turns(checkpoint: Path, tmp_path: Path) -> None:
    """In gpt-oss; in the other classes ups follow gates. Either way an expert's matrices are those of peft."""
    path = save_adapter(tmp_path / "adapter", checkpoint, target_parameters=["gate_up_proj"])
    prefix, generator = "base_model.model.model.layers.0.mlp.experts.lora_", torch.Generator().manual_seed(0)
    a, b = torch.randn(12, 4, generator=generator), torch.randn(12, 12, generator=generator)
    save_file({f"{prefix}A.weight": a, f"{prefix}B.weight": b}, path / "adapter_model.safetensors")
    delta = 2 * torch.einsum("ore,eri->eoi", b.reshape(12, 4, 3), a.reshape(3, 4, 4))
    for takes_turns in (True, False):
        model = AdaptedModel(EXPERTS, torch.float32, Layout(), num_experts=3, experts_take_turns=takes_turns)
        adapter = read_adapter(path, model, 8)
        for expert in range(3):
            for number, kind in enumerate(("gate", "up")):
                rows = slice(number, None, 2) if takes_turns else slice(6 * number, 6 * number + 6)
                matrices = adapter.layers[f"model.layers.0.mlp.experts.{expert}.{kind}_proj"]
                torch.testing.assert_close((matrices.down @ matrices.up).t(), delta[expert][rows])


@pytest.mark.parametrize(("name", "size"), [("model.embed_tokens", 12), ("lm_head", 12)])
def test_tokens_that_an_adapter_adds_are_refused_by_name(
    checkpoint: Path, tmp_path: Path, name: str, size: int
) -> None:
    file = save_adapter(tmp_path / "adapter", checkpoint) / "adapter_model.safetensors"
    save_file({f"base_model.model.{name}.weight": torch.ones(size, 4)}, file)
    shapes = {"model.embed_tokens": (4, 10), "lm_head": (10, 4)}
    with pytest.raises(ValueError, match=f"weight of {name} has rows for 12 tokens, and the model has 10"):
        read_adapter(file.parent, AdaptedModel(shapes, torch.float32, Layout()), 8)


def test_changes_of_what_reads_images_are_refused_where_it_is_served(checkpoint: Path, tmp_path: Path) -> None:
    file = save_adapter(tmp_path / "adapter", checkpoint) / "adapter_model.safetensors"
    name = "model.visual.blocks.0.attn.qkv"
    tower = {f"base_model.model.{name}.lora_{kind}.weight": torch.ones(4, 4) for kind in "AB"}
    save_file(load_file(file) | tower, file)
    assert set(read(file.parent).layers) == set(SHAPES)
    with pytest.raises(ValueError, match=f"{name} changes how images or sounds are read"):
        read_adapter(file.parent, AdaptedModel(SHAPES, torch.float32, Layout(), reads_media=True), 8)


@contextmanager
def opened(checkpoint: Path) -> Iterator[Checkpoint]:
    with Checkpoint(checkpoint, torch.float32, torch.device("cpu")) as base:
        yield base


def test_magnitudes_need_the_models_own_weights(checkpoint: Path, tmp_path: Path) -> None:
    path = save_adapter(tmp_path / "adapter", checkpoint, use_dora=True)
    with pytest.raises(ValueError, match="the model's own weights cannot be read"):
        read(path)
    # Of zeros: the product of the matrices alone has the norm.
    model = AdaptedModel(SHAPES, torch.float32, Layout(), read_base=lambda: opened(checkpoint))
    adapter = read_adapter(path, model, 8)
    stored = load_file(path / "adapter_model.safetensors")
    for name, matrices in adapter.layers.items():
        a, b, magnitude = (
            stored[f"base_model.model.{name}.lora_{kind}"] for kind in ("A.weight", "B.weight", "magnitude_vector")
        )
        assert matrices.factors is not None
        torch.testing.assert_close(matrices.factors, magnitude / (2 * b @ a).norm(dim=1))
        assert not matrices.shifts.any()  # type: ignore[union-attr]
    assert adapter.files is not None, "they are made again when the weights are replaced"
    assert adapter.nbytes > read(save_adapter(tmp_path / "plain", checkpoint)).nbytes


def test_a_bias_that_the_layer_lacks_is_named(checkpoint: Path, tmp_path: Path) -> None:
    file = save_adapter(tmp_path / "adapter", checkpoint) / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.model.model.layers.0.mlp.up_proj.base_layer.bias": torch.ones(6)}, file)
    model = AdaptedModel(SHAPES, torch.float32, Layout(), read_base=lambda: opened(checkpoint))
    with pytest.raises(ValueError, match="up_proj has a bias, and the model's own layer has none"):
        read_adapter(file.parent, model, 8)


def test_a_layer_that_the_model_lacks_is_named(checkpoint: Path, tmp_path: Path) -> None:
    path = save_adapter(tmp_path / "adapter", checkpoint)
    with pytest.raises(ValueError, match=r"up_proj cannot have an adapter; those of this model are down_proj"):
        read_adapter(path, AdaptedModel({"model.layers.0.mlp.down_proj": (4, 6)}, torch.float32, Layout(8)), 8)


def test_numbers_must_be_finite(checkpoint: Path, tmp_path: Path) -> None:
    file = save_adapter(tmp_path / "adapter", checkpoint) / "adapter_model.safetensors"
    save_file({key: tensor * float("inf") for key, tensor in load_file(file).items()}, file)
    with pytest.raises(ValueError, match="finite"):
        read(file.parent)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absent: No such file"):
        read(tmp_path / "absent")
    (tmp_path / "adapter_config.json").write_text("{")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"adapter_config\.json: not JSON"):
        read(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors"):
        read(tmp_path)
