"""The poison matrix of the one validator: every field, every value that ever broke an engine."""

import math

import pytest

from tokenloom.request import validation
from tokenloom.request.errors import InvalidArgument
from tokenloom.request.sampling_params import SamplingFields
from tokenloom.v1.types_pb2 import ModelLimits, RepetitionDetection, SamplingParams, TokenIds

LIMITS = ModelLimits(max_model_len=100, vocab_size=50)


def refused(field: str, token_ids: list[int] | None = None, *, stop: tuple[str, ...] = (), **params: object) -> str:
    with pytest.raises(InvalidArgument) as caught:
        validation.check_generate([1] if token_ids is None else token_ids, SamplingParams(**params), LIMITS, stop=stop)
    assert caught.value.field == field
    assert field in caught.value.message
    return caught.value.message


def accepted(token_ids: list[int] | None = None, *, stop: tuple[str, ...] = (), **params: object) -> None:
    validation.check_generate([1] if token_ids is None else token_ids, SamplingParams(**params), LIMITS, stop=stop)


def words(*sequences: list[int]) -> list[TokenIds]:
    return [TokenIds(ids=ids) for ids in sequences]


def detection(longest: int, shortest: int, count: int) -> RepetitionDetection:
    return RepetitionDetection(max_pattern_size=longest, min_pattern_size=shortest, min_count=count)


FLOATS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -3.0, 1e39, 1e300])
def test_floats_that_are_never_right(name: str, value: float) -> None:
    refused(name, **{name: value})


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("temperature", [0, 1e-4, 2, 1000], [-0.1, 1e-7]),
        ("top_p", [0.001, 1], [0, 1.01]),
        ("min_p", [0, 0.5, 1], [-0.01, 1.01]),
        ("presence_penalty", [-2, 0, 2], [-2.01, 2.01]),
        ("frequency_penalty", [-2, 0, 2], [-2.01, 2.01]),
        ("repetition_penalty", [0.01, 1, 5], [0, -1]),
        ("top_k", [0, 1, 50, 2**32 - 1], []),
        ("seed", [0, 2**64 - 1], []),
        ("max_tokens", [1, 99], [0, 100, 101, 2**32 - 1]),
        ("stop_token_ids", [[0], [49], []], [[50], [2**32 - 1], [0] * 1025]),
        ("min_tokens", [0, 1, 2**32 - 1], []),
        ("logprobs", [0, 20], [21, 2**32 - 1]),
        ("prompt_logprobs", [0, 20], [21, 2**32 - 1]),
        ("logit_bias", [{}, {0: 100, 49: -100}], [{50: 1}, {1: 100.1}, {1: -101}, {1: math.nan}, {1: -math.inf}]),
        ("allowed_token_ids", [[], [0, 49], [1] * 50], [[50], [1] * 51]),
        ("bad_words", [words([1, 2], [49])], [words([]), words([50]), words([1] * 129), words(*[[1]] * 1025)]),
        (
            "repetition_detection",
            [detection(1, 1, 2), detection(1024, 1, 1024)],
            [
                detection(2, 3, 2),
                detection(1, 0, 2),
                detection(0, 0, 2),
                detection(1, 1, 1),
                detection(1025, 1, 2),
                detection(1, 1, 1025),
            ],
        ),
        ("skip_reading_prefix_cache", [True], []),
    ],
)
def test_ranges(name: str, right: list[object], wrong: list[object]) -> None:
    for value in right:
        accepted(**{name: value})
    for value in wrong:
        refused(name, **{name: value})


def test_the_engines_limit_decides_how_many_logprobs() -> None:
    def check(asked: int, most: int) -> None:
        limits = ModelLimits(max_model_len=100, vocab_size=50, max_logprobs=most)
        validation.check_sampling(SamplingParams(logprobs=asked), limits)

    check(0, 0)
    check(30, 30)
    check(2**32 - 1, 50)  # all of the vocabulary
    for asked, most in ((1, 0), (31, 30), (2**32 - 1, 49)):
        with pytest.raises(InvalidArgument, match=f"from 0 to {most}, not"):
            check(asked, most)


