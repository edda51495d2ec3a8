"""Statistics of logits against torch's own."""

import math

import pytest
import torch

from tokenloom.engine_core.data.core_sampling_params import CoreSamplingParams
from tokenloom.gpu_worker.sampler.step_sampler import LogitsMeter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, 1.0, 8.0, 1000.0])
def test_equal_to_torch(scale: float, dtype: torch.dtype) -> None:
    logits = (torch.randn(5, 503, generator=torch.Generator().manual_seed(1)) * scale).to(dtype)
    params = [CoreSamplingParams(max_tokens=1, seed=0, temperature=row / 2) for row in range(5)]
    expected = torch.distributions.Categorical(logits=logits.double()).entropy().tolist()
    for row, stats in enumerate(LogitsMeter(1).measure(logits, params)):
        assert stats is not None
        assert (stats.max, stats.min) == (logits[row].max(), logits[row].min())
        assert stats.entropy == pytest.approx(expected[row], abs=1e-9)
        assert stats.temperature == row / 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_has_none(bad: float) -> None:
    logits = torch.zeros(2, 8)
    logits[0, 3] = bad
    bad_row, good_row = LogitsMeter(1).measure(logits, [CoreSamplingParams(max_tokens=1, seed=0)] * 2)
    assert bad_row is None
    assert good_row is not None
    assert good_row.entropy == pytest.approx(math.log(8))


@pytest.mark.parametrize(("interval", "due"), [(1, "1111111"), (2, "1010101"), (3, "1001001")])
def test_how_often(interval: int, due: str) -> None:
    meter = LogitsMeter(interval)
    assert [meter.is_due() for _ in due] == [step == "1" for step in due]
