"""Checks that the addresses on which the parts of a mesh will listen are free."""

import socket
from collections.abc import Iterable, Mapping

from tokenloom.request.errors import InvalidArgument
from tokenloom.services.runtime.peers.addresses import parse

from .refusal import Refused


def check_addresses(wanted: Mapping[str, Iterable[str]], counts: Mapping[str, int]) -> None:
    """Check the addresses that the parts are given by flags, and that the gateways' ports do not hold.

    Args:
        wanted: The flags of each service, such as ``--metrics-listen=127.0.0.1:9100``.
        counts: How many parts of each service there will be.

    Raises `Refused`.
    """
    taken: dict[str, str] = {}
    for service, flags in wanted.items():
        for name, value in _listened(flags):
            where = f"{service}: {name} {value}"
            if counts.get(service, 1) > 1:
                raise Refused(
                    f"{where}: {counts[service]} parts cannot listen on one port: use port 0, which is free for each"
                )
            if value in taken:
                raise Refused(f"{where}: {taken[value]} has the same port: choose another port for one of them")
            taken[value] = service
            _try(where, value)


def _listened(flags: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Yield the flags that name an address with a fixed port."""
    for each in flags:
        name, _, value = each.partition("=")
        if name.endswith("-listen") and value and not value.endswith(":0"):
            yield name, value


def _try(where: str, value: str) -> None:
    try:
        address = parse(value)
    except InvalidArgument as error:
        raise Refused(f"{where}: {error.message}") from None
    if address.path:
        return
    probe = socket.socket(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
    with probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except (OSError, OverflowError) as error:
            raise Refused(f"{where}: {getattr(error, 'strerror', error)}: choose another address or port") from None
