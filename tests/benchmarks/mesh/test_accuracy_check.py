"""The accuracy check: passes for a mesh of prefill and decode engines, and can fail."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from benchmarks.mesh.accuracy_check import Difference, compare, make_cases, make_prompts
from tests.mesh.split import SplitMesh

CASES = make_cases(make_prompts(longest=300), max_tokens=12)


def check(baseline: str, candidate: str) -> list[Difference]:
    return list(compare(baseline, candidate, CASES, concurrency=4))


async def test_texts_are_those_of_one_engine(socket_dir: Path) -> None:
    (socket_dir / "one").mkdir()
    (socket_dir / "two").mkdir()
    colocated = SplitMesh(socket_dir / "one", ("both",))
    async with colocated.running(), SplitMesh(socket_dir / "two").running() as split:
        assert await asyncio.to_thread(check, colocated.url, split.url) == []
        assert split.of_role("decode").stats.kv_blocks_received
        await split.check_nothing_is_left()


def test_other_texts_are_differences() -> None:
    with serving(lambda prompt: "a test of " + prompt) as one, serving(lambda prompt: "a text of " + prompt) as other:
        assert list(compare(one, one, CASES[:4], concurrency=2)) == []
        differences = list(compare(one, other, CASES[:4], concurrency=2))
    assert [difference.case for difference in differences] == CASES[:4]
    assert "equal for 4 characters, then 'st of " in str(differences[0])


@contextmanager
def serving(answer: Callable[[str], str]) -> Iterator[str]:
    """A server of the two routes that are asked; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send({"data": [{"id": "fake"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send({"choices": [{"text": answer(body["prompt"])}]})

        def _send(self, body: object) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
