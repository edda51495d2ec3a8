"""Tokens are aligned to rows of a sound as transformers aligns them."""

import numpy as np
import pytest
import torch
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

from tokenloom.engine_core.data.core_params import CorePoolingParams, PoolingTask
from tokenloom.gpu_worker.pooling.alignment import Aligner, AttendedRows, smoothed, warp


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 1), (1, 9), (7, 7), (9, 40), (30, 12), (17, 300)])
def test_the_path_is_that_of_transformers(num_tokens: int, num_rows: int) -> None:
    for seed in range(5):
        costs = np.random.default_rng(seed).normal(size=(num_tokens, num_rows))
        costs = costs.round(1 if seed % 2 else 8)  # some sums are equal
        tokens, rows = _dynamic_time_warping(costs)
        begins = np.pad(np.diff(tokens), (1, 0), constant_values=1).astype(bool)
        np.testing.assert_array_equal(warp(costs), rows[begins])


def test_weights_are_smoothed_as_there() -> None:
    weights = torch.rand(3, 11, 50, generator=torch.Generator().manual_seed(1))
    deviation = torch.std(weights, dim=-2, keepdim=True, unbiased=False)
    wanted = _median_filter(((weights - weights.mean(-2, keepdim=True)) / deviation)[None], 7)[0].mean(0)
    torch.testing.assert_close(smoothed(weights, 7), wanted)
    assert smoothed(weights[..., :2], 7).shape == (11, 2)


def test_chunks_join_and_skipped_tokens_take_no_part() -> None:
    aligner = Aligner((), (), (), False, None, False, 7)  # type: ignore[arg-type]  # nothing asks what it offers
    weights = torch.rand(3, 11, 50, generator=torch.Generator().manual_seed(1))
    states = AttendedRows()
    for chunk in weights.split(4, dim=1):
        states.add(chunk)
    params = CorePoolingParams(PoolingTask.ALIGN, skipped_tokens=3, aligned_rows=20)
    rows = aligner.finish(states, params)
    assert rows[:3].tolist() == [0.0] * 3
    np.testing.assert_array_equal(rows[3:], warp(-smoothed(weights[:, 3:, :20], 7).double().numpy()))
    assert rows.max() < 20
    none = CorePoolingParams(PoolingTask.ALIGN, skipped_tokens=11)
    assert aligner.finish(states, none).tolist() == [0.0] * 11
