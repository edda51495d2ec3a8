"""What the sampling of a step measures of logits, against torch, and which tokens a grammar leaves."""

import math

import numpy as np
import pytest
import torch

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.scheduler_output import GrammarOutput
from tokenloom.gpu_worker.sampler.step_sampler import LogitsMeter, allow_only, force


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


def test_only_what_the_bits_allow_is_left() -> None:
    bitmask = np.zeros((2, 3), dtype=np.int32)
    bitmask[0, 0] = 0b101
    bitmask[1, 1] = np.int32(-(1 << 31))  # token 63
    bitmask[1, 2] = 0b11110  # tokens 65 to 68, of which the vocabulary has two
    logits = np.arange(3 * 67, dtype=np.float32).reshape(3, 67)
    untouched = logits[1].copy()
    allow_only(GrammarOutput(["c", "a"], bitmask), ["a", "b", "c"], logits)
    assert np.flatnonzero(np.isfinite(logits[0])).tolist() == [63, 65, 66]
    assert np.flatnonzero(np.isfinite(logits[2])).tolist() == [0, 2]
    assert logits[2, 2] == 2 * 67 + 2
    np.testing.assert_array_equal(logits[1], untouched)


def test_a_grammar_of_a_request_that_another_call_draws_for_is_passed_over() -> None:
    """The device draws for most requests of a step, the host for the rest."""
    bitmask = np.array([[0b1], [0b10]], dtype=np.int32)
    logits = np.zeros((1, 5), dtype=np.float32)
    allow_only(GrammarOutput(["a", "b"], bitmask), ["b"], logits)
    assert np.flatnonzero(np.isfinite(logits[0])).tolist() == [1]


def test_a_forced_token_is_left_whatever_was_forbidden() -> None:
    grammar = GrammarOutput(["b"], np.zeros((1, 1), dtype=np.int32), {"b": 3})
    logits = np.full((2, 5), -np.inf, dtype=np.float32)
    logits[0] = np.nan
    untouched = logits[0].copy()
    force(grammar, ["a", "b"], logits)
    assert np.flatnonzero(np.isfinite(logits[1])).tolist() == [3]
    np.testing.assert_array_equal(logits[0], untouched)
