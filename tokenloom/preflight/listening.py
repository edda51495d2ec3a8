"""Checks that the addresses on which the parts of a mesh will listen are free."""

import socket
from collections.abc import Iterable, Mapping

from tokenloom.process import unix_socket
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.runtime.addresses import Address, parse

from .refusal import CannotServe

_ANY = frozenset({"0.0.0.0", "::", ""})
"""Hosts that stand for all addresses of the machine."""


def check_addresses(
    wanted: Mapping[str, Iterable[str]], counts: Mapping[str, int], gateways: Iterable[Address] = ()
) -> None:
    """Check the addresses that the parts are given by flags.

    Args:
        wanted: The flags of each service, such as ``--metrics-listen=127.0.0.1:9100``.
        counts: How many parts of each service there will be.
        gateways: The addresses of the gateways' HTTP and gRPC ports, which are held already.

    Raises `CannotServe`.
    """
    taken = [(address, "the gateway's --port or --grpc-port") for address in gateways]
    for service, flags in wanted.items():
        for name, value in _listened(flags):
            where = f"{service}: {name} {value}"
            address = _address(where, value)
            if counts.get(service, 1) > 1:
                raise CannotServe(
                    f"{where}: {counts[service]} parts cannot listen on one port: use port 0, which is free for each"
                )
            for other, owner in taken:
                if _overlap(address, other):
                    raise CannotServe(f"{where}: {owner} has the same port: choose another port for one of them")
            taken.append((address, service))
            _try(where, address)


def _overlap(one: Address, other: Address) -> bool:
    """Return whether two sockets that listen exclude each other: on one port, at one host or at all of them."""
    if one.path or other.path:
        return one.path == other.path
    if one.port != other.port:
        return False
    return not _ANY.isdisjoint((one.host, other.host)) or not _numbers(one.host).isdisjoint(_numbers(other.host))


def _numbers(host: str) -> frozenset[str]:
    """Return the IP addresses of a host, of ``localhost`` those of the machine itself; the host if it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # `_try` says what is wrong with it
        return frozenset((host,))
    return frozenset(str(address[0]) for *_, address in found)


def _listened(flags: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Yield the flags that name an address with a fixed port."""
    for each in flags:
        name, _, value = each.partition("=")
        if name.endswith("-listen") and value and not value.endswith(":0"):
            yield name, value


def _address(where: str, value: str) -> Address:
    try:
        return parse(value)
    except InvalidArgument as error:
        raise CannotServe(f"{where}: {error.message}") from None


def _try(where: str, address: Address) -> None:
    if address.path:
        if unix_socket.is_served(address.path):
            raise CannotServe(f"{where}: a process listens there: choose another path")
        return
    probe = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
    with probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except (OSError, OverflowError, UnicodeError, TypeError) as error:  # the last two: no name of a host
            raise CannotServe(
                f"{where}: {getattr(error, 'strerror', None) or error}: choose another address or port"
            ) from None
