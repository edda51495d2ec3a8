"""``tokenloom run-batch``: files, counts and statuses."""

import json
from pathlib import Path

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
