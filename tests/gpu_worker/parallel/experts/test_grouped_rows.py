"""Rows grouped by expert give what one product for each row and expert gives."""

import pytest
import torch

from tokenloom.gpu_worker.parallel.experts.grouped_rows import GroupedRows, mix_experts

CHOSEN = torch.tensor([[5, 2], [2, 7], [5, 0], [2, 5]])


def test_only_experts_with_rows_are_listed() -> None:
    grouped = GroupedRows.sort(CHOSEN)
    assert (grouped.experts, grouped.counts) == ([0, 2, 5, 7], [1, 3, 3, 1])
    assert grouped.order.tolist() == [5, 1, 2, 6, 0, 4, 7, 3]  # in the order of rows within an expert


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_sums_are_those_of_each_row_by_itself(num_tokens: int) -> None:
    torch.manual_seed(0)
    matrices, x, chosen = torch.randn(8, 6, 6), torch.randn(num_tokens, 6), CHOSEN[:num_tokens]
    weights = torch.rand(num_tokens, 2)
    calls: list[tuple[int, int]] = []

    def compute(expert: int, rows: torch.Tensor) -> torch.Tensor:
        calls.append((expert, len(rows)))
        return rows @ matrices[expert].T

    found = mix_experts(x, GroupedRows.sort(chosen), weights, compute)
    expected = torch.stack(
        [sum(weights[t, i] * (matrices[chosen[t, i]] @ x[t]) for i in range(2)) for t in range(num_tokens)]
    )
    torch.testing.assert_close(found, expected)
    assert len(calls) == len(set(chosen.flatten().tolist()))
    assert sum(count for _, count in calls) == 2 * num_tokens


def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    matrices, x, weights = torch.randn(8, 6, 6), torch.randn(4, 6), torch.rand(4, 2)

    def mix(rows: slice) -> torch.Tensor:
        grouped = GroupedRows.sort(CHOSEN[rows])
        # Row by row, as a product of several rows may be rounded otherwise.
        one_by_one = lambda expert, part: torch.stack([matrices[expert] @ row for row in part])  # noqa: E731
        return mix_experts(x[rows], grouped, weights[rows], one_by_one)

    together = mix(slice(None))
    for row in range(4):
        assert torch.equal(mix(slice(row, row + 1))[0], together[row])
