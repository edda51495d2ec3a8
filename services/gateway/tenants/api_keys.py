"""API keys of clients, and the files that list them. Keys are kept and compared as SHA-256 digests, never as text."""

import asyncio
import hashlib
import hmac
import logging
import re
import tomllib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeAlias

import grpc
import msgspec
from msgspec import Meta, Struct, structs

from tokenloom.request import errors
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.runtime.host.servicer_edge import Authorize
from tokenloom.services.runtime.peers.certificate import signature

from .tenant import NO_TENANT, CacheSalts, Tenant, TenantLimits

log = logging.getLogger(__name__)

_DIGEST = re.compile(r"[0-9a-f]{64}")
_TENANT_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_Name = Annotated[str, Meta(pattern=f"^{_TENANT_NAME.pattern}$")]
_TENANT: ContextVar[Tenant] = ContextVar("tenant")
_Signature: TypeAlias = tuple[tuple[int, int, int], ...]
CHECK_SECONDS = 1.0
"""How often a key file is looked at."""
_NAME_DIGITS = 16
"""Hex digits of a key's digest by which metrics and logs name it."""


class ApiKeys:
    """Holds the accepted keys and the tenant of each.

    Attributes:
        required: Whether clients need a key.
    """

    def __init__(
        self, tenants: Mapping[bytes, Tenant], *, required: bool = True, plugin: "PluggedKeys | None" = None
    ) -> None:
        """``tenants``: by the SHA-256 digest of a key. ``plugin`` knows further keys; None: there are none."""
        self._tenants = tuple(tenants.items())
        self.required = required or plugin is not None
        self._plugin = plugin

    @property
    def are_shared(self) -> bool:
        """Whether the keys belong, or may belong, to several tenants."""
        return self._plugin is not None or len({tenant.name for _, tenant in self._tenants}) > 1

    @classmethod
    def load(
        cls,
        keys: Iterable[str],
        file: Path | None,
        salts: CacheSalts | None = None,
        plugin: "PluggedKeys | None" = None,
    ) -> "ApiKeys":
        """Load keys in plain text, and a key file as :func:`read_key_file` reads it.

        A key that belongs to no ``[[tenant]]`` is a tenant of its own, with a cache of its own. Without keys, file and
        ``plugin`` no key is required; with an empty file no key is accepted. ``salts``: None draws random ones. Raises
        :class:`errors.InvalidArgument` for a wrong file, or a key that two tenants have.
        """
        entries: dict[bytes, TenantEntry | None] = dict.fromkeys(_digest(key.encode()) for key in keys)
        if file is not None:
            for item in read_key_file(file, "api_key_file"):
                _add(entries, item)
        if not entries:
            return cls({}, required=file is not None, plugin=plugin)
        salts = salts or CacheSalts.draw()
        return cls({digest: _tenant(digest, entry, salts) for digest, entry in entries.items()}, plugin=plugin)

    @classmethod
    def load_admin(cls, keys: Iterable[str], file: Path | None) -> "ApiKeys":
        """Load the keys of the operators, who belong to no tenant: the file has a digest on each line."""
        digests = [_digest(key.encode()) for key in keys]
        if file is not None:
            digests += read_digests(file, "admin_api_key_file")
        return cls(dict.fromkeys(digests, NO_TENANT), required=bool(digests) or file is not None)

    async def follow(self, file: Path, load: Callable[[], "ApiKeys"]) -> NoReturn:
        """Accept what ``load`` returns whenever the file has changed, without end.

        A file that cannot be used leaves the keys as they are, and is logged once.
        """
        used = last = _signature(file)
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            before, last = last, _signature(file)
            # Only when it has stayed so for a moment: half of a file, or none, would refuse every client meanwhile.
            if last is None or last == used or last != before:
                continue
            used = last
            try:
                self._tenants = load()._tenants
            except InvalidArgument as error:
                log.warning("the keys stay as they are: %s", error.message)
            except Exception as error:  # it must not end the gateway, and its text may hold what stands in the file
                log.warning("the keys stay as they are: %s", type(error).__name__)
            else:
                log.info("read %d keys from %s", len(self._tenants), file)

    def tenant(self, name: str) -> Tenant | None:
        """Return the tenant of a name; None if no key belongs to it."""
        if not self.required:
            return NO_TENANT if name == NO_TENANT.name else None
        found = next((tenant for _, tenant in self._tenants if tenant.name == name), None)
        return found if found is not None or self._plugin is None else self._plugin.tenant(name)

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
        if matches:
            return matches[0]
        if self._plugin is None or (name := self._plugin.owner(key.strip())) is None:
            raise errors.Unauthenticated("the API key is not valid")
        # A tenant of the file keeps its limits and its cache for every holder of its key.
        tenant = self.tenant(name)
        assert tenant is not None, "a plugin's names are tenants"
        return structs.replace(tenant, key=presented.hex()[:_NAME_DIGITS])

    def authorize_metadata(self, details: grpc.HandlerCallDetails) -> Tenant:
        """Return the tenant of a gRPC call in the same way, by the call's metadata."""
        for key, value in details.invocation_metadata or ():
            if key == "authorization":
                return self.authorize(value.encode() if isinstance(value, str) else value)
        return self.authorize(None)


