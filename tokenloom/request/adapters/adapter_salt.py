"""Derives the salt of the KV blocks that are computed with a LoRA adapter: no other adapter's requests hit them.

The gateway and the offline API mix it in before a request reaches an engine. The hashes of engines, placement and
leases then distinguish adapters without a rule of their own.
"""

import hashlib

_BYTES = 16


def adapter_salt(salt: bytes, digest: bytes) -> bytes:
    """Return the salt of requests with an adapter.

    ``salt``: that of the tenant; may be empty. ``digest``: SHA-256 of the adapter, 32 bytes; empty for the base model,
    which keeps ``salt``.
    """
    if not digest:
        return salt
    return hashlib.blake2b(salt + digest, digest_size=_BYTES, person=b"lora adapter").digest()
