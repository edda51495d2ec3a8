"""Makes the ids of requests. An id names the output processor that the request was given to, so that any gateway finds
the request; nothing else can be read from it.
"""

import hashlib
import re

MARK_DIGITS = 8
UNKNOWN_MARK = "0" * MARK_DIGITS
"""Of a request that no output processor was connected for."""
_RANDOM_DIGITS = 32
_ID = re.compile(r"[0-9a-f]{40}")  # both parts


def is_request_id(text: str) -> bool:
    """Return whether a client's text has the form of an id."""
    return _ID.fullmatch(text) is not None


def mark_of(peer_id: str) -> str:
    """Return what names an output processor in ids: a digest of its name."""
    return hashlib.blake2s(peer_id.encode(), digest_size=MARK_DIGITS // 2).hexdigest()


def marked(random_digits: str, mark: str) -> str:
    """Return the id of a new request. ``random_digits``: 128 random bits in hexadecimal digits."""
    assert len(random_digits) == _RANDOM_DIGITS
    return random_digits + mark


def mark_in(request_id: str) -> str:
    """Return the mark in an id; empty for one of several prompts, which are spread."""
    return request_id[_RANDOM_DIGITS:] if len(request_id) == _RANDOM_DIGITS + MARK_DIGITS else ""


def id_of_key(tenant: str, key: str) -> str:
    """Return the id of the request that a tenant's idempotency key stands for."""
    digits = (_RANDOM_DIGITS + MARK_DIGITS) // 2
    # The tenant is part of the id: two tenants with the same key must not meet in one request.
    return hashlib.blake2b(key.encode(), key=hashlib.sha256(tenant.encode()).digest(), digest_size=digits).hexdigest()


def rank(request_id: str, mark: str) -> tuple[bool, bytes]:
    """Return a key that sorts output processors: the one that the id names, then all others in an order that every
    gateway computes alike (rendezvous hashing)."""
    digest = hashlib.blake2s(f"{request_id} {mark}".encode(), digest_size=8).digest()
    return mark != mark_in(request_id), digest
