"""Plain values into sampling parameters."""

import math

import pytest

from tokenloom.request.errors import InvalidArgument
from tokenloom.request.narrowing import narrow_sampling, narrow_token_ids
from tokenloom.request.validation import check_sampling
from tokenloom.v1.types_pb2 import ModelLimits, SamplingParams


def test_what_is_unset_stays_unset() -> None:
    assert narrow_sampling({"temperature": None, "seed": None, "logprobs": None}) == SamplingParams()
    assert narrow_sampling({}) == SamplingParams()


def test_all_fields() -> None:
    values = {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 1,
        "top_k": 3,
        "min_p": 0.25,
        "seed": 9,
        "presence_penalty": -1,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.25,
        "stop_token_ids": [1, 2],
        "min_tokens": 2,
        "logprobs": 4,
        "prompt_logprobs": 0,
        "logprob_token_ids": [3],
        "logit_bias": {4: -1.5},
        "allowed_token_ids": [5, 6],
        "repetition_detection": {"max_pattern_size": 8, "min_pattern_size": 2, "min_count": 3},
        "skip_reading_prefix_cache": True,
    }
    assert narrow_sampling(values) == SamplingParams(**values)


@pytest.mark.parametrize(
    ("name", "value", "narrowed"),
    [
        ("top_k", -1, 0),
        ("top_k", 0, 0),
        ("seed", -1, 2**64 - 1),
        ("seed", -(2**63), 2**63),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("seed", 0, 0),
        ("temperature", 0, 0.0),
        ("temperature", 1e-9, 0.0),
        ("max_tokens", 5.0, 5),
        ("logprobs", 0, 0),
        ("logprobs", -1, 2**32 - 1),
        ("prompt_logprobs", -1, 2**32 - 1),
    ],
)
def test_special_values(name: str, value: object, narrowed: object) -> None:
    params = narrow_sampling({name: value})
    assert params.HasField(name)
    assert getattr(params, name) == narrowed


NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
INTEGERS = ["max_tokens", "top_k", "seed", "min_tokens"]


@pytest.mark.parametrize("name", NUMBERS + INTEGERS)
@pytest.mark.parametrize("value", [True, False, "1", "", [1], {}, b"1"])
def test_wrong_types(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        narrow_sampling({name: value})
    assert caught.value.field == name


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [0.5, math.nan, math.inf, 10**400, -(10**400), 2**64, -(2**63) - 1])
def test_what_no_integer_can_be(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        narrow_sampling({name: value})
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("name", "value"), [("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 2**32), ("top_k", -2), ("top_k", 2**32)]
)
def test_integers_out_of_range(name: str, value: int) -> None:
    with pytest.raises(InvalidArgument) as caught:
        narrow_sampling({name: value})
    assert caught.value.field == name


def test_a_number_too_large_for_a_float() -> None:
    with pytest.raises(InvalidArgument):
        narrow_sampling({"temperature": 10**400})
    assert narrow_sampling({"temperature": 1e300}).temperature == math.inf  # for the validator to refuse


def test_what_asks_for_nothing() -> None:
    values = {"min_tokens": 0, "logit_bias": {}, "logprobs": False}
    values |= {"repetition_detection": {"max_pattern_size": 0}}
    assert narrow_sampling(values) == SamplingParams()


def test_keys_of_json_are_token_ids() -> None:
    assert dict(narrow_sampling({"logit_bias": {"50256": -100, "7": 1}}).logit_bias) == {50256: -100.0, 7: 1.0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("logprobs", value) for value in (True, -2, "5", 1.5, 2**32, [])),
        *(("prompt_logprobs", value) for value in (True, -2, {}, 10**400)),
        *(("logit_bias", {key: 1}) for key in ("", "a", "-1", "1.0", "\u0665", "9" * 5000, 1.0, True, 2**32, None)),
        *(("logit_bias", value) for value in ([], "1", {"1": "2"}, {"1": True}, {"1": None}, {"1": [2]})),
        *(("allowed_token_ids", value) for value in ([], (), "1", [True], [-1], {})),
        *(("logprob_token_ids", value) for value in ("1", [1.5], [2**32])),
        *(("repetition_detection", value) for value in (5, [], {"size": 1}, {"min_count": -1}, {"min_count": "2"})),
        *(("skip_reading_prefix_cache", value) for value in (1, 0, "true", [])),
    ],
)
def test_wrong_shapes(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        narrow_sampling({name: value})
    assert caught.value.field in (name, "min_count")


def test_unknown_names() -> None:
    with pytest.raises(InvalidArgument) as caught:
        narrow_sampling({"beam_width": 4})
    assert caught.value.field == "beam_width"


def test_token_ids_may_be_written_as_floats() -> None:
    assert narrow_token_ids("prompt", [1, 2.0, 2.0**32 - 1]) == [1, 2, 2**32 - 1]


@pytest.mark.parametrize("value", ["abc", 5, None, [-1], [2**32], [1.5], ["1"], [True], [[1]], {"1": 1}])
def test_token_ids_refused(value: object) -> None:
    with pytest.raises(InvalidArgument) as caught:
        narrow_token_ids("prompt", value)
    assert caught.value.field == "prompt"


def test_token_ids() -> None:
    assert narrow_token_ids("prompt", (0, 2**32 - 1)) == [0, 2**32 - 1]
    assert narrow_token_ids("prompt", []) == []


def test_the_lowest_temperature_survives_the_wire() -> None:
    limits = ModelLimits(max_model_len=100, vocab_size=50)
    check_sampling(narrow_sampling({"temperature": 1e-5}), limits)
