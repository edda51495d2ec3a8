"""A mirror of the Hugging Face hub on this machine: the part of its HTTP API that a download of one model needs."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
from huggingface_hub.utils import disable_progress_bars

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubMirror:
    """Serves the files of one directory as the repository ``name``.

    Attributes:
        token: Callers must show it; empty: everyone may read.
        revisions: The branches and tags, which all point to ``COMMIT``.
        downloads: How many times each file was sent.
        url: Set once the server listens.
    """

    directory: Path
    name: str = "org/name"
    token: str = ""
    revisions: tuple[str, ...] = ("main", "v1")
    downloads: Counter[str] = field(default_factory=Counter)
    url: str = ""

    @contextmanager
    def serve(self, port: int = 0) -> Iterator["HubMirror"]:
        """Listen on the loopback address while the context is open."""
        server = ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (_Handler,), {"mirror": self}))
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    @contextmanager
    def used(self) -> Iterator["HubMirror"]:
        """Serve, and let this process take it for the hub, although its tests are offline."""
        constants = huggingface_hub.constants
        with pytest.MonkeyPatch.context() as patch, self.serve(), disable_progress_bars():
            patch.setattr(constants, "HF_HUB_OFFLINE", False)
            patch.setattr(constants, "ENDPOINT", self.url)
            template = constants.HUGGINGFACE_CO_URL_TEMPLATE
            patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", self.url + template[template.index("/{repo_id}") :])
            yield self

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.directory)) for path in self.directory.rglob("*") if path.is_file())


class _Handler(BaseHTTPRequestHandler):
    mirror: HubMirror
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(is_head=True)

    def do_GET(self) -> None:
        self._answer(is_head=False)

    def _answer(self, *, is_head: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        mirror = self.mirror
        if mirror.token and self.headers.get("Authorization") != f"Bearer {mirror.token}":
            return self._refuse(401, "GatedRepo", "This repository needs a token.")
        for prefix, answer in (
            (f"/api/models/{mirror.name}/revision/", self._revision),
            (f"/api/models/{mirror.name}/tree/", self._tree),
        ):
            if path.startswith(prefix):
                return answer(path.removeprefix(prefix))
        if path.startswith(prefix := f"/{mirror.name}/resolve/"):
            revision, _, file = path.removeprefix(prefix).partition("/")
            return self._file(revision, file, is_head=is_head)
        return self._refuse(404, "RepoNotFound", "There is no such repository.")

    def _revision(self, revision: str) -> None:
        if revision not in (*self.mirror.revisions, COMMIT):
            return self._refuse(404, "RevisionNotFound", f"There is no revision {revision}.")
        siblings = [{"rfilename": file} for file in self.mirror.files()]
        self._send(json.dumps({"id": self.mirror.name, "sha": COMMIT, "siblings": siblings}).encode())

    def _tree(self, revision: str) -> None:
        entries = [
            {"type": "file", "path": file, "size": len(self._content(file)), "oid": _digest(self._content(file))}
            for file in self.mirror.files()
        ]
        self._send(json.dumps(entries).encode())

    def _file(self, revision: str, file: str, *, is_head: bool) -> None:
        if file not in self.mirror.files():
            return self._refuse(404, "EntryNotFound", f"There is no file {file}.")
        content = self._content(file)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_digest(content)}"', "X-Linked-Size": str(len(content))}
        if not is_head:
            self.mirror.downloads[file] += 1
        self._send(content, headers, is_head=is_head)

    def _content(self, file: str) -> bytes:
        return (self.mirror.directory / file).read_bytes()

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(b"", {"X-Error-Code": code, "X-Error-Message": message}, status=status)

    def _send(
        self, content: bytes, headers: dict[str, str] | None = None, *, status: int = 200, is_head: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if not is_head:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