class PluggedKeys:
    """Knows keys by a plugin of the kind ``authentication``: a function that takes a key, a text, and returns the name
    of the tenant that it belongs to, or None. It is called for each request, in the gateway's event loop."""

    def __init__(self, named: str, find: Callable[[str], str | None], salts: CacheSalts) -> None:
        """``named``: the plugin, as ``PACKAGE:NAME``."""
        self._named = named
        self._find = find
        self._salts = salts

    def owner(self, key: bytes) -> str | None:
        """Return the name of the tenant of a key; None: nobody's. Raises ``Unavailable`` if the plugin fails."""
        try:
            text = key.decode()
        except UnicodeDecodeError:
            return None
        try:
            name = self._find(text)
            if name is not None and not (isinstance(name, str) and _TENANT_NAME.fullmatch(name)):
                raise ValueError("it returned something else than a tenant's name, letters, digits and . _ - only")
        except Exception as error:
            # Without the error's own words, which may be the key: that of a dict that lacks it is.
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{place.filename}, line {place.lineno}"
            log.error("the plugin %s failed: %s in %s", self._named, type(error).__name__, where)
            raise errors.Unavailable("API keys cannot be checked now; retry") from None
        return name

    def tenant(self, name: str) -> Tenant | None:
        """Return the tenant of a name; None for a name that no tenant can have."""
        return Tenant(name=name, cache_salt=self._salts.of(name)) if _TENANT_NAME.fullmatch(name) else None


def _signature(file: Path) -> _Signature | None:
    try:
        return signature((file,))
    except OSError:  # it is being replaced
        return None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class TenantEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant as the file describes it.

    Attributes:
        name: Names the tenant in metrics and logs.
        key_sha256: The digests of its keys, in hex.
        cache: Names the cache that the tenant uses; None: one of its own. Tenants with the same cache share prefixes.
        limits: What the tenant may use.
    """

    name: _Name
    key_sha256: Annotated[tuple[str, ...], Meta(min_length=1)]
    cache: _Name | None = None
    limits: TenantLimits = TenantLimits()

    def digests(self) -> Iterator[bytes]:
        return (bytes.fromhex(digest) for digest in self.key_sha256)


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


def read_digests(file: Path, field: str) -> list[bytes]:
    """Return the SHA-256 digests of a file with one in hex on each line; ``#`` starts a comment.

    ``field``: the option's name, for errors. Raises ``InvalidArgument`` for a file that cannot be read, or naming a
    line that is not a digest.
    """
    return list(_digests(_text(file, field).splitlines(), field))


def read_key_file(file: Path, field: str) -> list[TenantEntry] | list[bytes]:
    """Return the tenants of a file in TOML, or the digests of a file as :func:`read_digests` reads it.

    Raises ``InvalidArgument`` naming the line or the tenant.
    """
    text = _text(file, field)
    if any(line.lstrip().startswith("[") for line in text.splitlines()):
        return _tenants(text, field)
    return list(_digests(text.splitlines(), field))


def _text(file: Path, field: str) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        raise InvalidArgument(f"{field}: cannot read {file.name!r}", field) from None


def _digests(lines: Iterable[str], field: str) -> Iterator[bytes]:
    for number, line in enumerate(lines, start=1):
        word = line.partition("#")[0].strip().lower()
        if word and not _DIGEST.fullmatch(word):
            raise InvalidArgument(f"{field}: line {number} is not the hex SHA-256 of a key", field)
        if word:
            yield bytes.fromhex(word)


def _tenants(text: str, field: str) -> list[TenantEntry]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"{field}: the file is not valid TOML: {_place(error)}", field) from None
    entries = tables.pop("tenant", None)
    if tables:
        raise InvalidArgument(f"{field}: the file may contain only [[tenant]] tables, not {min(tables)!r}", field)
    if not isinstance(entries, list):
        raise InvalidArgument(f"{field}: each tenant must begin with [[tenant]]", field)
    tenants = [_read_tenant(number, entry, field) for number, entry in enumerate(entries, start=1)]
    names = [tenant.name for tenant in tenants]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgument(f"{field}: two tenants have the name {name!r}", field)
    return tenants


def _read_tenant(number: int, entry: Any, field: str) -> TenantEntry:
    name = entry.get("name") if isinstance(entry, dict) else None
    where = f"tenant {number} ({name!r})" if isinstance(name, str) else f"tenant {number}"
    try:
        tenant = msgspec.convert(entry, TenantEntry)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{field}: {where}: {error}", field) from None
    for index, digest in enumerate(tenant.key_sha256):
        if not _DIGEST.fullmatch(digest.lower()):
            raise InvalidArgument(f"{field}: {where}: key_sha256[{index}] is not the hex SHA-256 of a key", field)
    return tenant


def _place(error: tomllib.TOMLDecodeError) -> str:
    """Return where the file is wrong, without the parser's text: it may repeat a part of a key."""
    found = re.search(r"at line \d+, column \d+|at end of document", str(error))
    return found.group() if found else "it cannot be parsed"


def admit_calls(keys: ApiKeys) -> Authorize:
    """Return the function that checks a call's key before its messages are read, and keeps the tenant for the handler.

    gRPC runs each call in a task of its own, from the check to the end of the handler, so the variable belongs to one
    call.
    """

    def admit(details: grpc.HandlerCallDetails) -> None:
        _TENANT.set(keys.authorize_metadata(details))

    return admit


def call_key() -> str:
    """Return the start of the digest of the key of the call that runs this code; empty if no key was accepted."""
    tenant = _TENANT.get(None)
    return "" if tenant is None else tenant.key


# The key is checked in a hook of gRPC that has no access to the handler. Each call has a task of its own, so a context
# variable passes the tenant on, and reading it outside of an admitted call fails.
def call_tenant() -> Tenant:
    """Return the tenant of the call that runs this code. Raises ``LookupError`` outside an admitted call."""
    return _TENANT.get()
