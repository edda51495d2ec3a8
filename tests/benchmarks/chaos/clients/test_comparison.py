"""The first difference between two answers, in words."""

from dataclasses import replace

import pytest

from benchmarks.chaos.clients.answer import Answer, Sample
from benchmarks.chaos.clients.comparison import difference

SAMPLE = Sample([1, 2, 3], "abc", "stop", "x", [-0.5, -1.0, -2.0], [["f", "{}"]])


def answer(**changes: object) -> Answer:
    return Answer({0: replace(SAMPLE, **changes)}, 3)  # type: ignore[arg-type]


def test_equal_answers() -> None:
    assert difference(answer(), answer(), 0.0) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": [1, 9, 3]}, "token 1 is 9 instead of 2"),
        ({"token_ids": [1, 2]}, "2 tokens instead of 3, equal as far as both go"),
        ({"token_ids": [1, 2, 3, 3]}, "4 tokens instead of 3"),
        ({"text": "abbc"}, "text 'abbc' instead of 'abc' at character 2"),
        ({"finish_reason": None}, "finish_reason None instead of 'stop'"),
        ({"stop_reason": None}, "stop_reason None instead of 'x'"),
        ({"tool_calls": [["f", "{}{}"]]}, "tool_calls"),
        ({"logprobs": [-0.5, -1.0]}, "2 log probabilities instead of 3"),
        ({"logprobs": [-0.5, -1.2, -2.0]}, "log probability 1 is -1.2000 instead of -1.0000"),
        ({"logprobs": [-0.5, float("nan"), -2.0]}, "log probability 1 is nan"),
    ],
)
def test_differences(changes: dict[str, object], words: str) -> None:
    found = difference(answer(), answer(**changes), 0.1)
    assert found is not None
    assert words in found


def test_log_probabilities_may_differ_a_little() -> None:
    assert difference(answer(), answer(logprobs=[-0.5, -1.04, -2.0]), 0.05) is None


def test_a_missing_sample_and_another_usage() -> None:
    assert difference(answer(), Answer({}, 3), 0.0) == "samples [] instead of [0]"
    assert difference(answer(), Answer(answer().samples, 4), 0.0) == "usage counts 4 tokens instead of 3"
