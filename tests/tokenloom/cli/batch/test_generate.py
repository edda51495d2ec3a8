"""``tokenloom generate`` on the demo model."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tokenloom.cli.main import app

PROMPTS = [
    {"id": f"p{index}", "prompt": f"Once upon a time {index}", "sampling_params": {"max_tokens": 12 - index}}
    for index in range(6)
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "in.jsonl", PROMPTS)


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(*arguments: object) -> Result:
    engine = ("--max-model-len", "256", "--kv-cache-memory-bytes", "4000000")
    return CliRunner().invoke(app, ["generate", *map(str, arguments), *engine])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_that_was_killed_goes_on_and_says_the_same(prompts: Path, tmp_path: Path) -> None:
    whole, torn = tmp_path / "whole.jsonl", tmp_path / "torn.jsonl"
    assert run(prompts, whole, "--seed", 5).exit_code == 0
    assert [line["id"] for line in read(whole)] == [prompt["id"] for prompt in PROMPTS], "in the order of the prompts"
    assert [line["usage"]["completion_tokens"] for line in read(whole)] == [12, 11, 10, 9, 8, 7]
    text = whole.read_text()
    torn.write_text(text[: text.index('"p3"') + 20])
    kept = torn.read_text().rpartition("\n")[0]
    result = run(prompts, torn, "--seed", 5)
    assert result.exit_code == 0, result.output
    assert torn.read_text() == text
    assert text.startswith(kept)
    assert "all 6 prompts already have an answer" in run(prompts, torn).stderr


def test_a_wrong_line_has_an_error_and_the_others_their_answers(tmp_path: Path) -> None:
    lines = [
        {"id": "long", "prompt_token_ids": [1] * 300},
        "Hello",
        {"id": "chat", "messages": [{"role": "user", "content": "What is prefill?"}]},
    ]
    source = write(tmp_path / "in.jsonl", [*lines, {"prompt": "a", "sampling_params": {"top_k": -5}}, {"id": "b"}])
    result = run(source, tmp_path / "out.jsonl", "--temperature", 0, "--max-tokens", 40)
    assert result.exit_code == 1
    assert "3 lines failed" in result.stderr
    long, hello, chat, top_k, empty = read(tmp_path / "out.jsonl")
    assert "300" in long["error"]["message"]
    assert (hello["id"], len(hello["outputs"])) == (2, 1)
    assert chat["outputs"][0]["text"].startswith("Prefill is the first step")
    assert "top_k" in top_k["error"]["message"]
    assert (empty["id"], top_k["id"]) == ("b", 4)


def test_answers_to_other_prompts_are_not_continued(prompts: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "out.jsonl", [{"id": "x"}])
    result = run(prompts, other)
    assert result.exit_code == 1
    assert "holds answers to other prompts (first at line 1)" in result.stderr
    more = write(tmp_path / "more.jsonl", [{"id": prompt["id"]} for prompt in [*PROMPTS, PROMPTS[0]]])
    assert "past the end" in run(prompts, more).stderr


def test_prompts_may_be_piped(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["generate", "-", "--max-tokens", "3"], input='"Hi"\n')
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["usage"]["completion_tokens"] == 3
