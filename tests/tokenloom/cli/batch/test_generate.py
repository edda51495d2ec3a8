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


BAD_LINES = (
    '{"id": 1, "prompt": "a", "sampling_params": {"structured_outputs": {"regex": "("}}}',
    '{"id": 2, "prompt": "a", "sampling_params": {"structured_outputs": 5}}',
    '{"id": 3, "prompt": "\\ud83d"}',
    '{"id": 4, "messages": [{"role": "user", "content": 5}]}',
    '{"id": 5, "messages": [{"role": "user", "content": {"text": "a"}}]}',
    '{"id": 6, "messages": [7]}',
    '{"id": 7, "prompt": "a", "sampling_params": {"stop": ["\\ud83d"]}}',
    '{"id": 8, "prompt": "a", "sampling_params": {"temperature": "hot"}}',
    '{"id": 9, "prompt_token_ids": [1e999]}',
    '{"id": 10, "prompt": "a", "metadata": ' + "[" * 5000 + "]" * 5000 + "}",
    "[" * 100_000,
    '{"id": 12, "prompt": "\udcff"}',
    '{"id": 13, "prompt": "a", "sampling_params": {"bad_words": [1]}}',
)


def test_a_bad_line_ends_no_run_and_harms_no_neighbour(tmp_path: Path) -> None:
    """Whatever is wrong with lines, all of them are answered, in order, and the same command finds nothing to do."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line for bad in BAD_LINES for line in (bad, '"good"')]
    source.write_bytes("".join(f"{line}\n" for line in lines).encode(errors="surrogateescape"))
    result = run(source, target, "--max-tokens", 2, "--temperature", 0)
    assert result.exit_code == 1
    assert f"{len(BAD_LINES)} lines failed" in result.stderr
    answers = read(target)
    assert ["error" in answer for answer in answers] == [True, False] * len(BAD_LINES)
    assert not any("internal" in answer["error"]["message"] for answer in answers[::2]), "each is expected"
    assert len({answer["outputs"][0]["text"] for answer in answers[1::2]}) == 1
    assert (
        run(source, target, "--max-tokens", 2).stderr
        == f"all {len(lines)} prompts already have an answer in {target}\n"
    )


def test_ids_and_metadata_come_back_whatever_they_hold(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"id": "\\ud83d", "prompt": "a", "metadata": "\\ud83d"}\n{"id": "é", "prompt": "a"}\n')
    assert run(source, target, "--max-tokens", 2).exit_code == 0
    first, second = read(target)
    assert (first["id"], first["metadata"], second["id"]) == ("\ud83d", "\ud83d", "é")
    assert "é" in target.read_text(), "as text where it can be written"
    assert run(source, target).exit_code == 0


def test_old_answers_stay_until_there_is_a_new_one(prompts: Path, tmp_path: Path) -> None:
    target = write(tmp_path / "out.jsonl", [{"id": "p0", "outputs": []}])
    old = target.read_text()
    result = run(prompts, target, "--overwrite", "--model", str(tmp_path / "nowhere"))
    assert result.exit_code == 1
    assert target.read_text() == old
    assert run(tmp_path / "nothing.jsonl", target, "--overwrite").exit_code == 1
    assert target.read_text() == old
    assert run(prompts, target, "--overwrite").exit_code == 0
    assert len(read(target)) == len(PROMPTS)


@pytest.mark.parametrize("options", [(), ("--overwrite",)])
def test_answers_do_not_replace_their_prompts(prompts: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    link = tmp_path / "link.jsonl"
    link.symlink_to(prompts)
    text = prompts.read_text()
    result = run(prompts, link, *options)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "is the file of prompts" in result.stderr
    assert prompts.read_text() == text
