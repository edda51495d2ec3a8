"""Joins a Ray cluster, reserves places for workers in it, and notices within three seconds when one of them ends, also
when its machine is lost.

The executor holds a TCP connection to each worker, over which nothing is sent. The kernel of the worker's machine
closes it when the process ends, and answers the keepalive probes until then, however busy the process is; without
answers the kernel on this side gives the connection up.
"""

import selectors
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..data.config import EngineConfig
from ..data.errors import ExecutorFailedError

_PLACEMENT_SECONDS = 60.0
"""How long the cluster may take to make room for the workers."""
_SHARE_OF_NODE = 0.001
"""Of the resource that names a node: a bundle that asks for a share of it is placed there."""


def connect(option: str = "distributed_executor_backend") -> Any:
    """Join the Ray cluster and return the library. ``option``: which one asks for it, for errors.

    Raises ``ValueError`` without Ray or a cluster.
    """
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        import ray
        import ray.util.scheduling_strategies
    except ModuleNotFoundError:
        raise ValueError(f'{option} ray needs Ray; install it with: pip install "tokenloom[ray]"') from None
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError as error:
            raise ValueError(
                f"{option}: there is no Ray cluster; start one with `ray start --head`, and join "
                f"other machines with `ray start --address HOST:6379` ({error})"
            ) from None
    # Ray's own handler ends the process in the middle of its requests.
    if on_terminate is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_terminate)
    return ray


def node_address() -> str:
    """Return the address of this actor's node, at which the other nodes reach it."""
    import ray

    util: Any = ray.util  # without types
    address: str = util.get_node_ip_address()
    return address


def reserve(ray: Any, count: int, gpus: int, *, on_this_machine: bool = False, what: str = "workers") -> Any:
    """Return a placement group with a bundle for each of ``count`` workers, as soon as the cluster has made room.

    ``what``: names in errors what gets a bundle. Raises ``ExecutorFailedError`` if the cluster has no room.
    """
    bundle: dict[str, float] = {"CPU": 1, "GPU": gpus}
    if on_this_machine:
        # Ray has no rule "on this node" for placement groups, but each node owns a resource of its name, of which a
        # thousandth is enough.
        bundle[f"node:{ray.util.get_node_ip_address()}"] = _SHARE_OF_NODE
    group = ray.util.placement_group([bundle] * count)
    if group.wait(_PLACEMENT_SECONDS):
        return group
    resources = ray.available_resources()
    ray.util.remove_placement_group(group)
    free = {name: resources.get(name, 0) for name in ("CPU", "GPU")}
    where = " on the machine of the engine" if on_this_machine else ""
    hint = "; with kv_transports socket and kv_socket_listen they may be on other machines" if on_this_machine else ""
    with_gpus = f" and {gpus} GPUs" if gpus > 1 else " and a GPU" if gpus else ""
    raise ExecutorFailedError(
        f"the Ray cluster has no room for {count} {what} with a CPU{with_gpus} each{where}; "
        f"free in the cluster are {free}{hint}"
    )


def gpus_of_worker(config: EngineConfig, cluster: Mapping[str, float]) -> int:
    """Return how many GPUs each worker gets.

    Args:
        config: Of the engine.
        cluster: What the nodes that have joined the Ray cluster have, by kind.

    Raises ``ValueError`` if the device is to be chosen, and none of these nodes has a GPU: one that has may join later,
    and the machine of the engine's core need not have what the workers have.
    """
    worker = config.worker
    if worker.worker != "model":
        return 0
    if worker.device == "auto" and not cluster.get("GPU"):
        raise ValueError(
            "device: no node that has joined the Ray cluster has a GPU, and others may join later; say which workers "
            "to wait for: cpu or cuda, instead of auto"
        )
    return int(worker.device != "cpu")


_CONNECT_SECONDS = 10.0
# Ray takes tens of seconds to call a silent node dead, and until then every request of the engine waits. A network that
# is silent for two seconds ends the engine instead.
_PROBE_SECONDS = 1
"""Without an answer for so long, the kernel asks, and asks again after as long."""
_SILENCE_MS = 1900
"""A machine that was asked and was silent for so long is lost."""


def open_lifeline(host: str) -> socket.socket:
    """Return a listener of a worker on a free port of ``host``, which is never read: the kernel accepts the executor's
    connection, and ends it with the process. The caller keeps the listener."""
    return socket.create_server((host, 0), backlog=1)


class WorkerLiveness:
    """Holds the connections to all workers of an executor, and watches them from a thread."""

    def __init__(self, addresses: Sequence[tuple[str, int]], on_lost: Callable[[int], None]) -> None:
        """Connect to the listeners, in order of their workers' ranks. ``on_lost``: called once, from the thread, with
        the first rank that ends.

        Raises ``ExecutorFailedError`` if a worker cannot be reached.
        """
        self._on_lost = on_lost
        self._is_closing = False
        self._connections: list[socket.socket] = []
        try:
            for address in addresses:
                self._connections.append(_connect(address))
        except OSError as error:
            self._close_all()
            rank, (host, port) = len(self._connections), addresses[len(self._connections)]
            raise ExecutorFailedError(f"worker {rank} cannot be reached at {host}:{port}: {error}") from None
        self._thread = threading.Thread(target=self._watch, name="worker-monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the connections without a call of ``on_lost``. Idempotent."""
        self._is_closing = True
        for connection in self._connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)  # which wakes the thread
            except OSError:
                continue  # it has ended

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in enumerate(self._connections):
                selector.register(connection, selectors.EVENT_READ, rank)
            lost = next(key.data for key, _ in selector.select())  # nothing is sent, so it is an end
        if not self._is_closing:
            self._on_lost(lost)
        self._close_all()

    def _close_all(self) -> None:
        for connection in self._connections:
            connection.close()


def _connect(address: tuple[str, int]) -> socket.socket:
    connection = socket.create_connection(address, timeout=_CONNECT_SECONDS)
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_SECONDS)
    # It replaces the number of probes (TCP_KEEPCNT), which in whole seconds could not bound the time as closely.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_MS)
    return connection
