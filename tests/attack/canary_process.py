"""The process of the canary: reads one greedy text after another over a connection that it keeps, and times the tokens.

It runs separately from the attacks, so that their work does not delay its clock, and imports only the standard library.
A line ``streaming`` of its input is answered with an empty line at the next token, a line ``report`` with a JSON object
when a text has ended that began after the question.
"""

import http.client
import json
import sys
import threading
import time
from collections.abc import Iterator

STALLED_SECONDS = 30.0
"""A stream without a token for this long has hung."""
RETRY_SECONDS = 0.2


class Stream:
    """Reads the same greedy text again and again over one connection."""

    def __init__(self, host: str, port: int, headers: dict[str, str], body: bytes) -> None:
        self._peer = (host, port)
        self._headers = headers
        self._body = body
        self._connection: http.client.HTTPConnection | None = None
        self.gap = 0.0
        """Most seconds between a request or a token and the next token."""
        self.is_awaited = threading.Event()
        """Whether the next token is to be reported."""

    def read(self) -> str:
        """Return one whole text. Raises `OSError`, `HTTPException` or `ValueError` if it does not come whole."""
        if self._connection is None:
            self._connection = http.client.HTTPConnection(*self._peer, timeout=STALLED_SECONDS)
        try:
            sent = time.monotonic()
            self._connection.request("POST", "/v1/completions", self._body, self._headers)
            return "".join(self._pieces(self._connection.getresponse(), sent))
        except Exception:
            self._connection.close()
            self._connection = None
            raise

    def _pieces(self, response: http.client.HTTPResponse, last: float) -> Iterator[str]:
        if response.status != 200:
            raise ValueError(f"status {response.status}: {response.read(200)!r}")
        ended = False
        while line := response.readline():
            if line.startswith(b"data: {"):
                now = time.monotonic()
                self.gap = max(self.gap, now - last)
                last = now
                if self.is_awaited.is_set():
                    self.is_awaited.clear()
                    print(flush=True)
                event = json.loads(line[6:])
                if "error" in event:
                    raise ValueError(f"error in the stream: {event['error']}")
                yield "".join(choice["text"] for choice in event["choices"])
            ended |= line.startswith(b"data: [DONE]")
        if not ended:
            raise ValueError("the stream ended early")


class Watch:
    """Holds what happened since the last report."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._expected = ""
        self._reset()

    def run_once(self) -> None:
        """Read one text and compare it with the first one."""
        try:
            text = self._stream.read()
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.errors.append(f"{type(error).__name__}: {error}"[:300])
            time.sleep(RETRY_SECONDS)
            return
        self.texts += 1
        self._expected = self._expected or text
        if text != self._expected:
            self.errors.append("another text than before")

    def report(self) -> str:
        """Return the report as JSON, and begin the next one."""
        report = {"texts": self.texts, "gap": self._stream.gap, "errors": self.errors}
        self._reset()
        return json.dumps(report)

    def _reset(self) -> None:
        self.texts = 0
        self.errors: list[str] = []
        self._stream.gap = 0.0


def main() -> None:
    host, port, key, body = sys.argv[1:]
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    stream = Stream(host, int(port), headers, body.encode())
    watch = Watch(stream)
    asked = threading.Event()
    over = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            (stream.is_awaited if line == "streaming\n" else asked).set()
        over.set()

    threading.Thread(target=listen, daemon=True).start()
    while not over.is_set():
        is_asked = asked.is_set()
        watch.run_once()
        if is_asked:
            asked.clear()
            print(watch.report(), flush=True)


if __name__ == "__main__":
    main()
