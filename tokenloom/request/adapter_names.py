"""Names of LoRA adapters in requests, and the salt with which an adapter changes the hashes of blocks."""

import hashlib
import re

from .errors import InvalidArgument

MAX_NAME = 128
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]*[A-Za-z0-9])?")
_SALT_BYTES = 16


def check_adapter_name(name: str, field: str) -> str:
    """Return the name. Raises ``InvalidArgument`` naming ``field`` for one that is empty, long or ambiguous.

    A colon separates a model's name from its adapter's, so an adapter's own name has none.
    """
    if len(name) <= MAX_NAME and ".." not in name and _NAME.fullmatch(name):
        return name
    raise InvalidArgument(
        f"{field} must be 1 to {MAX_NAME} letters, digits, '.', '_', '-' and '/', begin and end with a letter or a "
        "digit, and not contain '..'",
        field,
    )


def adapter_salt(salt: bytes, digest: bytes) -> bytes:
    """Return the salt of requests with an adapter.

    ``salt``: that of the tenant; may be empty. ``digest``: SHA-256 of the adapter, 32 bytes; empty for the base model,
    which keeps ``salt``.
    """
    if not digest:
        return salt
    return hashlib.blake2b(salt + digest, digest_size=_SALT_BYTES, person=b"lora adapter").digest()
