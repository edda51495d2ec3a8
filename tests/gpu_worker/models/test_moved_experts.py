"""The experts of a layer take over each other's weights, however these are packed."""

from pathlib import Path

import pytest
import torch

from tests.parity.reference import SMALL_CONFIGS, save_random
from tokenloom.gpu_worker.models.architectures import load_model
from tokenloom.gpu_worker.models.decoder import expert_layers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_expert_moves_to_another_place(tmp_path: Path, dtype: str) -> None:
    path = save_random("qwen3_moe", tmp_path, **SMALL_CONFIGS["qwen3_moe"])
    experts = expert_layers(load_model(path, dtype))[0]
    gate_up, down = experts.weights_of(3)
    x = torch.randn(5, gate_up.shape[1], generator=torch.Generator().manual_seed(1)).to(gate_up.dtype)
    expected, before = experts._compute(3, x), experts._compute(1, x)
    experts.prepare(1, [gate_up.clone(), down.clone()])
    experts.prepare(2, [gate_up.clone(), down.clone()])
    assert torch.equal(experts._compute(1, x), before), "the layer has not switched"
    assert experts.switch() == 2
    assert torch.equal(experts._compute(1, x), expected)
    assert all(map(torch.equal, experts.weights_of(2), (gate_up, down)))
    experts.prepare(0, [gate_up.clone(), down.clone()])
    experts.forget_prepared()
    assert experts.switch() == 0
