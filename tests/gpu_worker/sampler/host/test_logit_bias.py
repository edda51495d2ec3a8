from tests.gpu_worker.sampler.host.processing import OneRow


def test_it_is_added_to_its_tokens():
    row = OneRow(logit_bias={3: -100.0, 0: 0.5})
    assert row.apply([1.0, 2.0, 3.0, 4.0]) == [1.5, 2.0, 3.0, -96.0]
    row.append(3)
    assert row.apply([1.0, 2.0, 3.0, 4.0]) == [1.5, 2.0, 3.0, -96.0]
