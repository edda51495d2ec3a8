"""More streams and connections than a gateway can hold."""

import contextlib
import select
import socket
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator

from tests.attack.attack import Attack, Outcome
from tests.attack.h2 import GENERATE, Http2
from tests.attack.target import MODEL, Setup, Target
from tests.attack.wire import Wire, post

FEW = Setup(descriptors=1024)
"""Few descriptors, so that an attack needs few connections to use them all."""
OTHER_PEER = "127.0.0.2"
"""The attacker's address; the canary and the neighbour have another one."""
MAX_STREAMS = 1024
"""More than this is not a bound of streams on one connection."""
MAX_THREADS = 64
MAX_LOG_LINES = 500
_HOLD_SECONDS = 3.0


def streams(target: Target, num: int = 60_000) -> Outcome:
    """Open calls on one connection, without regard to the server's limit, and never send their messages."""
    with Http2(target.grpc, target.key, GENERATE, OTHER_PEER) as link:
        link.open_streams(num)
        deadline = time.monotonic() + 30.0
        while link.num_open > MAX_STREAMS and not link.gone and time.monotonic() < deadline:
            time.sleep(0.1)
        left, gone = link.num_open, link.gone
        wrong = _neighbour(target)
    if not gone and left > MAX_STREAMS:
        wrong.append(f"{left} calls of one connection were open")
    return Outcome(f"{num - left} of {num} refused{', connection closed' if gone else ''}", wrong)


@contextlib.contextmanager
def silent(address: tuple[str, int], num: int) -> Iterator[list[socket.socket]]:
    """Hold so many connections open that never send anything; some may still be waiting for the server to accept."""
    links = []
    try:
        for _ in range(num):
            link = socket.socket()
            links.append(link)
            link.bind((OTHER_PEER, 0))
            link.setblocking(False)
            link.connect_ex(address)
        yield links
    finally:
        for link in links:
            link.close()


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def _flood(target: Target, address: tuple[str, int]) -> Outcome:
    num = 2 * (target.descriptors or 1024)
    with silent(address, num) as links:
        time.sleep(_HOLD_SECONDS)
        states = Counter(_state(link) for link in links)
        descriptors, threads = target.gateway.num_fds(), target.gateway.num_threads()
        wrong = [*_neighbour(target), *_scraped(target)]
    assert states["connected"] + states["closed"] > 100, f"only {states} could be made"
    if threads > MAX_THREADS:
        wrong.append(f"the gateway has {threads} threads")
    log = target.log()
    if "Traceback" in log:
        wrong.append("a traceback is in the log")
    if (lines := log.count("\n")) > MAX_LOG_LINES:
        wrong.append(f"the log has {lines} lines")
    summary = f"{states['connected']} open, {states['closed']} closed, {states['waiting']} wait"
    return Outcome(f"{summary}; {descriptors} fds, {threads} threads", wrong)


def _state(link: socket.socket) -> str:
    """Return whether a connection is ``connected``, ``closed`` by the server, or ``waiting`` to be accepted."""
    try:
        return "closed" if not link.recv(1, socket.MSG_PEEK) else "connected"
    except BlockingIOError:
        return "connected" if _is_writable(link) else "waiting"
    except OSError:
        return "closed"


def _is_writable(link: socket.socket) -> bool:
    poll = select.poll()  # select() accepts no descriptor above 1023
    poll.register(link, select.POLLOUT)
    return bool(poll.poll(0))


def _scraped(target: Target) -> list[str]:
    """Read the gateway's metrics from another address."""
    try:
        with urllib.request.urlopen(f"http://{target.metrics}/metrics", timeout=20) as page:
            return [] if b"process_cpu_seconds_total" in page.read() else ["the metrics are not whole"]
    except OSError as error:
        return [f"the metrics could not be read: {error}"]


def http_connections(target: Target) -> Outcome:
    """Open more silent connections to the HTTP port than the gateway has descriptors."""
    return _flood(target, (target.host, target.port))


def grpc_connections(target: Target) -> Outcome:
    """Open as many silent connections to the gRPC port."""
    return _flood(target, _address(target.grpc))


def metrics_connections(target: Target) -> Outcome:
    """Open as many silent connections to the metrics port."""
    return _flood(target, _address(target.metrics))


def _neighbour(target: Target) -> list[str]:
    """Ask once from another address, over a new connection."""
    body = b'{"model":"%s","prompt":"Once","max_tokens":1}' % MODEL.encode()
    try:
        with Wire(target) as wire:
            wire.send(post(target, body, key=target.neighbour))
            status, _ = wire.first_byte()
    except OSError as error:
        return [f"a new client could not be served: {error}"]
    return [] if status == 200 else [f"a new client was answered with {status}"]


ATTACKS = [
    Attack("streams", streams, max_rss=512),
    Attack("http-connections", http_connections, FEW),
    Attack("grpc-connections", grpc_connections, FEW),
    Attack("metrics-connections", metrics_connections, FEW),
]
