"""Reads files of API keys: a digest on each line, or tenants in TOML."""

import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from tokenloom.request.errors import InvalidArgument

from .tenant import TenantLimits

_DIGEST = re.compile(r"[0-9a-f]{64}")
_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


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
    tenants = [_tenant(number, entry, field) for number, entry in enumerate(entries, start=1)]
    names = [tenant.name for tenant in tenants]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgument(f"{field}: two tenants have the name {name!r}", field)
    return tenants


def _tenant(number: int, entry: Any, field: str) -> TenantEntry:
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
