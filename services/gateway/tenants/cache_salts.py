"""Derives the salts of cached prefixes from the mesh's secret."""

import hashlib
import hmac
import logging
import secrets
from pathlib import Path

from tokenloom.request.errors import InvalidArgument

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
