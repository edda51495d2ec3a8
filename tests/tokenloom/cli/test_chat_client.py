"""The demo's HTTP client against a small server."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator

import pytest

from tokenloom.cli.chat_client import Answer, ChatFailed, stream_chat

Serve = Callable[[int, bytes], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Answers every POST with a status and a body; gives the address."""
    servers: list[tuple[http.server.HTTPServer, threading.Thread]] = []

    def start(status: int, body: bytes) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return f"127.0.0.1:{server.server_port}"

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


def events(*bodies: object) -> bytes:
    return b"".join(b"data: " + json.dumps(body).encode() + b"\n\n" for body in bodies) + b"data: [DONE]\n\n"


def piece(text: str, finish_reason: str | None = None) -> dict[str, object]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish_reason}]}


def ask(address: str) -> tuple[Answer, list[str]]:
    pieces: list[str] = []
    return stream_chat(address, "demo", "Hi", 10, pieces.append), pieces


def test_pieces_usage_and_timeline_are_collected(serve: Serve) -> None:
    last = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}, "timeline": {"decode_ms": 1.5}}
    answer, pieces = ask(serve(200, events(piece("Hel"), piece("lo", "stop"), last)))
    assert pieces == ["Hel", "lo"]
    assert (answer.text, answer.finish_reason) == ("Hello", "stop")
    assert answer.usage["completion_tokens"] == 2
    assert answer.timeline == {"decode_ms": 1.5}
    assert 0 < answer.seconds_to_first_token <= answer.seconds


def test_an_error_answer_says_why(serve: Serve) -> None:
    address = serve(404, json.dumps({"error": {"message": "no model 'demo'"}}).encode())
    with pytest.raises(ChatFailed, match="HTTP 404: no model 'demo'"):
        ask(address)


def test_an_error_in_the_stream_says_why(serve: Serve) -> None:
    address = serve(200, events(piece("Hel"), {"error": {"message": "the engine went away"}}))
    with pytest.raises(ChatFailed, match="the engine went away"):
        ask(address)


def test_an_answer_without_its_end_is_a_failure(serve: Serve) -> None:
    address = serve(200, events(piece("Hel")))
    with pytest.raises(ChatFailed, match="broke off"):
        ask(address)


def test_no_gateway_is_a_failure() -> None:
    with pytest.raises(ChatFailed, match="ConnectionRefusedError"):
        ask("127.0.0.1:1")
