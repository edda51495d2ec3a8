"""Blocking calls to a server with OpenAI's API, over the standard library's HTTP, and the options that name it."""

import contextlib
import http.client
import json
import os
import secrets
import ssl
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import typer

from tokenloom.supervisor.state_dir import read_part_state, running_meshes

from .failures import RequestFailed
from .options import warn_if_exposed

_JSON = {"Content-Type": "application/json"}
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class ServerReply:
    """Holds a complete answer."""

    status: int
    request_id: str
    """The server's id of the request; empty if it sent none."""
    retry_after: float | None
    """Seconds after which the client may retry a refused request."""
    body: Any

    def value(self) -> Any:
        """Return the body. Raises `RequestFailed` with the server's reason unless the status is 200."""
        if self.status != 200:
            raise RequestFailed(f"HTTP {self.status}: {reason(self.body)}")
        return self.body


class Server:
    """Opens a connection for each request. Safe to use from several threads."""

    def __init__(
        self, base_url: str, api_key: str = "", timeout: float = 120.0, certificate: Path | None = None
    ) -> None:
        """Describe the connection.

        Args:
            base_url: With or without ``/v1``.
            api_key: Printable, in characters that HTTP can carry.
            timeout: Seconds of silence.
            certificate: The only one that a server at ``https`` may have, for a mesh that is known by its own files;
                None: one that an authority of this machine vouches for.

        Raises ``ValueError`` for a wrong URL or key, ``OSError`` for a certificate that cannot be read.
        """
        if not api_key.isprintable() or not _is_latin(api_key):
            raise ValueError("the API key holds a character that HTTP cannot carry")
        url = urlsplit(base_url)
        try:
            self._address = (url.hostname, url.port)
        except ValueError:
            raise ValueError(f"{base_url!r} has no valid port") from None
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"{base_url!r} must be http://host:port or https://host:port")
        self._secured = _trusting(certificate) if url.scheme == "https" else None
        self._prefix = url.path.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = f"{url.scheme}://{url.netloc}{self._prefix}"

    def get(self, path: str) -> ServerReply:
        """Send a GET request. Raises `RequestFailed` if no answer arrives."""
        with self._exchange("GET", path, None, {}) as response:
            return _read_reply(response)

    def post(self, path: str, body: Mapping[str, Any]) -> ServerReply:
        """Send a POST request with a JSON body. Raises `RequestFailed` if no answer arrives."""
        with self._exchange("POST", path, json.dumps(body).encode(), _JSON) as response:
            return _read_reply(response)

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the JSON of each server-sent event. Closing the iterator closes the connection and ends the request.

        Raises `RequestFailed` for an error response or an error event.
        """
        with self._exchange("POST", path, json.dumps(body).encode(), _JSON) as response:
            if response.status != 200:
                _read_reply(response).value()
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    event = _parse(data)
                    if "error" in event:
                        raise RequestFailed(reason(event))
                    yield event

    def upload(self, path: str, file: Path, fields: Mapping[str, str]) -> Iterator[bytes]:
        """Send a form with a file, and yield the lines of the answer as they arrive. Closing the iterator ends the
        request.

        Raises `RequestFailed` for an error response, and ``OSError`` for a file that cannot be read.
        """
        border = secrets.token_hex(16)
        part = f'--{border}\r\nContent-Disposition: form-data; name="'
        values = "".join(f'{part}{name}"\r\n\r\n{value}\r\n' for name, value in fields.items())
        head = f'{values}{part}file"; filename="{quote(file.name)}"\r\n\r\n'.encode()
        tail = f"\r\n--{border}--\r\n".encode()
        with file.open("rb") as data:
            length = len(head) + os.fstat(data.fileno()).st_size + len(tail)
            pieces = chain([head], iter(partial(data.read, _PIECE_BYTES), b""), [tail])
            headers = {"Content-Type": f"multipart/form-data; boundary={border}", "Content-Length": str(length)}
            with self._exchange("POST", path, pieces, headers) as response:
                if response.status != 200:
                    _read_reply(response).value()
                yield from response

    def model(self) -> str:
        """Return the first model that the server lists. Raises `RequestFailed` if the list is empty."""
        listed = self.get("/v1/models").value()
        with contextlib.suppress(LookupError, TypeError):
            return str(listed["data"][0]["id"])
        raise RequestFailed(f"{self.url} lists no models; name one with --model")

    @contextlib.contextmanager
    def _exchange(
        self, method: str, path: str, body: bytes | Iterable[bytes] | None, headers: Mapping[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        host, port = self._address
        assert host is not None
        if self._secured is None:
            connection = http.client.HTTPConnection(host, port, timeout=self._timeout)
        else:
            connection = http.client.HTTPSConnection(host, port, timeout=self._timeout, context=self._secured)
        try:
            connection.request(method, self._prefix + path, body, {**self._headers, **headers})
            yield connection.getresponse()
        except (OSError, http.client.HTTPException, UnicodeError) as error:  # UnicodeError: no host's name or path
            raise RequestFailed(f"no answer from {self.url} ({_what(error)})") from error
        finally:
            connection.close()


def _is_latin(text: str) -> bool:
    try:
        text.encode("latin-1")
    except UnicodeEncodeError:
        return False
    return True


def _trusting(certificate: Path | None) -> ssl.SSLContext:
    """Return a context that accepts one certificate, by whatever name it is asked for, or those of authorities."""
    if certificate is None:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # it is known by itself, and a local mesh is asked by its address
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(certificate)
    return context


def objects(value: object) -> list[dict[str, Any]]:
    """Return the objects of a list in a server's answer; what is none of either is left out."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def reason(body: object) -> str:
    """Return the message of an error in OpenAI's form, or a placeholder."""
    if isinstance(body, dict):
        error = body.get("error", body.get("message"))
        if isinstance(error, dict):
            error = error.get("message")
        if error:
            return str(error)
    return "the server gave no reason"


