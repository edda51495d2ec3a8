"""A small HTTP server that answers from a list."""

import http.server
import json
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class FakeServer:
    """Answers requests with the replies that were set, in their order, the last one again and again."""

    def __init__(self, certificate: tuple[Path, Path] | None = None) -> None:
        """``certificate``: with its key; None: plain text."""
        self.replies: list[tuple[int, bytes, Mapping[str, str]]] = []
        self.requests: list[tuple[str, str, Mapping[str, str], Any]] = []
        """Method, path, headers and body of what came, JSON or the bytes of a form."""
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"fake": self})
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.address = f"127.0.0.1:{self._server.server_port}"
        self.url = f"{'http' if certificate is None else 'https'}://{self.address}"

    def reply(self, status: int, body: object, **headers: str) -> None:
        """One more reply; a `body` that is not bytes is sent as JSON."""
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.replies.append((status, sent, {name.replace("_", "-"): value for name, value in headers.items()}))

    def take(
        self, method: str, path: str, headers: Mapping[str, str], body: Any
    ) -> tuple[int, bytes, Mapping[str, str]]:
        with self._lock:
            self.requests.append((method, path, headers, body))
            return self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    fake: FakeServer

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(json.loads(body) if self.headers["Content-Type"] == "application/json" else body)

    def _answer(self, asked: Any) -> None:
        status, body, headers = self.fake.take(self.command, self.path, dict(self.headers), asked)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def events(*bodies: object) -> bytes:
    """As server-sent events."""
    return b"".join(b"data: " + json.dumps(body).encode() + b"\n\n" for body in bodies) + b"data: [DONE]\n\n"


def piece(text: str, finish_reason: str | None = None) -> dict[str, object]:
    """A chunk of a streamed chat."""
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish_reason}]}
