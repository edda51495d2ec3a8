from hypothesis import given
from hypothesis import strategies as st

from tokenloom.request.sampling_params import sample_seed

SEEDS = st.integers(0, 2**64 - 1)


@given(seed=SEEDS)
def test_the_first_sample_draws_as_a_single_one(seed: int) -> None:
    assert sample_seed(seed, 0) == seed


@given(seed=SEEDS)
def test_samples_draw_apart(seed: int) -> None:
    seeds = [sample_seed(seed, index) for index in range(128)]
    assert len(set(seeds)) == 128
    assert all(0 <= each < 2**64 for each in seeds)


def test_it_is_splitmix64() -> None:
    # The first outputs of the published generator for seed 0.
    assert [sample_seed(0, index) for index in (1, 2, 3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]
