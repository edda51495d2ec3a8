"""Recorded loads: published files, and the shapes that stand for them."""

import json
import statistics
from pathlib import Path

import pytest

from tokenloom.bench.load.arrivals import Pace, arrival_times
from tokenloom.bench.load.datasets import DatasetName, DatasetOptions, Prompt, make_prompts

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:48.1805900,9000,109
2023-11-16 18:15:50.6805900,396,109
2023-11-16 18:15:51.6805900,12,0
2023-11-16 18:15:52.6805900,12,3
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,87,230,317,Conversation log
118,GPT-4,417,0,417,Conversation log
185,ChatGPT,60,7,67,Conversation log
"""


def of_trace(tmp_path: Path, text: str, count: int, **options: float) -> list[Prompt]:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    dataset = DatasetOptions(DatasetName.TRACE, dataset_path=str(path), num_prompts=count, **options)  # type: ignore[arg-type]
    return make_prompts(dataset, 1000)


def lengths(prompts: list[Prompt]) -> list[tuple[int, int]]:
    return [(len(prompt.token_ids), prompt.max_tokens) for prompt in prompts]


def test_a_trace_of_azure_is_read_without_what_failed_or_is_too_long(tmp_path: Path) -> None:
    prompts = of_trace(tmp_path, AZURE, 3, most_tokens=4096, trace_speed=2.0)
    assert lengths(prompts) == [(374, 44), (396, 109), (12, 3)]
    assert [prompt.arrival for prompt in prompts] == pytest.approx([0.0, 2.0, 3.0], abs=1e-5)


def test_a_trace_of_burstgpt_is_read_and_keeps_the_pace_of_the_run_unless_asked(tmp_path: Path) -> None:
    prompts = of_trace(tmp_path, BURSTGPT, 3)
    assert lengths(prompts) == [(472, 18), (87, 230), (60, 7)]
    assert [prompt.arrival for prompt in prompts] == [None] * 3
    timed = of_trace(tmp_path, BURSTGPT, 3, trace_speed=10.0)
    assert arrival_times(3, Pace(), [prompt.arrival for prompt in timed]) == [0.0, 4.0, 18.0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a,b\n1,2\n", "its first line must name the columns TIMESTAMP, ContextTokens, GeneratedTokens or Timestamp"),
        (BURSTGPT + "x,ChatGPT,1,2,3,log\n", "line 6: a time and two numbers of tokens are expected"),
        (BURSTGPT, "has only 3 requests that fit, not 9"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        of_trace(tmp_path, text, 9)


def conversation(*texts: str) -> dict[str, list[dict[str, str]]]:
    return {"conversations": [{"from": "human" if index % 2 else "gpt", "value": t} for index, t in enumerate(texts)]}


def test_conversations_give_the_first_question_and_the_length_of_its_answer(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    kept = [conversation("a" * length, "b" * (length + 1), "more") for length in range(4, 12)]
    others = [conversation("a" * 3, "b" * 9), conversation("a" * 9, "b"), conversation("a" * 1025, "b" * 9)]
    path.write_text(json.dumps([*kept, *others, conversation("a" * 20), conversation("a" * 1020, "b" * 1100)]))
    options = DatasetOptions(DatasetName.SHAREGPT, dataset_path=str(path), num_prompts=8)
    prompts = make_prompts(options, 1000, lambda text: [ord(each) for each in text])
    assert sorted(lengths(prompts)) == [(length, length + 1) for length in range(4, 12)]
    assert {token_id for prompt in prompts for token_id in prompt.token_ids} == {ord("a")}
    with pytest.raises(ValueError, match="--tokenizer must name"):
        make_prompts(options, 1000)
    path.write_text('[{"text": "no conversation"}]')
    with pytest.raises(ValueError, match="no conversations in ShareGPT's format"):
        make_prompts(options, 1000, lambda text: [1])


@pytest.mark.parametrize(
    ("name", "medians", "means"),
    [("azure-conv", (1020, 129), (1155, 211)), ("azure-code", (1469, 13), (2048, 28))],
)
def test_a_shape_has_the_medians_and_nearly_the_means_of_its_record(
    name: str, medians: tuple[int, int], means: tuple[int, int]
) -> None:
    """The means are those of the published files, which the quantiles do not hold."""
    found = list(zip(*lengths(make_prompts(DatasetOptions(DatasetName(name), num_prompts=4000), 100)), strict=True))
    for values, median, mean in zip(found, medians, means, strict=True):
        assert statistics.median(values) == pytest.approx(median, rel=0.1)
        assert statistics.mean(values) == pytest.approx(mean, rel=0.25)
    few = make_prompts(DatasetOptions(DatasetName(name), num_prompts=300, most_tokens=1000), 100)
    assert max(map(sum, lengths(few))) <= 1000


def test_a_file_is_named_where_it_is_read_and_nowhere_else(tmp_path: Path) -> None:
    for options in (DatasetOptions(DatasetName.TRACE), DatasetOptions(dataset_path="x.csv")):
        with pytest.raises(ValueError, match="dataset_path names the file of trace and sharegpt"):
            make_prompts(options, 100)
    missing = DatasetOptions(DatasetName.TRACE, dataset_path=str(tmp_path / "none.csv"))
    with pytest.raises(ValueError, match="cannot be read as a trace: No such file"):
        make_prompts(missing, 100)
