"""The benchmark of layers that keep a state measures each kind, and its share of a model's prompts."""

from pathlib import Path

import pytest
import torch

from tests.parity.state_checkpoints import write_model
from tokenloom.bench.engine.states import measure, measure_share
from tokenloom.gpu_worker.ops.state_ops import CPUStateOps


@pytest.mark.parametrize("kind", ["gated delta", "mamba-2", "convolution"])
def test_prompts_and_decode_steps_are_measured(kind: str) -> None:
    row = measure(kind, torch.bfloat16, tokens=4, requests=[1, 2], pairs=1)
    assert row["prompt_ms"] > 0
    assert [each["requests"] for each in row["decode"]] == [1, 2]
    assert all(each["ms"] > 0 and each["share_of_copies"] > 0 for each in row["decode"])


@pytest.mark.parametrize(("kind", "without"), [("qwen3_5_text", set()), ("lfm2", {"recurrence", "gates", "norm"})])
def test_shares_of_a_prompt_are_of_the_operations_that_a_model_has(
    kind: str, without: set[str], tmp_path: Path
) -> None:
    own = CPUStateOps.short_conv
    row = measure_share(write_model(kind, tmp_path), tokens=40, repeats=2)
    assert {part for part, share in row["shares"].items() if share == 0} == without
    assert 0 < sum(row["shares"].values()) < 1
    assert CPUStateOps.short_conv is own
