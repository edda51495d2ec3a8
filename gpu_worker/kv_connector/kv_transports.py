"""Makes transports by name."""

from collections.abc import Sequence

from tokenloom.engine_core.kv_transfer.kv_transport import KVTransport
from tokenloom.process.plugins import load_part

from . import nixl
from .tcp_socket import TLS, SocketTransport

NAMES = ("cuda", "shm", "nixl", "socket")
"""Best first; a reader tries them in this order."""
_OF_DEVICES = {"cuda"}
"""Move KV only between pools on devices."""
_OF_HOSTS = {"nixl"}
"""Move KV only between pools in memory of hosts."""


def make_transports(
    names: Sequence[str] = ("auto",),
    *,
    on_host: bool = True,
    socket_listen: str = "",
    socket_advertise: str = "",
    tls: TLS | None = None,
    plugins: Sequence[str] = (),
) -> list[KVTransport]:
    """Make the named transports, in that order; ``PACKAGE:NAME`` is a plugin of one of the packages ``plugins``.

    Args:
        names: Names out of :data:`NAMES`; ``auto`` stands for all that work on this machine, best first.
        on_host: Whether the pool is memory of the host, or of a device.
        socket_listen: As for :class:`SocketTransport`, with ``socket_advertise`` and ``tls``.

    Raises ``ValueError`` for an unknown name, or one whose library is not installed.
    """
    made: dict[str, KVTransport] = {}
    for name in expanded(names, on_host=on_host):
        if name not in made:
            made[name] = _make(name, (socket_listen, socket_advertise, tls), plugins)
    return list(made.values())


def expanded(names: Sequence[str], *, on_host: bool = True) -> list[str]:
    """Return the names with ``auto`` replaced by what it stands for on this machine, for a pool of the host or of a
    device."""
    others = _OF_DEVICES if on_host else _OF_HOSTS
    working = [name for name in NAMES if name not in others and (name != "nixl" or nixl.is_available())]
    return [found for name in names for found in (working if name == "auto" else [name])]


_HERE = "tokenloom.gpu_worker.kv_connector"
_TRANSPORTS = {
    "shm": f"{_HERE}.shared_memory:SharedMemoryTransport",
    "cuda": f"{_HERE}.device_transport:DeviceTransport",
    "nixl": f"{_HERE}.nixl:NixlTransport",
}
"""Those that are made without an argument, as those of plugins are."""


def _make(name: str, sockets: tuple[str, str, TLS | None], plugins: Sequence[str]) -> KVTransport:
    if name == "socket":
        return SocketTransport(*sockets)
    if name not in _TRANSPORTS and ":" not in name:
        raise ValueError(f"a KV transport is one of auto, {', '.join(NAMES)}, not {name!r}")
    try:
        made: KVTransport = load_part("kv_transports", name, _TRANSPORTS, plugins)()
        return made
    except ImportError as error:
        raise ValueError(
            f"the KV transport nixl needs the nixl package (pip install 'tokenloom[nixl]'): {error}"
        ) from error
