"""``tokenloom run-batch``: files, counts and statuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.tokenloom.cli.fake_server import FakeServer
from tokenloom.cli.main import app


def test_failures_are_counted_and_a_second_run_asks_only_what_is_missing(server: FakeServer, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    made = [{"custom_id": id, "url": "/v1/completions", "body": {"prompt": id}} for id in "abc"]
    source.write_text("".join(json.dumps(each) + "\n" for each in made))
    server.reply(400, {"error": {"message": "no"}})
    server.reply(200, {"choices": []})
    arguments = ["run-batch", "-i", str(source), "-o", str(target), "--base-url", server.url, "--concurrency", "1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "1 of 3 requests failed" in result.stderr
    answers = target.read_text().splitlines()
    assert [json.loads(line)["custom_id"] for line in answers] == ["a", "b", "c"]
    target.write_text("\n".join(answers[:2]) + "\n" + answers[2][:9])
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert [json.loads(line)["custom_id"] for line in target.read_text().splitlines()] == ["a", "b", "c"]
    assert len(server.requests) == 4


def test_a_model_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    arguments = ["run-batch", "-i", "x", "-o", str(tmp_path / "out"), "--model", "./nowhere"]
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_a_bad_line_ends_no_batch(server: FakeServer, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    good = '{"custom_id": "%s", "url": "/v1/completions", "body": {"prompt": "a"}}'
    bad = (
        "[" * 100_000,
        '{"custom_id": "b", "url": "/v1/x", "body": {"prompt": ' + "[" * 5000 + "]" * 5000 + "}}",
        '{"custom_id": "\\ud83d", "url": 5}',
        '{"custom_id": "\udcff", "url": "/v1/completions", "body": {}}',
        '{"custom_id": "c", "url": "/v1/\\n", "body": {}}',
        '{"custom_id": "d", "url": "/v1/é", "body": {}}',
    )
    lines = [line for number, each in enumerate(bad) for line in (each, good % f"good-{number}")]
    source.write_bytes("".join(f"{line}\n" for line in lines).encode(errors="surrogateescape"))
    server.reply(200, {"choices": []})
    arguments = ["run-batch", "-i", str(source), "-o", str(target), "--base-url", server.url]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert f"{len(bad)} of {len(lines)} requests failed" in result.stderr
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    failed = {answer["custom_id"]: answer["error"]["code"] for answer in answers if answer["error"] is not None}
    assert failed == {
        "line-1": "invalid_request",
        "line-3": "invalid_request",
        "\ud83d": "invalid_request",
        "line-7": "invalid_request",
        "c": "invalid_request",
        "d": "invalid_request",
    }
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 0
    assert len(target.read_text().splitlines()) == len(lines)


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_answers_do_not_replace_their_requests(tmp_path: Path, options: list[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("{}\n")
    result = CliRunner().invoke(app, ["run-batch", "-i", str(source), "-o", str(source), *options])
    assert result.exit_code == 1
    assert "is the file of requests" in result.stderr
    assert source.read_text() == "{}\n"


def test_old_answers_stay_until_there_is_a_new_one(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text("{}\n")
    arguments = ["run-batch", "-i", str(tmp_path / "nothing"), "-o", str(target), "--overwrite"]
    assert CliRunner().invoke(app, arguments).exit_code == 1
    assert target.read_text() == "{}\n"
