"""API keys of the public edge. Keys are kept and compared as SHA-256 digests, never as text."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from pathlib import Path

import grpc

from tokenloom.request import errors

from .cache_salts import CacheSalts
from .key_file import TenantEntry, read_digests, read_key_file
from .tenant import NO_TENANT, Tenant

_NAME_DIGITS = 16
"""Hex digits of a key's digest by which metrics and logs name it."""


class ApiKeys:
    """Holds the accepted keys and the tenant of each.

    Attributes:
        required: Whether clients need a key.
    """

    def __init__(self, tenants: Mapping[bytes, Tenant], *, required: bool = True) -> None:
        """``tenants``: by the SHA-256 digest of a key."""
        self._tenants = tuple(tenants.items())
        self.required = required

    @property
    def num_tenants(self) -> int:
        """How many tenants the keys belong to."""
        return len({tenant.name for _, tenant in self._tenants})

    @classmethod
    def load(cls, keys: Iterable[str], file: Path | None, salts: CacheSalts | None = None) -> "ApiKeys":
        """Load keys in plain text, and a key file as :func:`read_key_file` reads it.

        A key that belongs to no ``[[tenant]]`` is a tenant of its own, with a cache of its own. Without keys and file
        no key is required; with an empty file no key is accepted. ``salts``: None draws random ones. Raises
        :class:`errors.InvalidArgument` for a wrong file, or a key that two tenants have.
        """
        entries: dict[bytes, TenantEntry | None] = dict.fromkeys(_digest(key.encode()) for key in keys)
        if file is not None:
            for item in read_key_file(file, "api_key_file"):
                _add(entries, item)
        if not entries:
            return cls({}, required=file is not None)
        salts = salts or CacheSalts.draw()
        return cls({digest: _tenant(digest, entry, salts) for digest, entry in entries.items()})

    @classmethod
    def load_admin(cls, keys: Iterable[str], file: Path | None) -> "ApiKeys":
        """Load the keys of the operators, who belong to no tenant: the file has a digest on each line."""
        digests = [_digest(key.encode()) for key in keys]
        if file is not None:
            digests += read_digests(file, "admin_api_key_file")
        return cls(dict.fromkeys(digests, NO_TENANT), required=bool(digests) or file is not None)

    def tenant(self, name: str) -> Tenant | None:
        """Return the tenant of a name; None if no key belongs to it."""
        if not self.required:
            return NO_TENANT if name == NO_TENANT.name else None
        return next((tenant for _, tenant in self._tenants if tenant.name == name), None)

    def authorize(self, authorization: bytes | None) -> Tenant:
        """Return the tenant of the key in an ``authorization`` header. Raises :class:`errors.Unauthenticated`."""
        if not self.required:
            return NO_TENANT
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key:
            raise errors.Unauthenticated("an API key is required: Authorization: Bearer <key>")
        presented = _digest(key.strip())
        # No early exit: the time taken must not reveal which key came close.
        matches = [tenant for digest, tenant in self._tenants if hmac.compare_digest(presented, digest)]
        if not matches:
            raise errors.Unauthenticated("the API key is not valid")
        return matches[0]

    def authorize_metadata(self, details: grpc.HandlerCallDetails) -> Tenant:
        """Return the tenant of a gRPC call in the same way, by the call's metadata."""
        for key, value in details.invocation_metadata or ():
            if key == "authorization":
                return self.authorize(value.encode() if isinstance(value, str) else value)
        return self.authorize(None)


def _add(entries: dict[bytes, TenantEntry | None], item: TenantEntry | bytes) -> None:
    if isinstance(item, bytes):
        entries[item] = None
        return
    for digest in item.digests():
        if digest in entries:
            other = entries[digest]
            where = "as --api-key and" if other is None else f"for tenant {other.name!r} and"
            message = f"api_key_file: one key is given twice: {where} for tenant {item.name!r}"
            raise errors.InvalidArgument(message, "api_key_file")
        entries[digest] = item


def _tenant(digest: bytes, entry: TenantEntry | None, salts: CacheSalts) -> Tenant:
    key = digest.hex()[:_NAME_DIGITS]
    if entry is not None:
        return Tenant(name=entry.name, cache_salt=salts.of(entry.cache or entry.name), limits=entry.limits, key=key)
    # No name in a file contains a colon, so neither this name nor this cache can be one of a file.
    return Tenant(name=f"key:{key}", cache_salt=salts.of(f"key:{digest.hex()}"), key=key)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
