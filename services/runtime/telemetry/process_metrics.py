"""Prometheus metrics of one process, under vLLM's names where vLLM has one."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from tokenloom.request.errors import Unavailable

from ..peers import addresses
from ..peers.addresses import Address
from ..peers.tls import MeshTLS
from . import fast_metrics

VLLM = "vllm:"
"""Prefix of the metrics that users' dashboards already read."""

LATENCY_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
"""Buckets of times to a first token, between tokens, and in a part."""
REQUEST_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
"""Buckets of whole requests."""
_PART_LABELS = ("service", "instance_id", "version")

disable_created_metrics()  # type: ignore[no-untyped-call]  # else a gauge beside each counter, which nobody reads


def new_registry() -> CollectorRegistry:
    """A registry with this process's CPU time, memory and file descriptors."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


def observe_part(registry: CollectorRegistry, service: str, instance: str, is_serving: Callable[[], bool]) -> None:
    """Adds which part this is, and whether it serves."""
    info = Gauge("tokenloom_part_info", "1, labelled with what this part is.", _PART_LABELS, registry=registry)
    info.labels(service, instance, version("tokenloom")).set(1)
    serving = Gauge("tokenloom_serving", "1 while the part is SERVING, 0 while it starts or drains.", registry=registry)
    serving.set_function(is_serving)


def observe_process(registry: CollectorRegistry, prefix: str, pid: Callable[[], int | None]) -> None:
    """Adds another process's CPU time and memory, as ``prefix_process_…``; nothing while there is none."""
    ProcessCollector(namespace=prefix, pid=lambda: pid() or "none", registry=registry)


def gauge(registry: CollectorRegistry, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
    """A gauge ``vllm:name``."""
    return Gauge(VLLM + name, text, labels, registry=registry)


def counter(registry: CollectorRegistry, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
    """A counter ``vllm:name`` (shown with ``_total``)."""
    return Counter(VLLM + name, text, labels, registry=registry)


def fast_counter(registry: CollectorRegistry, name: str, text: str, labels: Mapping[str, str]) -> fast_metrics.Counter:
    """A counter ``vllm:name`` with fixed labels, for the event loop's thread only."""
    return fast_metrics.Counter(registry, VLLM + name, text, labels)


def counter_reading(
    registry: CollectorRegistry, name: str, text: str, labels: Mapping[str, str], read: Callable[[], float]
) -> None:
    """A counter ``vllm:name`` that ``read`` tells when it is scraped."""
    fast_metrics.CounterReading(registry, VLLM + name, text, labels, read)


def histogram(
    registry: CollectorRegistry,
    name: str,
    text: str,
    labels: Mapping[str, str],
    buckets: Sequence[float] = LATENCY_SECONDS,
) -> fast_metrics.Histogram:
    """A histogram ``vllm:name`` with fixed labels, for the event loop's thread only."""
    return fast_metrics.Histogram(registry, VLLM + name, text, labels, buckets)


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
    """Serves ``GET /metrics`` on its own daemon thread, so that a scrape works while the event loop is busy."""

    def __init__(self, registry: CollectorRegistry, address: Address, tls: ssl.SSLContext | None = None) -> None:
        """Binds; ``OSError`` when it cannot. ``tls``: who scrapes needs a certificate of the mesh; None: plain text."""
        server_class = _Server6 if ":" in address.host else ThreadingHTTPServer
        handler = type("Handler", (_Handler,), {"registry": registry})
        self._server = server_class((address.host, address.port), handler)
        self._server.daemon_threads = True
        if tls is not None:  # the handshake is the connection's own thread's: a silent client holds up nobody else
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self._host = address.host
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()
        self.address = str(Address(host=address.host, port=self._server.server_address[1]))

    def close(self) -> None:
        """Stops."""
        self._closing = True
        with contextlib.suppress(OSError):
            port = self._server.server_address[1]
            socket.create_connection((self._host, port), timeout=1.0).close()  # which the thread waits for
        self._thread.join()
        self._server.server_close()

    def _serve(self) -> None:
        """Without ``serve_forever``, which wakes up again and again to see whether it is to stop."""
        while not self._closing:
            self._server.handle_request()


class _Server6(ThreadingHTTPServer):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    registry: CollectorRegistry
    timeout = 10.0  # seconds that a silent client holds a thread

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404)
            return
        body = generate_latest(self.registry)
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE_LATEST)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass  # scrapes are not events
