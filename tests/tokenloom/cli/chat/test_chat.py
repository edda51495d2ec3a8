"""``tokenloom chat`` from scripts and on a terminal."""

import json
from base64 import b64encode
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.tokenloom.cli.fake_server import FakeServer, events, piece
from tests.tokenloom.cli.terminal import terminal
from tokenloom.cli.main import app

HELLO = events(piece("Hel"), piece("lo", "stop"), {"choices": [], "usage": {"completion_tokens": 2}})


def test_one_question_from_an_argument_and_a_pipe(server: FakeServer) -> None:
    server.reply(200, HELLO)
    arguments = ["chat", "Sum up:", "--base-url", server.url, "--model", "m", "--system", "Be brief.", "--seed", "7"]
    result = CliRunner().invoke(app, [*arguments, "--stop", "x"], input="a\nb\n")
    assert (result.exit_code, result.stdout) == (0, "Hello\n"), result.output
    body = server.requests[0][3]
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Sum up:\na\nb"},
    ]
    assert (body["model"], body["seed"], body["stop"]) == ("m", 7, ["x"])
    assert "temperature" not in body, "what was not given is the server's to choose"


def test_sounds_stand_before_the_first_question(server: FakeServer, tmp_path: Path) -> None:
    server.reply(200, HELLO)
    (tmp_path / "a.MP3").write_bytes(b"a sound")
    arguments = ["chat", "What?", "--base-url", server.url, "--model", "m", "--audio", str(tmp_path / "a.MP3")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    (turn,) = server.requests[0][3]["messages"]
    heard = {"data": b64encode(b"a sound").decode(), "format": "mp3"}
    assert turn["content"] == [{"type": "input_audio", "input_audio": heard}, {"type": "text", "text": "What?"}]


def test_images_stand_before_the_first_question(server: FakeServer, tmp_path: Path) -> None:
    server.reply(200, HELLO)
    (tmp_path / "a.png").write_bytes(b"an image")
    arguments = ["chat", "What?", "--base-url", server.url, "--model", "m", "--image", str(tmp_path / "a.png")]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    url = f"data:image/png;base64,{b64encode(b'an image').decode()}"
    (turn,) = server.requests[0][3]["messages"]
    assert turn["content"] == [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    missing = CliRunner().invoke(app, [*arguments[:-1], str(tmp_path / "b.png")])
    assert missing.exit_code == 2


def test_json_tells_the_answer_and_its_usage(server: FakeServer) -> None:
    server.reply(200, HELLO)
    result = CliRunner().invoke(app, ["chat", "--json", "--base-url", server.url, "--model", "m"], input="Hi")
    answer = json.loads(result.stdout)
    assert (answer["text"], answer["finish_reason"], answer["usage"]) == ("Hello", "stop", {"completion_tokens": 2})


def test_nothing_to_ask_is_a_usage_error(server: FakeServer) -> None:
    result = CliRunner().invoke(app, ["chat", "--base-url", server.url])
    assert result.exit_code == 2
    assert "PROMPT" in result.output


def test_a_failed_answer_ends_with_status_1(server: FakeServer) -> None:
    server.reply(404, {"error": {"message": "no model 'm'"}})
    result = CliRunner().invoke(app, ["chat", "Hi", "--base-url", server.url, "--model", "m"])
    assert result.exit_code == 1
    assert "Error: HTTP 404: no model 'm'" in result.stderr


def test_a_conversation_on_a_terminal(server: FakeServer) -> None:
    server.reply(200, {"data": [{"id": "demo"}]})
    server.reply(200, HELLO)
    server.reply(503, {"error": {"message": "full"}})
    server.reply(200, HELLO)
    with terminal("chat", "--base-url", server.url) as screen:
        screen.read_until("/help lists commands")
        screen.read_until("> ")
        screen.type("Hi\n")
        screen.read_until("Hello")
        screen.read_until("2 tokens")
        screen.type("/system Be brief.\n")
        screen.read_until("system prompt: Be brief.")
        screen.type("Again\n")
        screen.read_until("HTTP 503: full")
        screen.type("one\\\n")
        screen.read_until("… ")
        screen.type("two\n")
        screen.read_until("2 tokens")
        screen.read_until("> ")
        screen.type("\x04")
        assert screen.end() == 0
    assert server.requests[-1][3]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "one\ntwo"},
    ], "the failed question is forgotten"