def test_tokens_to_tell_need_logprobs() -> None:
    accepted(logprobs=0, logprob_token_ids=[0, 49])
    refused("logprob_token_ids", logprob_token_ids=[1])
    refused("logprob_token_ids", logprobs=0, logprob_token_ids=[50])
    refused("logprob_token_ids", logprobs=0, logprob_token_ids=[1] * 21)


def test_min_tokens_leaves_room() -> None:
    accepted(min_tokens=5, max_tokens=5)
    refused("min_tokens", min_tokens=6, max_tokens=5)


def test_samples() -> None:
    validation.check_samples(1, 1024)
    validation.check_samples(128, 8)
    for n, num_prompts in ((0, 1), (-1, 1), (129, 1), (128, 9), (2, 1024)):
        with pytest.raises(InvalidArgument) as caught:
            validation.check_samples(n, num_prompts)
        assert caught.value.field == "n"


def test_samples_that_would_be_equal_are_refused() -> None:
    validation.check_sampling(SamplingParams(temperature=0.0), LIMITS, 1)
    validation.check_sampling(SamplingParams(), LIMITS, 2)
    with pytest.raises(InvalidArgument, match="n must be 1 with temperature 0"):
        validation.check_sampling(SamplingParams(temperature=0.0), LIMITS, 2)


def test_defaults_are_right() -> None:
    accepted()


def test_prompts() -> None:
    accepted([0, 49])
    accepted([1] * 99)
    assert "empty" in refused("prompt", [])
    assert "50" in refused("prompt", [1, 50, 2])
    refused("prompt", [-1])
    refused("prompt", [2**31])
    assert "100" in refused("prompt", [1] * 100)  # no room for an answer
    refused("prompt", [1] * 101)


def test_prompt_and_max_tokens_share_the_context() -> None:
    accepted([1] * 60, max_tokens=40)
    assert "at most 40" in refused("max_tokens", [1] * 60, max_tokens=41)


def test_stop_strings() -> None:
    accepted(stop=("a", "\n"))
    accepted(stop=("a",) * 16)
    refused("stop", stop=("a", ""))
    refused("stop", stop=("a",) * 17)
    refused("stop", stop=("a" * 1025,))


def test_accepted_tokens_are_checked_too() -> None:
    check = validation.check_generate
    check([1] * 60, SamplingParams(max_tokens=40), LIMITS, accepted_token_ids=[1] * 40)
    for token_ids in ([50], [1] * 41):
        with pytest.raises(InvalidArgument) as caught:
            check([1] * 60, SamplingParams(), LIMITS, accepted_token_ids=token_ids)
        assert caught.value.field == "accepted_token_ids"


def test_structured_outputs_have_limits() -> None:
    accepted(structured_outputs={"json_object": True})
    assert "is empty" in refused("structured_outputs", structured_outputs={"regex": ""})


def test_every_parameter_is_checked_or_refused() -> None:
    """Every field of the contract is a row of the table, or a rule of its own checks it."""
    of_other_form = {"bad_words", "structured_outputs", "transcript"}
    assert of_other_form < set(validation._OWN_RULES)
    fields = {field.name for field in SamplingParams.DESCRIPTOR.fields}
    assert fields == {*SamplingFields.__struct_fields__, *of_other_form}


@pytest.mark.parametrize(
    ("prompt_len", "chat", "filled"), [(10, False, 16), (10, True, 90), (95, False, 5), (95, True, 5), (100, True, 1)]
)
def test_fill_max_tokens(prompt_len: int, chat: bool, filled: int) -> None:
    params = SamplingParams()
    validation.fill_max_tokens(params, prompt_len, LIMITS, chat=chat)
    assert params.max_tokens == filled


@pytest.mark.parametrize(("prompt_len", "default", "filled"), [(10, 20, 20), (10, 100_000, 90), (99, 20, 1)])
def test_a_models_own_max_tokens_never_exceeds_the_context(prompt_len: int, default: int, filled: int) -> None:
    for chat in (False, True):
        params = SamplingParams()
        validation.fill_max_tokens(params, prompt_len, LIMITS, chat=chat, default=default)
        assert params.max_tokens == filled


def test_fill_max_tokens_leaves_what_is_set() -> None:
    params = SamplingParams(max_tokens=3)
    validation.fill_max_tokens(params, 10, LIMITS, chat=True)
    assert params.max_tokens == 3
