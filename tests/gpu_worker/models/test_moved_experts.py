"""The experts of a layer take over each other's weights as they are packed: floats, and integers and floats of few bits
with their scales."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file

from tests.gpu_worker.checkpoint.gguf.test_gguf_experts import write_experts
from tests.gpu_worker.checkpoint.quantization import formats
from tests.gpu_worker.checkpoint.quantization.test_schemes import EXPERTS
from tests.gpu_worker.models.gpt_oss import write_gpt_oss
from tokenloom.gpu_worker.checkpoint.layer_state import LayerState, pack_states, packed_bytes, unpack_states
from tokenloom.gpu_worker.layers.fp8_linear import WidenedLinear
from tokenloom.gpu_worker.layers.linear import make_linear
from tokenloom.gpu_worker.layers.quantized_linear import Int8Linear, QuantizedLinear
from tokenloom.gpu_worker.models.decoder import expert_layers
from tokenloom.gpu_worker.models.experts import AdaptedElsewhere, Experts
from tokenloom.gpu_worker.models.load_model import load_model
from tokenloom.gpu_worker.parallel.experts.expert_exchange import ExpertExchange
from tokenloom.gpu_worker.parallel.experts.grouped_rows import GroupedRows
from tokenloom.gpu_worker.parallel.ranks import Ranks
from tokenloom.gpu_worker.parallel.sharding import RankPlace

SHARED = Ranks(RankPlace(data_rank=0, data_size=2), experts=ExpertExchange(0, 2))
"""The first of two engines, which holds half of the experts, each by itself."""


SaveCheckpoint = Callable[..., Path]


def plain(directory: Path, save_checkpoint: SaveCheckpoint) -> Path:
    return save_checkpoint("qwen3_moe", norm_topk_prob=True)


def stored(name: str) -> Callable[[Path, SaveCheckpoint], Path]:
    def write(directory: Path, save_checkpoint: SaveCheckpoint) -> Path:
        source = save_checkpoint("qwen3_moe", norm_topk_prob=True)
        return formats.write(directory / "written", *EXPERTS[name], source=source)[0]

    return write


def gguf(directory: Path, save_checkpoint: SaveCheckpoint) -> Path:
    source = save_checkpoint("qwen3_moe", norm_topk_prob=True, mlp_only_layers=[1])
    write_experts(directory / "model.gguf", "qwen3_moe", load_file(source / "model.safetensors"), Kind.Q8_0)
    return directory / "model.gguf"


MODELS: dict[str, tuple[Callable[[Path, SaveCheckpoint], Path], str, str | None, type | None]] = {
    "float32": (plain, "float32", None, None),
    "bfloat16": (plain, "bfloat16", None, None),
    "int4": (plain, "bfloat16", "int4", QuantizedLinear),
    "int8-dynamic": (plain, "bfloat16", "int8-dynamic", Int8Linear),
    "GPTQ": (stored("gptq, zero points"), "bfloat16", None, QuantizedLinear),
    "AWQ": (stored("awq"), "bfloat16", None, QuantizedLinear),
    "FP8": (stored("fp8, by block"), "bfloat16", None, WidenedLinear),
    "int8 file": (stored("w8a8"), "bfloat16", None, Int8Linear),
    "MXFP4": (lambda directory, _: write_gpt_oss(directory), "bfloat16", None, QuantizedLinear),
    "GGUF": (gguf, "bfloat16", None, QuantizedLinear),
}


def experts_of(path: Path, dtype: str, quantization: str | None) -> Experts:
    return expert_layers(load_model(path, dtype, quantization=quantization, ranks=SHARED))[0]


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_an_expert_moves_to_another_place(tmp_path: Path, save_checkpoint: SaveCheckpoint, name: str) -> None:
    write, dtype, quantization, kind = MODELS[name]
    experts = experts_of(write(tmp_path, save_checkpoint), dtype, quantization)
    assert kind is None or isinstance(experts._experts[0].layers[0], kind)
    sent = experts.pack(2)
    assert len(sent) <= experts.packed_bytes()
    filled = torch.cat((sent, torch.zeros(100, dtype=torch.uint8)))
    x = torch.randn(5, _hidden_size(experts), generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    expected, before = experts._compute(2, x), experts._compute(1, x)
    assert not torch.equal(expected, before)
    experts.prepare(1, filled.clone())
    experts.prepare(0, filled.clone())
    assert torch.equal(experts._compute(1, x), before), "the layer has not switched"
    assert experts.switch() == 2
    for place in (0, 1):
        assert torch.equal(experts._compute(place, x), expected)
    assert torch.equal(experts.pack(1), sent)
    experts.prepare(0, filled.clone())
    experts.forget_prepared()
    assert experts.switch() == 0


def _hidden_size(experts: Experts) -> int:
    return int(experts._router.unpacked().shape[1])  # type: ignore[attr-defined]


def test_weights_of_another_shape_are_refused(tmp_path: Path, save_checkpoint: SaveCheckpoint) -> None:
    """They may come from another machine, and kernels read as many bytes as the layer's shape says."""
    experts = experts_of(plain(tmp_path, save_checkpoint), "bfloat16", "int4")
    (tensors, numbers), down = experts._experts[1].states()
    for wrong in (
        LayerState([tensors[0][:, :-1].contiguous(), *tensors[1:]], numbers),
        LayerState(tensors, [7.0, *numbers[1:]]),
        LayerState(tensors, [numbers[0], 0.0, *numbers[2:]]),
        LayerState(tensors, numbers[:-1]),
        LayerState(tensors[:-1], numbers),
    ):
        with pytest.raises(ValueError, match=r"packed weight|do not fit"):
            experts._experts[0].with_states([wrong, down])


