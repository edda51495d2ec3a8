"""Serves the files of the page, which a browser keeps until they change."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

from ..http.http_exchange import HttpExchange

INDEX = "index.html"
_TYPES: Mapping[str, bytes] = {
    "css": b"text/css; charset=utf-8",
    "html": b"text/html; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
# The page runs only its own files and connects only to its own gateway; no other page may show it in a frame.
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"cache-control", b"no-cache"),  # keep it, and ask whether it has changed
    (b"content-security-policy", _POLICY),
    (b"referrer-policy", b"no-referrer"),
    (b"vary", b"accept"),
    (b"x-content-type-options", b"nosniff"),
)


@dataclass(frozen=True, slots=True)
class StaticFile:
    """Holds one file and answers requests for it.

    Attributes:
        etag: The digest of the content, in quotation marks, as HTTP writes it.
    """

    content: bytes
    content_type: bytes
    etag: bytes

    async def __call__(self, exchange: HttpExchange) -> None:
        """Send the file, or 304 without it if the browser has this content already."""
        headers = (*_HEADERS, (b"etag", self.etag))
        if self.etag in exchange.headers.get(b"if-none-match", b""):
            await exchange.start(304, headers)
            await exchange.finish()
        else:
            await exchange.respond(200, self.content, self.content_type, headers)


@cache
def static_files() -> Mapping[str, StaticFile]:
    """Return the files of the page, by path."""
    return {path: _file(path, each.read_bytes()) for path, each in _walk(resources.files(__package__) / "static")}


def _walk(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    for each in folder.iterdir():
        if each.is_dir():
            yield from _walk(each, f"{prefix}{each.name}/")
        else:
            yield prefix + each.name, each


def _file(name: str, content: bytes) -> StaticFile:
    digest = hashlib.sha256(content).hexdigest()[:32]
    return StaticFile(content, _TYPES[name.rpartition(".")[2]], f'"{digest}"'.encode())
