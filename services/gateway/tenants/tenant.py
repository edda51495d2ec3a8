"""Describes a tenant, the owner of API keys, of cached prefixes and of limits, and decides which limits apply and which
salts separate the prefixes."""

import hashlib
import hmac
import logging
import secrets
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from tokenloom.request.errors import InvalidArgument

MAX_SESSIONS = 1024
"""Limit on the open sessions of a gateway; each holds the tokens of at most one context."""
BURST_SECONDS = 60
"""Size of a token bucket without one of its own, as the time in which it fills."""
SHARED_SESSIONS = 256
"""Sessions of one tenant where several share a gateway."""
SHARED_GRAMMARS = 32
"""Grammars of one tenant that wait for their first token where several share a gateway."""
_Count = Annotated[int, Meta(ge=1)]


class TenantLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one tenant at one gateway. None: the tenant has no limit of its own; the gateway's default applies."""

    tokens_per_second: Annotated[float, Meta(gt=0)] | None = None
    """Prompt and output tokens that the tenant may use per second, in the long run."""
    token_burst: _Count | None = None
    """Tokens that the tenant may use at once after it was idle; without a limit per second it has no effect."""
    live_outputs: _Count | None = None
    """Outputs (prompts times n) that may be in work at the same time."""
    sessions: _Count | None = None
    """Sessions of the gRPC API that may be open at the same time."""
    pending_grammars: _Count | None = None
    """Different grammars of requests that may wait for their first token at the same time."""
    body_bytes: _Count | None = None
    """Bytes of request bodies that the gateway may hold at the same time."""


class Tenant(Struct, frozen=True, kw_only=True):
    """A tenant. Cached prefixes are shared exactly between requests with equal salts.

    Attributes:
        name: Identifies the tenant in the mesh, in metrics and in logs; empty where clients need no key.
        cache_salt: Part of the hashes of the tenant's KV blocks, 16 bytes; empty where clients need no key. Secret.
        limits: What the tenant may use.
        key: The start of the SHA-256 of the client's key, in hex: a tenant with several keys has several of these
            objects, which differ in this only. Empty where clients need no key.
    """

    name: str
    cache_salt: bytes
    limits: TenantLimits = TenantLimits()
    key: str = ""

    def __repr__(self) -> str:
        """Leave out the salt, which must not reach a log."""
        return f"Tenant({self.name!r})"


NO_TENANT = Tenant(name="", cache_salt=b"")
"""The tenant of all clients where no key is required."""


def gateway_limits(options: TenantLimits, *, is_shared: bool, max_live: int, max_body_bytes: int) -> TenantLimits:
    """Return the limits of tenants that have none of their own.

    Args:
        options: What the gateway's options set; None: not set.
        is_shared: Whether the gateway has several tenants. A gateway with one tenant has no defaults: its own limits
            protect it.
        max_live: Outputs that may be in work at the gateway.
        max_body_bytes: Bytes of request bodies that the gateway may hold.
    """
    if not is_shared:
        return options
    defaults = TenantLimits(
        live_outputs=max(max_live // 2, 1),
        sessions=SHARED_SESSIONS,
        pending_grammars=SHARED_GRAMMARS,
        body_bytes=max(max_body_bytes // 2, 1),
    )
    return merged(options, defaults)


def merged(own: TenantLimits, defaults: TenantLimits) -> TenantLimits:
    """Return each limit of ``own``, or the default where it has none."""
    chosen = {
        name: getattr(defaults, name) if (value := getattr(own, name)) is None else value
        for name in TenantLimits.__struct_fields__
    }
    return TenantLimits(**chosen)


def with_burst(limits: TenantLimits) -> TenantLimits:
    """Return the limits with the size of the token bucket, if tokens are limited and it is not set."""
    if limits.tokens_per_second is None or limits.token_burst is not None:
        return limits
    return msgspec.structs.replace(limits, token_burst=max(round(limits.tokens_per_second * BURST_SECONDS), 1))


log = logging.getLogger(__name__)

SALT_BYTES = 16
"""Length of a salt: too long to guess, and half a hash, so a salted block never has the hashed bytes of another one."""
MIN_SECRET_BYTES = 16
_CONTEXT = b"tokenloom cache salt\0"


class CacheSalts:
    """Derives one salt for each cache name. Gateways with the same secret derive the same salts."""

    def __init__(self, secret: bytes) -> None:
        """Raises ``InvalidArgument`` for a secret that is too short."""
        if len(secret) < MIN_SECRET_BYTES:
            raise InvalidArgument(
                f"the secret of cache salts must have at least {MIN_SECRET_BYTES} bytes, not {len(secret)}"
            )
        self._secret = secret

    @classmethod
    def load(cls, secret: str, file: Path | None) -> "CacheSalts | None":
        """Read the secret from the option or the file; None if neither is set.

        Spaces and line ends around the secret do not count. Raises ``InvalidArgument`` for a file that cannot be read
        and for a secret that is too short, without repeating the secret.
        """
        if file is not None:
            try:
                return cls(file.read_bytes().strip())
            except OSError:
                raise InvalidArgument(
                    f"cache_salt_secret_file: cannot read {file.name!r}", "cache_salt_secret_file"
                ) from None
        return cls(secret.strip().encode()) if secret else None

    @classmethod
    def draw(cls) -> "CacheSalts":
        """Return salts from a random secret, and log what that costs."""
        log.warning(
            "No secret of cache salts is set (--cache-salt-secret-file), so this gateway uses a random one: "
            "it does not reuse the prefixes that other gateways, or this one before a restart, had computed."
        )
        return cls(secrets.token_bytes(32))

    # With one cache for all keys, cached_tokens and the time to the first token reveal to one client which prompts
    # another one has sent, block by block.
    def of(self, cache: str) -> bytes:
        """Return the salt of a cache's blocks, :data:`SALT_BYTES` bytes."""
        return hmac.digest(self._secret, _CONTEXT + cache.encode(), hashlib.sha256)[:SALT_BYTES]
