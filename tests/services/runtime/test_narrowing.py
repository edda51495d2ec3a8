"""Plain values into sampling parameters."""

import math

import pytest

from tokenloom.services.runtime.errors import InvalidArgument
from tokenloom.services.runtime.narrowing import narrow_sampling, narrow_token_ids
from tokenloom.services.runtime.validation import check_sampling
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
    ],
)
def test_special_values(name: str, value: object, narrowed: object) -> None:
    params = narrow_sampling({name: value})
    assert params.HasField(name)
    assert getattr(params, name) == narrowed


NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
INTEGERS = ["max_tokens", "top_k", "seed"]


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


LATER = ["min_tokens", "logprobs", "prompt_logprobs", "logit_bias", "allowed_token_ids", "bad_words"]


@pytest.mark.parametrize("name", LATER)
def test_later_parameters_are_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} is not supported yet") as caught:
        narrow_sampling({name: 3})
    assert caught.value.field == name


def test_later_parameters_that_ask_for_nothing() -> None:
    values = {"min_tokens": 0, "logit_bias": {}, "allowed_token_ids": [], "bad_words": [], "logprobs": False}
    assert narrow_sampling(values) == SamplingParams()
    for name in ("min_tokens", "bad_words"):  # falsy, but of no type that asks for nothing
        with pytest.raises(InvalidArgument):
            narrow_sampling({name: ""})
    for name in ("logprobs", "prompt_logprobs"):  # zero alternatives are one log probability still
        with pytest.raises(InvalidArgument):
            narrow_sampling({name: 0})


def test_unknown_names() -> None:
    with pytest.raises(InvalidArgument) as caught:
        narrow_sampling({"beam_width": 4})
    assert caught.value.field == "beam_width"


@pytest.mark.parametrize("value", ["abc", 5, None, [-1], [2**32], [1.0], ["1"], [True], [[1]], {"1": 1}])
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
