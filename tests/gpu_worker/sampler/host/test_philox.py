"""Known answers of the Random123 distribution, and uniformity."""

import numpy as np
import pytest

from tokenloom.gpu_worker.sampler.host.sampler import Purpose, philox, uniform


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter, key, expected):
    words = philox(np.array(counter, dtype=np.uint64)[:, None], np.array(key, dtype=np.uint64)[:, None])
    assert tuple(words[:, 0].tolist()) == expected


def test_a_number_does_not_depend_on_its_neighbours():
    seeds = np.array([7, 2**64 - 1, 7, 0], dtype=np.uint64)
    indices = np.array([0, 5, 2**33, 1], dtype=np.uint64)
    together = uniform(seeds, indices, Purpose.SAMPLE)
    alone = [uniform(seeds[i : i + 1], indices[i : i + 1], Purpose.SAMPLE)[0] for i in range(4)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_numbers_are_uniform_over_indices_and_over_seeds():
    many, one = np.arange(100_000, dtype=np.uint64), np.full(100_000, 42, dtype=np.uint64)
    for numbers in (uniform(one, many, Purpose.SAMPLE), uniform(many, one, Purpose.SAMPLE)):
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 149.4  # chi-square, 99 degrees of freedom, 0.1 %
