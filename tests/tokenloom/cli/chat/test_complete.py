"""``tokenloom complete`` against a small server."""

import json

from typer.testing import CliRunner

from tests.tokenloom.cli.fake_server import FakeServer, events
from tokenloom.cli.main import app


def pieces(*texts: str) -> list[dict[str, object]]:
    return [{"choices": [{"text": text, "finish_reason": None}]} for text in texts]


def test_the_continuation_is_streamed(server: FakeServer) -> None:
    server.reply(200, events(*pieces(" upon", " a"), {"choices": [{"text": "", "finish_reason": "length"}]}))
    arguments = ["complete", "Once", "--echo", "--base-url", server.url, "--model", "m", "--max-tokens", "2"]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (0, "Once upon a\n"), result.output
    assert server.requests[0][3] == {"model": "m", "prompt": "Once", "max_tokens": 2, "stream": True}


def test_json_is_the_servers_answer(server: FakeServer) -> None:
    server.reply(200, {"choices": [{"text": "!"}]})
    result = CliRunner().invoke(app, ["complete", "--json", "--base-url", server.url, "--model", "m"], input="Hi\n")
    assert json.loads(result.stdout) == {"choices": [{"text": "!"}]}


def test_an_answer_without_its_end_is_a_failure(server: FakeServer) -> None:
    server.reply(200, events(*pieces("x")))
    result = CliRunner().invoke(app, ["complete", "Hi", "--base-url", server.url, "--model", "m"])
    assert result.exit_code == 1
    assert "incomplete" in result.stderr


def test_no_prompt_is_a_usage_error() -> None:
    assert CliRunner().invoke(app, ["complete"]).exit_code == 2
