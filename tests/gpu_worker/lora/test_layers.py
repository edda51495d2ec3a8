"""Products with the matrices of adapters, by the kernel and by torch, equal those with merged weights."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenloom.gpu_worker.kernels.library import load_lora
from tokenloom.gpu_worker.layers.linear import make_linear
from tokenloom.gpu_worker.lora.adapter import Adapter, Layout
from tokenloom.gpu_worker.lora.layers import AdaptedRows, CurrentRows, LoraLinear

NAMES, INPUTS, OUTPUTS = ("q_proj", "k_proj", "v_proj"), 43, (72, 16, 21)
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


class Layer:
    """A merged layer with an adapter in each slot; the last one changes only the second part."""

    def __init__(self, dtype: torch.dtype, ranks: Sequence[int], *, use_kernel: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        library = load_lora()
        self.weight = torch.randn(sum(OUTPUTS), INPUTS, generator=generator).to(dtype)
        self.current = CurrentRows()
        kernel = library.add_lora if use_kernel else None
        base = make_linear(self.weight)
        self.layer = LoraLinear(base, NAMES, INPUTS, OUTPUTS, len(ranks), self.current, kernel, dtype)
        self.changes = []
        layout = Layout(library.rank_step(), library.panel_outputs()) if use_kernel else Layout()
        for slot, rank in enumerate(ranks):
            names = NAMES if slot < len(ranks) - 1 else NAMES[1:2]
            parts, changes = {}, []
            for name, outputs in zip(NAMES, OUTPUTS, strict=True):
                a = torch.randn(rank, INPUTS, generator=generator).to(dtype).float()
                b = (torch.randn(outputs, rank, generator=generator) * 0.1).to(dtype).float()
                changes.append(b @ a if name in names else torch.zeros(outputs, INPUTS))
                if name in names:
                    parts[name] = layout.arrange(a, b, dtype)
            self.layer.occupy(slot, Adapter(bytes([slot]), rank, parts), CPU)
            self.changes.append(torch.cat(changes))

    def __call__(self, x: Tensor, slots: Sequence[int]) -> Tensor:
        self.current.set(AdaptedRows(np.array(slots, dtype=np.int32), len(self.changes)))
        return self.layer(x)

    def expected(self, x: Tensor, slots: Sequence[int]) -> Tensor:
        merged = [self.weight.float() + (self.changes[slot] if slot >= 0 else 0) for slot in slots]
        return torch.cat([F.linear(row.float()[None], weight) for row, weight in zip(x, merged, strict=True)])


@pytest.mark.parametrize("use_kernel", [True, False], ids=["kernel", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "slots", [[0], [0, -1, 1, 2, 0, 1, -1, 1], [2, 2, -1], [1] * 70 + [-1] * 3 + [0] * 33], ids=len
)
def test_rows_get_the_change_of_their_adapter(use_kernel: bool, dtype: torch.dtype, slots: list[int]) -> None:
    layer = Layer(dtype, ranks=(16, 5, 24), use_kernel=use_kernel)
    x = torch.randn(len(slots), INPUTS, generator=torch.Generator().manual_seed(1)).to(dtype)
    found, expected = layer(x, slots).float(), layer.expected(x, slots)
    tolerance = TOLERANCE[dtype] * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0.0, atol=tolerance)


def test_a_row_does_not_depend_on_the_others() -> None:
    layer = Layer(torch.float32, ranks=(16, 16), use_kernel=True)
    layer.layer._base = lambda x, dtype=None: torch.zeros(len(x), sum(OUTPUTS))
    x = torch.randn(90, INPUTS, generator=torch.Generator().manual_seed(1))
    slots = [0, 1, -1] * 30
    together = layer(x, slots)
    for row in (0, 1, 40, 87):
        assert torch.equal(layer(x[row : row + 1], slots[row : row + 1])[0], together[row])
    assert not together[2::3].any()


def test_without_rows_only_the_base_computes() -> None:
    layer = Layer(torch.float32, ranks=(16,), use_kernel=True)
    x = torch.randn(3, INPUTS)
    layer.current.rows = None
    assert torch.equal(layer.layer(x), layer.layer._base(x))


def test_an_emptied_slot_changes_nothing() -> None:
    layer = Layer(torch.float32, ranks=(16, 4), use_kernel=True)
    layer.layer.occupy(0, None, CPU)
    x = torch.randn(2, INPUTS)
    torch.testing.assert_close(layer(x, [0, -1]), F.linear(x, layer.weight))


def test_a_slot_that_is_not_there_never_reaches_the_kernel() -> None:
    layer = Layer(torch.float32, ranks=(16, 4), use_kernel=True)
    with pytest.raises(AssertionError, match="slot 2 of 2, which is not there"):
        layer(torch.randn(2, INPUTS), [2, -1])