@pytest.mark.parametrize("cut", [4, 40, -70])
def test_bytes_that_hold_no_weights_are_refused(cut: int) -> None:
    states = [LayerState([torch.ones(100, 3)], [1.0, 2.5])]
    packed = pack_states(states)
    assert len(packed) == packed_bytes(states)
    (found,) = unpack_states(packed)
    assert torch.equal(found.tensors[0], states[0].tensors[0])
    assert found.numbers == [1.0, 2.5]
    with pytest.raises(ValueError, match="bytes"):
        unpack_states(packed[: len(packed) + cut if cut < 0 else cut].clone())


def test_biases_move_with_their_weights() -> None:
    layers = [make_linear(torch.randn(32, 32), torch.randn(32)) for _ in range(2)]
    x = torch.randn(3, 32)
    expected = layers[1](x)
    moved = layers[0].with_state(layers[1].state())  # type: ignore[attr-defined]
    assert torch.equal(moved(x), expected)
    assert torch.equal(layers[0].take(moved)(x), expected)  # type: ignore[attr-defined]


def test_adapters_change_experts_of_others_when_this_rank_has_none_any_more(
    tmp_path: Path, save_checkpoint: SaveCheckpoint
) -> None:
    """A group that grows beyond the number of experts leaves some ranks without one."""

    class Unchanged:
        def wrap(self, prefix: str, layers: Sequence[Any]) -> list[Any]:
            return list(layers)

        def take(self, slots: Any) -> None:
            """Do nothing."""

    class Trip:
        def reaches(self, place: int) -> bool:
            return True

        def carry(self, rows: torch.Tensor, run: Any, width: int) -> torch.Tensor:
            return torch.full((len(rows), width), 2.0)

    model = load_model(plain(tmp_path, save_checkpoint), "float32", ranks=SHARED)
    like = next(iter(expert_layers(model)[0]._experts.values()))
    adapters: Any = Unchanged()
    elsewhere = AdaptedElsewhere("experts", adapters, (8, 4), like)
    grouped, slots, trip = GroupedRows.sort(torch.tensor([[1], [0]])), np.zeros(2, np.int32), Trip()
    rows: Any = elsewhere.compute(trip, torch.zeros(2, 8), grouped, slots, {}, lambda place: place)  # type: ignore[arg-type]
    assert torch.equal(rows, torch.full((2, 8), 2.0))
