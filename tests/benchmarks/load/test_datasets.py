"""Lengths, kinds and shared beginnings of made-up prompts."""

import msgspec
import pytest

from tokenloom.bench.load.datasets import DatasetName, DatasetOptions, make_prompts

VOCABULARY = 1000


@pytest.mark.parametrize("name", [name for name in DatasetName if name not in ("trace", "sharegpt")])
def test_the_same_options_give_the_same_prompts(name: DatasetName) -> None:
    options = DatasetOptions(name, num_prompts=8, input_len=16, long_input_len=32, prefix_len=8, range_ratio=0.5)
    prompts = make_prompts(options, VOCABULARY)
    assert prompts == make_prompts(options, VOCABULARY)
    assert prompts != make_prompts(msgspec.structs.replace(options, seed=1), VOCABULARY)
    assert all(0 <= token_id < VOCABULARY for prompt in prompts for token_id in prompt.token_ids)


def test_lengths_are_exact_without_a_ratio_and_within_it_else() -> None:
    exact = make_prompts(DatasetOptions(num_prompts=20, input_len=10, output_len=7), VOCABULARY)
    assert {(len(prompt.token_ids), prompt.max_tokens) for prompt in exact} == {(10, 7)}
    varied = make_prompts(DatasetOptions(num_prompts=200, input_len=10, output_len=8, range_ratio=0.5), VOCABULARY)
    assert {len(prompt.token_ids) for prompt in varied} == set(range(5, 16))
    assert {prompt.max_tokens for prompt in varied} == set(range(4, 13))


def test_prefixes_are_shared_in_turn() -> None:
    options = DatasetOptions(DatasetName.SHARED_PREFIX, num_prompts=6, input_len=4, prefix_len=32, num_prefixes=2)
    prompts = make_prompts(options, VOCABULARY)
    prefixes = [tuple(prompt.token_ids[:32]) for prompt in prompts]
    assert prefixes[0] == prefixes[2] == prefixes[4] != prefixes[1] == prefixes[3] == prefixes[5]
    assert len({tuple(prompt.token_ids[32:]) for prompt in prompts}) == 6


def test_a_mixed_load_has_its_share_of_long_prompts() -> None:
    options = DatasetOptions(
        DatasetName.MIXED,
        num_prompts=40,
        input_len=8,
        output_len=9,
        long_share=0.25,
        long_input_len=100,
        long_output_len=3,
    )
    prompts = make_prompts(options, VOCABULARY)
    assert sorted(prompt.kind for prompt in prompts) == ["chat"] * 30 + ["long"] * 10
    assert [prompt.kind for prompt in prompts] != sorted(prompt.kind for prompt in prompts)
    sizes = {prompt.kind: (len(prompt.token_ids), prompt.max_tokens) for prompt in prompts}
    assert sizes == {"chat": (8, 9), "long": (100, 3)}


@pytest.mark.parametrize("values", [{"num_prompts": 0}, {"input_len": 0}, {"range_ratio": 1.5}, {"long_share": -0.1}])
def test_senseless_options_are_named(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        make_prompts(msgspec.structs.replace(DatasetOptions(), **values), VOCABULARY)


def test_a_tiny_vocabulary_still_has_tokens() -> None:
    assert make_prompts(DatasetOptions(num_prompts=1, input_len=50), 3)[0].token_ids.count(1) > 0
    with pytest.raises(ValueError, match="vocabulary of 1"):
        make_prompts(DatasetOptions(), 1)


@pytest.mark.parametrize(
    "options", [{"num_prompts": 2**62}, {"input_len": 2**31}, {"num_prefixes": 2**31}, {"long_input_len": 2**31}]
)
def test_more_tokens_than_a_machine_holds_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="ask for less"):
        make_prompts(DatasetOptions(**options), VOCABULARY)  # type: ignore[arg-type]
