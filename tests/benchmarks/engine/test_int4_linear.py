import math

import torch

from tokenloom.bench.engine.int4_linear import SHAPES, Int4Linear, make_layers, run


def test_rounded_weights_still_multiply() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(64, 128).to(torch.bfloat16), torch.randn(5, 128).to(torch.bfloat16)
    exact = x.float() @ weight.float().t()
    for group in (32, 64, 128):
        rounded = Int4Linear(weight, group)(x).float()
        assert rounded.shape == (5, 64)
        assert (rounded - exact).std() < 0.2 * exact.std()  # a level is about a third of it


def test_every_kind_has_its_turn() -> None:
    layers = make_layers(1, [64])
    assert {kind: len(each) for kind, each in layers.items()} == dict.fromkeys(
        ("bfloat16", "int8", "int4, 64"), len(SHAPES)
    )
    assert all(0 < us < math.inf for us in run(layers, 2, rounds=1).values())
