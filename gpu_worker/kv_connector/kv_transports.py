"""Makes transports by name."""

from collections.abc import Sequence

from tokenloom.engine_core.kv_transfer.kv_transport import KVTransport

from . import nixl
from .shared_memory import SharedMemoryTransport
from .tcp_socket import TLS, SocketTransport

NAMES = ("shm", "nixl", "socket")
"""Best first; a reader tries them in this order."""


def make_transports(
    names: Sequence[str] = ("auto",),
    *,
    socket_listen: str = "",
    socket_advertise: str = "",
    tls: TLS | None = None,
) -> list[KVTransport]:
    """Make the named transports, in that order.

    Args:
        names: Names out of :data:`NAMES`; ``auto`` stands for all that work on this machine, best first.
        socket_listen: As for :class:`SocketTransport`, with ``socket_advertise`` and ``tls``.

    Raises ``ValueError`` for an unknown name, or one whose library is not installed.
    """
    made: dict[str, KVTransport] = {}
    for name in expanded(names):
        if name not in made:
            made[name] = _make(name, socket_listen, socket_advertise, tls)
    return list(made.values())


def expanded(names: Sequence[str]) -> list[str]:
    """Return the names with ``auto`` replaced by what it stands for on this machine."""
    working = [name for name in NAMES if name != "nixl" or nixl.is_available()]
    return [found for name in names for found in (working if name == "auto" else [name])]


def _make(name: str, socket_listen: str, socket_advertise: str, tls: TLS | None) -> KVTransport:
    if name == "shm":
        return SharedMemoryTransport()
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
