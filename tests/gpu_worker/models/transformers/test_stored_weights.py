"""Quantized checkpoints that transformers' modules compute: the logits are those of the weights in the files, and
layers and experts keep these weights as they are stored."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.gpu_worker.checkpoint.quantization import formats
from tests.gpu_worker.checkpoint.quantization.formats import Quantize
from tests.gpu_worker.checkpoint.quantization.test_schemes import AWQ, FORMATS, FP8
from tokenloom.gpu_worker.layers.fp8_linear import WidenedLinear
from tokenloom.gpu_worker.layers.linear import Linear
from tokenloom.gpu_worker.layers.panel_linear import PackedLinear, PanelLinear
from tokenloom.gpu_worker.layers.quantized_linear import Int8Linear, QuantizedLinear
from tokenloom.gpu_worker.models.load_model import ModelLoader, load_model
from tokenloom.gpu_worker.models.transformers.stored_weights import StoredWeight
from tokenloom.gpu_worker.ops.cpu_ops import make_ops

RunModel = Callable[..., list[Tensor]]
SaveCheckpoint = Callable[..., Path]
_dequantize = Fp8Dequantize(None)._dequantize_one  # type: ignore[no-untyped-call]
PROMPT = torch.arange(100, 130)

MODELS: dict[str, dict[str, Any]] = {
    "granite": {},
    "glm4": {"pad_token_id": 0},
    "cohere": {"logit_scale": 0.5},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
PLAIN = (PanelLinear, PackedLinear)
QUANTIZED: dict[str, tuple[Quantize, dict[str, Any], Any]] = {
    "fp8, by block": (
        formats.fp8("block", "scale_inv", block=32), FP8 | {"weight_block_size": [32, 32]}, WidenedLinear
    ),
    "compressed fp8, by channel": (*FORMATS["compressed fp8, by channel"], WidenedLinear),
    "gptq, zero points": (*FORMATS["gptq, zero points"], QuantizedLinear),
    "gptq, order of activations": (*FORMATS["gptq, order of activations"], PLAIN),  # which no kernel reads
    "awq": (formats.awq(32), AWQ | {"group_size": 32}, QuantizedLinear),
    "w4a16": (*FORMATS["w4a16"], QuantizedLinear),
    "w8a8": (*FORMATS["w8a8"], Int8Linear),
}  # fmt: skip
CASES = [("granite", name) for name in QUANTIZED]
CASES += [(model, name) for model in MODELS for name in ("fp8, by block", "gptq, zero points") if model != "granite"]


def load(path: Path, dtype: str) -> Any:
    return load_model(path, dtype, ops=make_ops("auto", torch.device("cpu")), model_impl="transformers")


def layers_of(model: nn.Module) -> Iterator[Linear]:
    """Yield our layers in the modules of ``model``."""
    for module in model.modules():
        parts = vars(module)
        if "tokenloom_experts" in parts:
            yield from vars(parts["tokenloom_experts"])["_first"] + vars(parts["tokenloom_experts"])["_down"]
        elif "merged" in parts:
            yield parts["merged"].linear
        elif "_linear" in parts:
            yield parts["_linear"]


@pytest.mark.parametrize(("kind", "name"), CASES)
@torch.inference_mode()
def test_logits_are_those_of_the_stored_weights(
    kind: str, name: str, tmp_path: Path, save_checkpoint: SaveCheckpoint, run_model: RunModel
) -> None:
    quantize, entries, layer = QUANTIZED[name]
    source = save_checkpoint(kind, **MODELS[kind])
    quantized, plain = formats.write(tmp_path / "written", quantize, entries, source=source)
    found, expected = (run_model(load(path, "float32"), [PROMPT], [[30]])[0] for path in (quantized, plain))
    assert (found - expected).abs().max() <= 1e-4
    model = load(quantized, "bfloat16")
    as_stored, expected = run_model(model, [PROMPT], [[30]])[0].log_softmax(-1), expected.log_softmax(-1)
    assert ((as_stored - expected).abs() * expected.exp()).sum(-1).mean() < 0.1
    # What is left is plain in the files: output layer, and routers.
    others = [each for each in layers_of(model._parts.model) if not isinstance(each, layer)]
    assert len(others) <= 1
    assert all(isinstance(each, PLAIN) for each in others)
    assert not any(isinstance(each, StoredWeight) for each in model._parts.model.parameters())
    assert model.declared.scheme == ModelLoader(model_impl="transformers").read_config(quantized).scheme
    ModelLoader(model_impl="transformers").check(quantized)


@torch.inference_mode()
def test_a_published_layout_is_what_transformers_reads_of_it(
    tmp_path: Path, save_checkpoint: SaveCheckpoint, run_model: RunModel
) -> None:
    """MiniMax-M2's: the entries are those of its config.json, names and blocks those of its index, and the reference is
    transformers' own dequantization of the file (integrations/finegrained_fp8.py)."""
    entries = {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    }
    shapes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 64, "num_hidden_layers": 2}
    source = save_checkpoint("minimax_m2", num_local_experts=4, num_experts_per_tok=2, **shapes)
    quantized, _ = formats.write(tmp_path / "written", formats.fp8("block", "scale_inv"), entries, source=source)
    tensors = load_file(quantized / "model.safetensors")
    expert = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    assert tensors[expert].dtype == torch.float8_e4m3fn
    assert tensors[f"{expert}_scale_inv"].shape == (1, 1)
    unpacked = {}
    for key, tensor in tensors.items():
        scale = tensors.get(f"{key}_scale_inv")
        if not key.endswith("_scale_inv"):
            unpacked[key] = tensor if scale is None else _dequantize(tensor, scale)
    plain = tmp_path / "dequantized"
    plain.mkdir()
    config = json.loads((quantized / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    save_file(unpacked, plain / "model.safetensors", metadata={"format": "pt"})
    found, expected = (run_model(load(path, "float32"), [PROMPT], [[30]])[0] for path in (quantized, plain))
    assert (found - expected).abs().max() <= 1e-4


@torch.inference_mode()
def test_weights_are_rounded_again_if_an_option_says_so(
    tmp_path: Path, save_checkpoint: SaveCheckpoint, run_model: RunModel
) -> None:
    quantized, _ = formats.write(tmp_path / "w", *QUANTIZED["fp8, by block"][:2], source=save_checkpoint("granite"))
    ops = make_ops("auto", torch.device("cpu"))
    model: Any = load_model(quantized, "bfloat16", ops=ops, quantization="int8-dynamic", model_impl="transformers")
    assert sum(isinstance(each, Int8Linear) for each in layers_of(model._parts.model)) == 3 * 7
    assert run_model(model, [PROMPT], [[30]])[0].isfinite().all()


@torch.inference_mode()
def test_a_reload_takes_the_new_weights(tmp_path: Path, save_checkpoint: SaveCheckpoint, run_model: RunModel) -> None:
    loader = ModelLoader(ops=make_ops("auto", torch.device("cpu")), model_impl="transformers")
    quantize, entries, _ = QUANTIZED["fp8, by block"]
    path, _ = formats.write(tmp_path / "one", quantize, entries, source=save_checkpoint("granite"))
    other = tmp_path / "other"
    shutil.copytree(path, other)
    tensors = load_file(other / "model.safetensors")
    save_file({name: each.flip(0) for name, each in tensors.items()}, other / "model.safetensors")
    model = loader.load(path)
    loader.check(other)
    loader.replace_weights(model, other)
    expected = run_model(loader.load(other), [PROMPT], [[30]])[0]
    assert torch.equal(run_model(model, [PROMPT], [[30]])[0], expected)


def test_missing_and_unknown_tensors_are_named(tmp_path: Path, save_checkpoint: SaveCheckpoint) -> None:
    quantize, entries, _ = QUANTIZED["fp8, by block"]
    path, _ = formats.write(tmp_path / "written", quantize, entries, source=save_checkpoint("granite"))
    tensors = load_file(path / "model.safetensors")
    up = tensors.pop("model.layers.1.mlp.up_proj.weight")
    scale = tensors.pop("model.layers.1.mlp.up_proj.weight_scale_inv")
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no tensor model.layers.1.mlp.up_proj.weight"):
        load(path, "bfloat16")
    tensors |= {"model.layers.1.mlp.up_proj.weight": up, "model.layers.1.mlp.side_proj.weight": up}
    tensors |= {f"model.layers.1.mlp.{name}_proj.weight_scale_inv": scale for name in ("up", "side")}
    save_file({name: each.clone() for name, each in tensors.items()}, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"unsupported feature: model.layers.1.mlp.side_proj.weight"):
        load(path, "bfloat16")
