"""Prometheus metrics of one process, under vLLM's name if vLLM has the metric, and the server of /metrics."""

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import ThreadingHTTPServer
from importlib.metadata import version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import MetricsHandler

from tokenloom.request.errors import Unavailable

from ..peers import addresses
from ..peers.addresses import Address
from ..peers.tls import MeshTLS
from . import fast_metrics

VLLM = "vllm:"
"""Prefix of the metrics that existing dashboards read."""

LATENCY_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
"""Buckets of TTFT, ITL and times inside one service."""
REQUEST_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
"""Buckets of whole requests."""
_PART_LABELS = ("service", "instance_id", "version")

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_UTIME, _STIME = 11, 12  # columns of /proc/PID/stat behind the command's closing parenthesis

disable_created_metrics()  # type: ignore[no-untyped-call]  # otherwise each counter gets an unused gauge


def new_registry() -> CollectorRegistry:
    """Return a registry with this process's CPU time, memory and file descriptors."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


def observe_part(registry: CollectorRegistry, service: str, instance: str, is_serving: Callable[[], bool]) -> None:
    """Add the name of this service and whether it serves."""
    info = Gauge(
        "tokenloom_part_info",
        "1, labelled with the service, its instance and version.",
        _PART_LABELS,
        registry=registry,
    )
    info.labels(service, instance, version("tokenloom")).set(1)
    serving = Gauge(
        "tokenloom_serving", "1 while the service is SERVING, 0 while it starts or drains.", registry=registry
    )
    serving.set_function(is_serving)


class CertificateExpiries:
    """Shows when the certificates of this process expire; without certificates it shows nothing."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gauge = Gauge(
            "tokenloom_certificate_expiry_timestamp_seconds",
            "Unix time at which a certificate expires that the service uses now: mesh (its own), authority, public "
            "(for clients) or operator (for admin routes).",
            ("certificate",),
            registry=registry,
        )

    def show(self, certificate: str, expiry: Callable[[], float]) -> None:
        """Add a certificate; each scrape calls ``expiry``."""
        self._gauge.labels(certificate).set_function(expiry)


def observe_process(registry: CollectorRegistry, prefix: str, pid: Callable[[], int | None]) -> None:
    """Add another process's CPU time and memory as ``prefix_process_…``; nothing while ``pid`` returns None."""
    ProcessCollector(namespace=prefix, pid=lambda: pid() or "none", registry=registry)


def show_token_cost(
    registry: CollectorRegistry,
    num_tokens: Callable[[], float],
    *,
    prefix: str = "tokenloom",
    cpu_seconds: Callable[[], float] = time.process_time,
) -> None:
    """Add ``prefix_cpu_seconds_per_output_token``: CPU time since now over ``num_tokens()``; 0 before the first token.

    ``cpu_seconds`` returns the CPU time, by default this process's. For a shorter period, divide the rates of
    ``process_cpu_seconds_total`` and of the service's tokens.
    """
    started = cpu_seconds()

    def cost() -> float:
        tokens = num_tokens()
        return max(cpu_seconds() - started, 0.0) / tokens if tokens else 0.0

    text = "CPU time since the service became ready, divided by the output tokens that passed through it."
    Gauge(f"{prefix}_cpu_seconds_per_output_token", text, registry=registry).set_function(cost)


def cpu_seconds_of(pid: int | None) -> float:
    """Return the CPU time of a process, all its threads, in seconds; 0 without a process or without /proc."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            columns = stat.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(columns[_UTIME]) + int(columns[_STIME])) / _TICKS_PER_SECOND


def gauge(registry: CollectorRegistry, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
    """Add a gauge ``vllm:name``."""
    return Gauge(VLLM + name, text, labels, registry=registry)


def counter(registry: CollectorRegistry, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
    """Add a counter ``vllm:name`` (shown with ``_total``)."""
    return Counter(VLLM + name, text, labels, registry=registry)


def fast_counter(
    registry: CollectorRegistry,
    name: str,
    text: str,
    labels: Mapping[str, str],
    read: Callable[[], float] | None = None,
) -> fast_metrics.Counter:
    """Add a counter ``vllm:name`` for the event loop's thread. A scrape calls ``read``, if any, for its value."""
    return fast_metrics.Counter(registry, VLLM + name, text, labels, read)


def histogram(
    registry: CollectorRegistry,
    name: str,
    text: str,
    labels: Mapping[str, str],
    buckets: Sequence[float] = LATENCY_SECONDS,
) -> fast_metrics.Histogram:
    """Add a histogram ``vllm:name`` with fixed labels, for the event loop's thread only."""
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
        """Bind and serve. Raises ``OSError`` when the address cannot be bound. ``tls`` None: plain text."""
        server_class = _Server6 if ":" in address.host else ThreadingHTTPServer
        self._server = server_class((address.host, address.port), _Handler.factory(registry))
        self._server.daemon_threads = True
        if tls is not None:  # the connection's own thread does the handshake: a silent client delays no other
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        self._host = address.host
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()
        self.address = str(Address(host=address.host, port=self._server.server_address[1]))

    def close(self) -> None:
        """Stop serving."""
        self._closing = True
        with contextlib.suppress(OSError):
            port = self._server.server_address[1]
            socket.create_connection((self._host, port), timeout=1.0).close()  # the thread waits for a connection
        self._thread.join()
        self._server.server_close()

    def _serve(self) -> None:
        """Unlike ``serve_forever``, this does not wake up twice a second to check whether to stop."""
        while not self._closing:
            self._server.handle_request()


class _Server6(ThreadingHTTPServer):
    address_family = socket.AF_INET6


class _Handler(MetricsHandler):
    timeout = 10.0  # seconds for which a silent client holds a thread

    def do_GET(self) -> None:
        if self.path.partition("?")[0] == "/metrics":
            super().do_GET()
        else:
            self.send_error(404)
