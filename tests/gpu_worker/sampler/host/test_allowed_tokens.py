from tests.gpu_worker.sampler.host.processing import OneRow


def test_nothing_else_may_be_drawn():
    row = OneRow(allowed_token_ids=(4, 1))
    assert row.apply([1.0, 2.0, 3.0, 4.0, 5.0]) == [float("-inf"), 2.0, float("-inf"), float("-inf"), 5.0]
    row.append(4)
    assert row.masked(5) == {0, 2, 3}
