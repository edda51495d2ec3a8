"""Experts of which the files hold one tensor are given one by one."""

from collections.abc import Collection, Sequence

import pytest
import torch
from torch import Tensor

from tokenloom.gpu_worker.checkpoint.files.fused_experts import SplitExperts


class Tensors:
    """Fulfils :class:`~tokenloom.gpu_worker.checkpoint.files.fused_experts.OpenFiles`."""

    views: Sequence[Tensor] = ()

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("rows_are_outputs", [False, True])
def test_gates_and_ups_are_halves_in_either_order_of_the_dimensions(rows_are_outputs: bool) -> None:
    """Of 4 inputs and 3 inner ones; blocks of 1 output share a scale."""
    gates, ups, downs = torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.randn(2, 4, 3)
    stored = {"m.experts.gate_up_proj": torch.cat((gates, ups), 1), "m.experts.down_proj": downs}
    stored |= {f"{name}_scale_inv": tensor[..., :1] for name, tensor in stored.items()}
    if not rows_are_outputs:
        stored = {name: tensor.transpose(1, 2) for name, tensor in stored.items()}
    files = SplitExperts(Tensors(stored | {"m.gate.weight": torch.ones(2, 4)}))
    kinds = [f"{kind}_proj.weight{end}" for kind in ("gate", "up", "down") for end in ("", "_scale_inv")]
    assert set(files.names) == {"m.gate.weight", *(f"m.experts.{expert}.{kind}" for expert in (0, 1) for kind in kinds)}
    for kind, tensors in (("gate", gates), ("up", ups), ("down", downs)):
        for expert, tensor in enumerate(tensors):
            name = f"m.experts.{expert}.{kind}_proj.weight"
            assert torch.equal(files.read(name), tensor)
            assert torch.equal(files.read(f"{name}_scale_inv"), tensor[:, :1])
            assert files.shape(name) == tensor.shape


@pytest.mark.parametrize("rows_are_outputs", [False, True])
def test_gates_and_ups_share_no_scale(rows_are_outputs: bool) -> None:
    """Of 6 gates and 6 ups in blocks of 8, two scales would be one for each half."""
    stored = {"m.experts.gate_up_proj": torch.ones(2, 12, 16), "m.experts.down_proj": torch.ones(2, 16, 6)}
    stored |= {"m.experts.gate_up_proj_scale_inv": torch.ones(2, 2, 2)}
    files = Tensors({name: each if rows_are_outputs else each.transpose(1, 2) for name, each in stored.items()})
    with pytest.raises(ValueError, match=r"m\.experts\.gate_up_proj_scale_inv: 8 outputs share a scale, .* divide 6"):
        SplitExperts(files, 8)
    SplitExperts(files, 6)


def test_with_biases_gates_and_ups_take_turns() -> None:
    stored = {
        "m.experts.gate_up_proj": torch.arange(24.0).view(1, 4, 6),
        "m.experts.gate_up_proj_bias": torch.arange(6.0).view(1, 6),
        "m.experts.down_proj": torch.ones(1, 3, 4),
        "m.experts.down_proj_bias": torch.ones(1, 4),
    }
    files = SplitExperts(Tensors(stored))
    assert torch.equal(files.read("m.experts.0.up_proj.bias"), torch.tensor([1.0, 3.0, 5.0]))
    assert torch.equal(files.read("m.experts.0.gate_proj.weight")[0], torch.tensor([0.0, 6.0, 12.0, 18.0]))


def test_what_lacks_a_matrix_or_a_dimension_is_left_as_it_is() -> None:
    stored = {"a.experts.gate_up_proj": torch.zeros(2, 4, 6), "b.experts.gate_up_proj": torch.zeros(4, 6)}
    stored |= {"b.experts.down_proj": torch.zeros(3, 4)}
    assert set(SplitExperts(Tensors(stored)).names) == set(stored)
