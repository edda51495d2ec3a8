import math

import pytest

from tokenloom import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams


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
        ("n", True),
        ("n", 129),
        ("logprobs", -2),
        ("logprobs", "all"),
        ("prompt_logprobs", 1.5),
        ("min_tokens", -1),
        ("logit_bias", {5: 101.0}),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", [5]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", ["a"]),
        ("logprob_token_ids", [1]),
        ("bad_words", "no"),
        ("bad_words", ["fine", " "]),
        ("bad_words", ["a" * 1025]),
        ("bad_words", ["a"] * 513),
        ("bad_words", [3]),
        ("repetition_detection", RepetitionDetectionParams(max_pattern_size=2, min_count=1)),
        ("repetition_detection", RepetitionDetectionParams(max_pattern_size=2, min_pattern_size=3, min_count=2)),
        ("structured_outputs", StructuredOutputsParams()),
        ("structured_outputs", StructuredOutputsParams(regex="a", choice=["b"])),
        ("structured_outputs", StructuredOutputsParams(choice=[3])),
        ("skip_reading_prefix_cache", 1),
        ("output_kind", "delta"),
        ("stream_interval", 0),
        ("stream_interval", 2**32),
        ("thinking_token_budget", -1),
        ("thinking_token_budget", 1.5),
        ("extra_args", 5),
        ("extra_args", {"a": object()}),
        ("extra_args", {"a": float("nan")}),
        ("extra_args", {"a": "x" * 70_000}),
        ("min_tokens", 17),
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
    assert SamplingParams(stop="a").stop_strings() == ["a"]
    assert SamplingParams(stop=["a", "b"]).stop_strings() == ["a", "b"]


def test_greedy_samples_would_be_equal():
    with pytest.raises(ValueError, match="n must be 1"):
        SamplingParams(n=2, temperature=0.0)


def test_what_the_engine_is_asked():
    params = SamplingParams(
        logprobs=-1,
        prompt_logprobs=0,
        logprob_token_ids=[7],
        min_tokens=3,
        logit_bias={5: -1.0},
        allowed_token_ids=[5, 7],
        bad_words=["no"],
        repetition_detection=RepetitionDetectionParams(max_pattern_size=4, min_count=3),
        skip_reading_prefix_cache=True,
    )
    wire = params.to_wire()
    assert (wire.logprobs, wire.HasField("prompt_logprobs"), wire.prompt_logprobs) == (2**32 - 1, True, 0)
    assert (list(wire.logprob_token_ids), wire.min_tokens, dict(wire.logit_bias)) == ([7], 3, {5: -1.0})
    assert (list(wire.allowed_token_ids), list(wire.bad_words)) == ([5, 7], [])
    detection = wire.repetition_detection
    assert (detection.min_pattern_size, detection.max_pattern_size, detection.min_count) == (1, 4, 3)
    assert wire.skip_reading_prefix_cache
    assert (
        not SamplingParams(repetition_detection=RepetitionDetectionParams()).to_wire().HasField("repetition_detection")
    )
