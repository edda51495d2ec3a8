"""Makes transports by name."""

from collections.abc import Sequence

from tokenloom.engine_core.kv_transfer.kv_transport import KVTransport

from . import nixl
from .device_transport import DeviceTransport
from .shared_memory import SharedMemoryTransport
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
) -> list[KVTransport]:
    """Make the named transports, in that order.

    Args:
        names: Names out of :data:`NAMES`; ``auto`` stands for all that work on this machine, best first.
        on_host: Whether the pool is memory of the host, or of a device.
        socket_listen: As for :class:`SocketTransport`, with ``socket_advertise`` and ``tls``.

    Raises ``ValueError`` for an unknown name, or one whose library is not installed.
    """
    made: dict[str, KVTransport] = {}
    for name in expanded(names, on_host=on_host):
        if name not in made:
            made[name] = _make(name, socket_listen, socket_advertise, tls)
    return list(made.values())


def expanded(names: Sequence[str], *, on_host: bool = True) -> list[str]:
    """Return the names with ``auto`` replaced by what it stands for on this machine, for a pool of the host or of a
    device."""
    others = _OF_DEVICES if on_host else _OF_HOSTS
    working = [name for name in NAMES if name not in others and (name != "nixl" or nixl.is_available())]
    return [found for name in names for found in (working if name == "auto" else [name])]


def _make(name: str, socket_listen: str, socket_advertise: str, tls: TLS | None) -> KVTransport:
    if name == "shm":
        return SharedMemoryTransport()
    if name == "cuda":
        return DeviceTransport()
    if name == "socket":
        return SocketTransport(socket_listen, socket_advertise, tls)
    if name != "nixl":
        raise ValueError(f"a KV transport is one of auto, {', '.join(NAMES)}, not {name!r}")
    try:
        return nixl.NixlTransport()
    except ImportError as error:
        raise ValueError(
            f"the KV transport nixl needs the nixl package (pip install 'tokenloom[nixl]'): {error}"
        ) from error
