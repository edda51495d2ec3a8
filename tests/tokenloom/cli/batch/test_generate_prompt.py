"""Lines of prompts and of answers."""

import json

import pytest

from tokenloom.cli.batch.generate_prompt import BadLine, PromptLine, answer_line, read_prompt_line
from tokenloom.offline.outputs import CompletionOutput, Logprob, RequestOutput


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
