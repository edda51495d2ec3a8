"""MXFP4 is read as transformers unpacks it, and as its specification says; other layouts are refused by name."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.gpu_worker.layers.test_quantized_linear import needs_kernel
from tests.gpu_worker.models.gpt_oss import EXPERTS, HIDDEN, INNER, dequantized, write_gpt_oss
from tokenloom.gpu_worker.checkpoint.load_config import load_model_config
from tokenloom.gpu_worker.checkpoint.weights import Checkpoint
from tokenloom.gpu_worker.layers.linear import make_packed
from tokenloom.gpu_worker.layers.quantized_linear import QuantizedLinear

CPU = torch.device("cpu")
LAYER = "model.layers.1.mlp.experts"


def opened(path: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    return Checkpoint(path, dtype, CPU, load_model_config(path).scheme)


def change(path: Path, **tensors: torch.Tensor) -> Path:
    """Replace tensors of the experts of layer 1 by the ends of their names."""
    file = path / "model.safetensors"
    save_file(load_file(file) | {f"{LAYER}.{name}": tensor for name, tensor in tensors.items()}, file)
    return path


def test_each_expert_is_what_transformers_unpacks(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    # Every scale that float32 holds exactly with the largest and the smallest number.
    shape = (EXPERTS, 2 * INNER, HIDDEN // 32)
    scales = torch.randint(2, 253, shape, generator=generator, dtype=torch.uint8)
    path = change(write_gpt_oss(tmp_path), gate_up_proj_scales=scales)
    stored = load_file(path / "model.safetensors")
    with opened(path) as checkpoint:
        for name, outputs in (
            ("gate_proj", slice(0, None, 2)),
            ("up_proj", slice(1, None, 2)),
            ("down_proj", slice(None)),
        ):
            fused = "down_proj" if name == "down_proj" else "gate_up_proj"
            parts = (stored[f"{LAYER}.{fused}_{part}"] for part in ("blocks", "scales"))
            blocks, scales = parts
            theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
            by_specification = dequantized(blocks, scales)
            assert torch.equal(theirs, by_specification)
            for expert in range(EXPERTS):
                rows, columns = theirs[expert, outputs].shape
                found = checkpoint.take(f"{LAYER}.{expert}.{name}.weight", rows, columns)
                assert torch.equal(found, theirs[expert, outputs])
                bias = checkpoint.take(f"{LAYER}.{expert}.{name}.bias", rows)
                assert torch.equal(bias, stored[f"{LAYER}.{fused}_bias"][expert, outputs].float())


def test_experts_of_bfloat16_are_the_same_numbers(tmp_path: Path) -> None:
    packed, plain = opened(write_gpt_oss(tmp_path / "packed")), opened(write_gpt_oss(tmp_path / "plain", mxfp4=False))
    with packed, plain:
        for name, shape in (("gate_proj", (INNER, HIDDEN)), ("down_proj", (HIDDEN, INNER))):
            names = f"{LAYER}.5.{name}.weight"
            assert torch.equal(packed.take(names, *shape), plain.take(names, *shape))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"down_proj_blocks": torch.zeros(EXPERTS, HIDDEN, INNER // 2, dtype=torch.uint8)}, "blocks of MXFP4 are"),
        ({"down_proj_scales": torch.zeros(EXPERTS, HIDDEN, 1, dtype=torch.uint8)}, r"down_proj_scales has shape"),
        (
            {"gate_up_proj_scales": torch.zeros(EXPERTS, 2 * INNER, 2)},
            "float32, its quantization_config asks for uint8",
        ),
    ],
)
def test_another_layout_is_refused(tensors: dict[str, torch.Tensor], message: str, tmp_path: Path) -> None:
    path = change(write_gpt_oss(tmp_path), **tensors)
    with pytest.raises(ValueError, match=message), opened(path) as checkpoint:
        checkpoint.take(f"{LAYER}.0.gate_proj.weight", INNER, HIDDEN)


@needs_kernel
def test_the_kernels_of_cpus_take_no_layer_of_another_device(tmp_path: Path) -> None:
    with opened(write_gpt_oss(tmp_path), torch.bfloat16) as checkpoint:
        packed = checkpoint.take_packed(f"{LAYER}.0.down_proj.weight", HIDDEN, INNER)
        assert packed is not None
        layer = make_packed([packed], None, CPU)
        assert isinstance(layer, QuantizedLinear)
        assert layer.bits == 4
        assert make_packed([packed], None, torch.device("cuda")) is None