def test_markdown_is_shown_as_such_on_a_terminal_and_as_it_is_elsewhere(server: FakeServer) -> None:
    written = events(piece("# Title\n\n**bo"), piece("ld** <tag>", "stop"))
    arguments = ["chat", "Hi", "--base-url", server.url, "--model", "m"]
    server.reply(200, written)
    assert CliRunner().invoke(app, arguments).stdout == "# Title\n\n**bold** <tag>\n"
    server.reply(200, written)
    asked = CliRunner().invoke(app, [*arguments, "--markdown"]).stdout
    assert "bold <tag>" in asked
    assert "**" not in asked
    for flags, marks in (([], False), (["--plain"], True)):
        server.reply(200, written)
        names = {"TERM": "xterm", "COLUMNS": "80", "NO_COLOR": "1"}
        with terminal(*arguments, *flags, environment=names) as screen:
            shown = screen.read_until("<tag>")
            assert screen.end() == 0
        assert ("**bold**" in shown) is marks


@pytest.mark.parametrize(
    "event",
    [
        {"choices": None},
        {"choices": [None, "x"]},
        {"choices": [{"delta": "x"}]},
        {"choices": [{"delta": {"content": 5}}]},
        {"choices": [{"delta": {"reasoning": []}}]},
    ],
)
def test_an_answer_of_another_form_is_a_failure(server: FakeServer, event: object) -> None:
    server.reply(200, events(event))
    for command in ("chat", "complete"):
        result = CliRunner().invoke(app, [command, "Hi", "--base-url", server.url, "--model", "m"])
        assert result.exit_code == 1
        assert result.stderr.startswith("Error: the "), result.output


def heard(*texts: str) -> bytes:
    deltas: list[dict[str, str]] = [{"type": "transcript.text.delta", "delta": text} for text in texts]
    return events(*deltas, {"type": "transcript.text.done", "text": "".join(texts)})


def test_a_transcript_is_printed_as_it_is_heard(server: FakeServer, tmp_path: Path) -> None:
    server.reply(200, heard("So", " it is."))
    (tmp_path / "a b.wav").write_bytes(b"a sound")
    arguments = ["transcribe", str(tmp_path / "a b.wav"), "--base-url", server.url, "--model", "m", "--language", "de"]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (0, "So it is.\n"), result.output
    _, path, headers, body = server.requests[0]
    assert path == "/v1/audio/transcriptions"
    assert headers["Content-Type"].startswith("multipart/form-data; boundary=")
    for part in (b'"model"\r\n\r\nm\r\n', b'"language"\r\n\r\nde\r\n', b'"stream"\r\n\r\ntrue\r\n'):
        assert part in body
    assert b'name="file"; filename="a%20b.wav"\r\n\r\na sound\r\n--' in body


def test_subtitles_of_a_translation(server: FakeServer, tmp_path: Path) -> None:
    subtitles = b"1\n00:00:00,000 --> 00:00:01,000\nSo it is.\n\n"
    server.reply(200, subtitles)
    (tmp_path / "a.wav").write_bytes(b"a sound")
    arguments = ["transcribe", str(tmp_path / "a.wav"), "--base-url", server.url, "--model", "m"]
    result = CliRunner().invoke(app, [*arguments, "--translate", "--format", "srt"])
    assert (result.exit_code, result.stdout) == (0, subtitles.decode()), result.output
    assert server.requests[0][1] == "/v1/audio/translations"


@pytest.mark.parametrize(
    ("status", "body"), [(400, b'{"error":{"message":"too long"}}'), (200, events({"error": {"message": "too long"}}))]
)
def test_a_refused_sound_says_why(server: FakeServer, tmp_path: Path, status: int, body: bytes) -> None:
    server.reply(status, body)
    (tmp_path / "a.wav").write_bytes(b"a sound")
    result = CliRunner().invoke(app, ["transcribe", str(tmp_path / "a.wav"), "--base-url", server.url, "--model", "m"])
    assert (result.exit_code, "too long" in result.output) == (1, True)