def _read_reply(response: http.client.HTTPResponse) -> ServerReply:
    content = response.read()
    try:
        after = float(response.headers.get("Retry-After", ""))
    except ValueError:
        after = None
    body = _parse(content) if response.status == 200 else _parse_error(content)
    return ServerReply(response.status, response.headers.get("x-request-id", ""), after, body)


def _parse(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RequestFailed(f"the server's answer is not a JSON object: {data[:80]!r}")
    return value


def _parse_error(data: bytes) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):  # a proxy's page
        return {"error": {"message": data[:200].decode(errors="replace")}}


def _what(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it did not respond in time"
    return (getattr(error, "strerror", None) or type(error).__name__).lower()


DEFAULT_URL = "http://127.0.0.1:8000"

BaseUrl = Annotated[
    str | None,
    typer.Option(
        envvar="OPENAI_BASE_URL",
        show_envvar=True,
        help=f"Server with OpenAI's API; by default the newest local mesh, or {DEFAULT_URL} if none runs.",
    ),
]
ApiKey = Annotated[
    str,
    typer.Option(
        envvar=["TOKENLOOM_API_KEY", "OPENAI_API_KEY"], show_envvar=True, help="Key to send.", callback=warn_if_exposed
    ),
]
ServedModel = Annotated[
    str | None, typer.Option("--model", help="Name of a served model; by default the first that the server lists.")
]


def connect(base_url: str | None, api_key: str = "", timeout: float = 120.0) -> Server:
    """Return the server that the options name. Exits with a usage error for an invalid URL or key."""
    url, certificate = (base_url, None) if base_url else local_url() or (DEFAULT_URL, None)
    try:
        return Server(url, api_key, timeout, certificate)
    except ValueError as error:
        hint = "--api-key" if "key" in str(error) else "--base-url"
        raise typer.BadParameter(str(error), param_hint=hint) from None


def local_url(port: int | None = None) -> tuple[str, Path | None] | None:
    """Return the URL of the newest running mesh of this user, and its certificate if it has one; None: no mesh runs.
    ``port``: of the mesh with this HTTP port."""
    for mesh in running_meshes():
        if port not in (None, mesh.port):
            continue
        for part in mesh.parts:
            state = read_part_state(Path(part.state_file)) if part.service == "gateway" else None
            if state is not None and state.http is not None:
                # By the mesh's own state file: a local mesh with a certificate was once asked in plain text.
                secured = state.certificate is not None
                return f"{'https' if secured else 'http'}://{state.http}", state.certificate
    return None
