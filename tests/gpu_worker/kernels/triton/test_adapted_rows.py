"""The rows of all adapters of a step, changed by two products on a GPU, against products by adapter."""

import numpy as np
import pytest
import torch

from tokenloom.gpu_worker.layers import triton_linear
from tokenloom.gpu_worker.lora.adapted_linear import AdaptedRows, CurrentRows, GroupedChanges, LoraLinear
from tokenloom.gpu_worker.lora.adapter import Adapter, Matrices

CPU = torch.device("cpu")
NAMES, INPUTS, OUTPUTS, RANKS = ("q", "k", "v"), 48, (64, 16, 24), (8, 5, 16)
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 2e-5}, torch.float16: {"rtol": 5e-3, "atol": 1e-2}}
SLOTS = {
    "one row": [1],
    "rows of all, and without": [0, -1, 2, 1, -1, 0],
    "one slot": [2] * 9,
    "many rows": [row % 4 - 1 for row in range(70)],
}


def adapter(slot, dtype, generator, *, rescales):
    """An adapter of every part, or of the middle one alone."""
    layers = {}
    for name, outputs in list(zip(NAMES, OUTPUTS, strict=True))[slot % 2 : 3 - slot % 2]:
        down = torch.randn(INPUTS, RANKS[slot], generator=generator).to(dtype) / 8
        up = torch.randn(RANKS[slot], outputs, generator=generator).to(dtype) / 2
        rows = torch.randn(2, outputs, generator=generator) if rescales else (None, None)
        layers[name] = Matrices(down, up, *rows)
    return Adapter(bytes([slot]), RANKS[slot], layers)


def make(dtype, current, *, is_grouped, rescales=()):
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(sum(OUTPUTS), INPUTS, generator=generator).to(dtype)
    layer = LoraLinear(lambda x, dtype=None: x @ weight.t(), NAMES, INPUTS, OUTPUTS, 3, current, None, dtype)
    if is_grouped:
        layer.group(GroupedChanges(INPUTS, OUTPUTS, 3, max(RANKS), dtype, CPU))
    for slot in range(3):
        layer.occupy(slot, adapter(slot, dtype, generator, rescales=slot in rescales), CPU)
    return layer


@pytest.fixture
def products(monkeypatch):
    """The grids of the products of places."""
    launched, launch = [], triton_linear.launch

    def count(kernel, grid, *arguments, **constants):
        launched.append(kernel.__name__)
        launch(kernel, grid, *arguments, **constants)

    monkeypatch.setattr(triton_linear, "launch", count)
    return launched


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("rescales", [(), (0, 2)])
def test_rows_get_the_change_of_their_adapter(slots, dtype, rescales, products):
    rows = AdaptedRows(np.array(slots, dtype=np.int32), 3)
    x = torch.randn(len(slots), INPUTS, generator=torch.Generator().manual_seed(1)).to(dtype)
    current = CurrentRows()
    current.set(rows)
    expected = make(dtype, current, is_grouped=False, rescales=rescales)(x)
    assert not products
    grouped = make(dtype, current, is_grouped=True, rescales=rescales)
    torch.testing.assert_close(grouped(x), expected, **TOLERANCE[dtype])
    assert products == ["rank_rows", "place_rows", "grouped_product", "grouped_product"]
    grouped(x)
    assert products[4:] == ["grouped_product"] * 2, "the rows are sorted once, for all layers"


def test_an_emptied_slot_changes_nothing():
    current = CurrentRows()
    layer = make(torch.float32, current, is_grouped=True, rescales=(0,))
    x = torch.randn(2, INPUTS)
    plain = layer(x)
    layer.occupy(0, None, CPU)
    current.set(AdaptedRows(np.array([0, -1], dtype=np.int32), 3))
    assert torch.equal(layer(x), plain)
