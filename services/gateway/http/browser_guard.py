"""Refuses requests that web pages of other sites can send from the browsers of a machine that reaches the gateway."""

import ipaddress
from collections.abc import Collection, Mapping
from functools import lru_cache

from tokenloom.request import errors
from tokenloom.services.runtime.addresses import Address

_ADVICE = "call it by its own address, set {option} or set API keys"


class BrowserGuard:
    """Checks the Host and Origin of requests without a key.

    A page can send requests to any address, and one whose name was made to resolve to the gateway's address can read
    the answers too. The browser states the name in Host and the page's site in Origin.
    """

    def __init__(self, listen: Address, allowed_hosts: Collection[str], cors_origins: Collection[str]) -> None:
        """Args:
        listen: Where HTTP is served. Browsers do not reach a unix socket, so there every Host is served.
        allowed_hosts: Further names without ports; ``*``: all.
        cors_origins: Origins whose pages may call the API; ``*``: all.
        """
        self._any_host = bool(listen.path) or "*" in allowed_hosts
        self._hosts = {listen.host.lower(), "localhost", *(host.strip("[]").lower() for host in allowed_hosts)}
        # The names under which clients reach all addresses of the machine are unknown, but an address is no name.
        self._any_address = listen.host in ("0.0.0.0", "::")
        self._any_origin = "*" in cors_origins
        self._origins = frozenset(origin.rstrip("/").encode() for origin in cors_origins)
        self._is_served = lru_cache(maxsize=128)(self._check_host)

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise :class:`errors.PermissionDenied` for a Host or an Origin that is not served without a key."""
        host = headers.get(b"host", b"")
        if not self._any_host and not self._is_served(host):
            advice = _ADVICE.format(option="--allowed-hosts")
            raise errors.PermissionDenied(f"This gateway is not served under the request's Host; {advice}.")
        origin = headers.get(b"origin")
        if origin is None or self._any_origin or origin in self._origins:
            return
        # A page whose name was made to resolve to the gateway's address has an Origin that equals its Host, so the Host
        # has to be one of ours as well.
        if origin.partition(b"://")[2] != host:
            advice = _ADVICE.format(option="--cors-origins")
            raise errors.PermissionDenied(f"Pages of this Origin may not call this gateway; {advice}.")

    def _check_host(self, header: bytes) -> bool:
        text = header.decode("latin-1").lower()
        host = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
        if host in self._hosts:
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return self._any_address or address.is_loopback
