"""The order of answers, with an engine that ends prompts as the test wants."""

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.cli.batch import generate_run
from tokenloom.cli.batch.generate_run import BadLine, PromptLine, answer_line, read_prompt_line
from tokenloom.offline.outputs import CompletionOutput, Logprob, RequestOutput
from tokenloom.offline.sampling_params import SamplingParams


class FakeLLM:
    """Ends in-flight prompts in the order that `picks` draw."""

    def __init__(self, picks: Iterator[int]) -> None:
        self._picks = picks
        self.live: list[str] = []
        self.most = 0
        self._count = 0

    def enqueue(self, prompt: Any, params: SamplingParams) -> str:
        self._count += 1
        self.live.append(str(self._count))
        self.most = max(self.most, len(self.live))
        return self.live[-1]

    def next_finished(self) -> list[RequestOutput]:
        if not self.live:
            return []
        ended = self.live.pop(next(self._picks, 0) % len(self.live))
        return [RequestOutput(ended, None, [1], [CompletionOutput(0, ended, [2])], True)]


@given(
    num_lines=st.integers(0, 40),
    wrong=st.sets(st.integers(1, 40)),
    picks=st.lists(st.integers(0, 100), max_size=60),
    limits=st.tuples(st.integers(1, 8), st.integers(1, 12)),
)
def test_answers_come_in_the_order_of_their_lines(
    num_lines: int, wrong: set[int], picks: list[int], limits: tuple[int, int]
) -> None:
    llm: Any = FakeLLM(iter(picks))
    lines = [(number, "{" if number in wrong else '"x"') for number in range(1, num_lines + 1)]
    done: list[dict[str, Any]] = []
    run = SimpleNamespace(IN_FLIGHT=generate_run.IN_FLIGHT, UNWRITTEN=generate_run.UNWRITTEN)
    generate_run.IN_FLIGHT, generate_run.UNWRITTEN = limits
    try:
        answers = list(generate_run.generate_lines(llm, lines, {}, 0, done.append))
    finally:
        generate_run.IN_FLIGHT, generate_run.UNWRITTEN = run.IN_FLIGHT, run.UNWRITTEN
    assert [answer["id"] for answer in answers] == list(range(1, num_lines + 1))
    assert {answer["id"] for answer in answers if "error" in answer} == wrong & set(range(1, num_lines + 1))
    assert sorted(answer["id"] for answer in done) == list(range(1, num_lines + 1))
    assert llm.most <= min(limits)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('"Hi"', PromptLine(7, "Hi")),
        ('{"prompt": "Hi"}', PromptLine(7, {"prompt": "Hi"})),
        ('{"id": "a", "prompt_token_ids": [1, 2]}', PromptLine("a", {"prompt_token_ids": [1, 2]})),
        ('{"messages": [], "metadata": {"k": 1}}', PromptLine(7, None, [], {}, {"k": 1})),
    ],
)
def test_every_form(line: str, expected: PromptLine) -> None:
    assert read_prompt_line(7, line) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "a string or an object"),
        ("{}", "needs exactly one of prompt"),
        ('{"prompt": "a", "messages": []}', "needs exactly one of prompt"),
        ('{"propmt": "a"}', "'propmt' is unknown"),
        ('{"prompt": "a", "id": []}', "id must be"),
        ('{"prompt": "a", "sampling_params": 1}', "sampling_params must be"),
        ('{"messages": "a"}', "messages must be"),
    ],
)
def test_what_is_wrong_is_said_with_the_line(line: str, message: str) -> None:
    with pytest.raises(BadLine, match=message) as caught:
        read_prompt_line(7, line)
    assert "line 7" in str(caught.value)
    assert caught.value.id == 7


def test_a_lines_own_parameters_come_first() -> None:
    line = PromptLine(1, "a", sampling={"top_k": 3, "seed": 9, "structured_outputs": {"regex": "a+"}})
    params = line.sampling_params({"max_tokens": 5, "top_k": 2}, seed=4)
    assert (params.max_tokens, params.top_k, params.seed) == (5, 3, 9)
    assert params.to_wire().structured_outputs.regex == "a+"
    for wrong in ({"topk": 3}, {"top_k": -7}, {"structured_outputs": {"regx": ""}}):
        with pytest.raises(ValueError):
            PromptLine(1, "a", sampling=wrong).sampling_params({}, seed=0)


def test_an_answer_tells_samples_usage_and_metadata() -> None:
    logprobs = [{5: Logprob(-0.5, 1, "x")}]
    samples = [
        CompletionOutput(0, "x", [5], -0.5, logprobs, "stop"),
        CompletionOutput(1, "yz", [6, 7], finish_reason="length"),
    ]
    answer = answer_line(PromptLine("a", "p", metadata=[1]), RequestOutput("0", "p", [1, 2, 3], samples, True))
    assert json.loads(json.dumps(answer)) == {
        "id": "a",
        "outputs": [
            {
                "index": 0,
                "text": "x",
                "token_ids": [5],
                "finish_reason": "stop",
                "stop_reason": None,
                "cumulative_logprob": -0.5,
                "logprobs": [{"5": {"logprob": -0.5, "rank": 1}}],
            },
            {"index": 1, "text": "yz", "token_ids": [6, 7], "finish_reason": "length", "stop_reason": None},
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 3},
        "metadata": [1],
    }
