"""Serves /metrics from a thread of its own, with bounds on connections, time and log lines."""

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any, cast

import uvloop
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import choose_encoder

from tokenloom.request.errors import Unavailable

from .. import addresses
from ..addresses import Address
from ..peers.tls import AcceptedSocket, MeshTLS
from .logs import RareLine

OPENMETRICS = "application/openmetrics-text"
_AS_IS = f"{OPENMETRICS}; version=1.0.0; escaping=allow-utf-8"


def accepted(accept: str) -> str:
    """Return the ``Accept`` header to give to prometheus_client for a client's.

    Without ``escaping``, prometheus_client writes ``vllm_x`` for ``vllm:x`` in OpenMetrics, although colons are valid
    there: the names would depend on the scraper, and no dashboard would find them.
    """
    kinds = (item.partition(";")[0].strip().lower() for item in accept.split(","))
    return _AS_IS if OPENMETRICS in kinds else ""


def metrics_page(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return the metrics and their content type: OpenMetrics, which has exemplars, for a client that accepts it, and
    otherwise Prometheus's text."""
    encode: Callable[[CollectorRegistry], bytes]
    encode, content_type = choose_encoder(accepted(accept))
    return encode(registry), content_type


log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""With so many open connections, the oldest is closed for a new one: scrapers use one each, for milliseconds."""
REQUEST_SECONDS = 5.0
"""Time for a whole exchange, TLS handshake included."""
MAX_HEAD_BYTES = 8 * 1024
"""Limit on the request line and headers."""
_LOG_SECONDS = 60.0

_SILENT_LOSS = (TimeoutError, OSError, EOFError, asyncio.LimitOverrunError)  # what clients cause


def serve(registry: CollectorRegistry, listen: str, tls: MeshTLS | None, *, insecure: bool) -> "MetricsServer":
    """Open the port of /metrics, ``host:port``. On an address that other machines can reach, scrapers need a
    certificate of the mesh, if it has certificates.

    Raises ``InvalidArgument`` for plain text on such an address, unless ``insecure`` allows it, ``Unavailable`` for an
    address that cannot be bound.
    """
    address = addresses.parse(listen, field="metrics_listen")
    context = tls.server_context() if tls is not None and not address.is_local else None
    addresses.check_closed(address, insecure=insecure or context is not None, field="metrics_listen")
    try:
        return MetricsServer(registry, address, context)
    except OSError as error:
        raise Unavailable(f"metrics_listen: cannot bind {address}: {error.strerror}") from None


class MetricsServer:
    """Answers ``GET /metrics``, one request per connection, on one daemon thread with an event loop of its own.

    A scrape works while the service's event loop is busy."""

    def __init__(self, registry: CollectorRegistry, address: Address, tls: ssl.SSLContext | None = None) -> None:
        """Bind and serve. Raises ``OSError`` when the address cannot be bound. ``tls`` None: plain text."""
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._socket = socket.create_server((address.host, address.port), family=family, backlog=MAX_CONNECTIONS)
        self._app = make_wsgi_app(registry)
        self._tls = tls
        self._open: dict[asyncio.Task[None], None] = {}  # oldest first; bounded by MAX_CONNECTIONS
        self._failures = RareLine(_LOG_SECONDS)
        self._loop = uvloop.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()
        self.address = str(Address(host=address.host, port=self._socket.getsockname()[1]))

    def close(self) -> None:
        """Stop serving, and return when the thread has ended."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            self._loop.set_exception_handler(lambda _, context: self._log(context.get("exception")))
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await self._loop.create_server(lambda: AcceptedSocket(self._accept), sock=self._socket)
        await self._stopping.wait()
        server.close()  # the runner cancels what is open

    def _accept(self, accepted: socket.socket) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            # Removed at once, not when the task has ended: several connections may arrive before the cancelled task
            # runs.
            del self._open[oldest]
            oldest.cancel()
        task = self._loop.create_task(self._answer(accepted), name="scrape")
        self._open[task] = None
        task.add_done_callback(lambda done: self._open.pop(done, None))

    async def _answer(self, accepted: socket.socket) -> None:
        """Serve one connection. Raises only when cancelled: what a client does is no reason for a traceback."""
        with contextlib.ExitStack() as at_end:
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    reader = asyncio.StreamReader(limit=MAX_HEAD_BYTES)
                    protocol = asyncio.StreamReaderProtocol(reader)
                    connected = await self._loop.connect_accepted_socket(lambda: protocol, accepted, ssl=self._tls)
                    writer = asyncio.StreamWriter(cast(asyncio.Transport, connected[0]), protocol, reader, self._loop)
                    at_end.callback(writer.transport.abort)
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.transport.set_write_buffer_limits(0)  # drain waits until the client has received everything
                    writer.write(self._response(head))
                    await writer.drain()
                    at_end.pop_all()
                    writer.close()
            except _SILENT_LOSS:
                pass
            except Exception as error:
                self._log(error)

    def _response(self, head: bytes) -> bytes:
        """Return what the library's application answers; heads that are not HTTP, and other paths, get an error."""
        lines = head.decode("latin-1").split("\r\n")
        request, fields = lines[0].split(" "), dict(_field(line) for line in lines[1:])
        if len(request) != 3 or not request[2].startswith("HTTP/1."):
            return _message("400 Bad Request", [], b"")
        method, target, _ = request
        path, _, query = target.partition("?")
        if path != "/metrics":
            return _message("404 Not Found", [], b"")
        environment = {
            "REQUEST_METHOD": method,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "HTTP_ACCEPT": accepted(fields.get("accept", "")),
            "HTTP_ACCEPT_ENCODING": fields.get("accept-encoding", ""),
        }
        started: list[tuple[str, list[tuple[str, str]]]] = []
        start: Callable[..., Any] = lambda status, headers: started.append((status, headers))  # noqa: E731
        body = b"".join(self._app(environment, start))
        return _message(*started[0], body)

    def _log(self, error: BaseException | None) -> None:
        if self._failures.add():
            log.warning("/metrics: %s", error, exc_info=error)


def _field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip().lower(), value.strip()


def _message(status: str, headers: list[tuple[str, str]], body: bytes) -> bytes:
    """Return a whole response, after which the connection closes."""
    fields = [*headers, ("Content-Length", str(len(body))), ("Connection", "close")]
    head = "".join(f"{name}: {value}\r\n" for name, value in fields)
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode("latin-1") + body
