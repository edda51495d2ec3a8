import math

import pytest

from tokenloom import SamplingParams


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.seed, params.ignore_eos, params.skip_special_tokens) == (16, None, False, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -1),
        ("presence_penalty", 3),
        ("frequency_penalty", math.inf),
        ("repetition_penalty", 0),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("seed", 2**64),
        ("stop", ""),
        ("stop", ["fine", 3]),
        ("stop_token_ids", [-1]),
        ("n", 0),
        ("n", 2),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("min_tokens", 17),
        ("logit_bias", {5: 101}),
        ("allowed_token_ids", []),
        ("bad_words", ["no"]),
    ],
)
def test_a_wrong_or_later_value_is_named(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_stop_strings_need_text():
    with pytest.raises(ValueError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_an_unknown_name_is_a_type_error():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0)


def test_off_and_negative_values():
    wire = SamplingParams(top_k=-1, seed=-1, max_tokens=None).to_wire()
    assert wire.top_k == 0
    assert wire.seed == 2**64 - 1
    assert not wire.HasField("max_tokens")
    assert SamplingParams(stop="a").stop_strings() == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop_strings() == ("a", "b")
