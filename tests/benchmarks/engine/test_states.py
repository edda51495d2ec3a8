"""The benchmark of layers that keep a state measures each kind."""

import pytest
import torch

from tokenloom.bench.engine.states import measure


@pytest.mark.parametrize("kind", ["gated delta", "mamba-2", "convolution"])
def test_prompts_and_decode_steps_are_measured(kind: str) -> None:
    row = measure(kind, torch.bfloat16, tokens=4, requests=[1, 2], pairs=1)
    assert row["prompt_ms"] > 0
    assert [each["requests"] for each in row["decode"]] == [1, 2]
    assert all(each["ms"] > 0 and each["share_of_copies"] > 0 for each in row["decode"])
