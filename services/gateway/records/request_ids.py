"""The form of the ids of requests, and the tokens by which clients resume and repeat them."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tokenloom.request.errors import InvalidArgument

RANDOM_DIGITS, MARK_DIGITS = 32, 8
"""The two parts of an id; the mark names the output processor that the request was given to."""
_ID = re.compile(r"[0-9a-f]{40}")  # both parts
_OF_ANSWER = re.compile(rf"(?:[a-z]+[-_])*({_ID.pattern}(?:-[0-9]+)?)(?:_[0-9a-f]{{8}})?")


def is_request_id(text: str) -> bool:
    """Return whether a client's text has the form of an id."""
    return _ID.fullmatch(text) is not None


def id_of_answer(text: str) -> str:
    """Return the mesh's id of a request, which an answer's ``id`` has behind a prefix. It may have the number of one of
    several prompts behind it; what else is behind it is of a response whose key was used before. Raises
    ``InvalidArgument``."""
    if (match := _OF_ANSWER.fullmatch(text)) is None:
        raise InvalidArgument("request_id must be the id of an answer: 40 hex digits, behind chatcmpl-", "request_id")
    return match[1]


def id_of_key(tenant: str, key: str) -> str:
    """Return the id of the request that a tenant's idempotency key stands for."""
    digits = (RANDOM_DIGITS + MARK_DIGITS) // 2
    # The tenant is part of the id: two tenants with the same key must not meet in one request.
    return hashlib.blake2b(key.encode(), key=hashlib.sha256(tenant.encode()).digest(), digest_size=digits).hexdigest()


def seed_of(request_id: str) -> int:
    """Return the seed of a request whose client has chosen none: 64 bits of a digest of its id."""
    return int.from_bytes(hashlib.blake2b(request_id.encode(), key=b"seed", digest_size=8).digest(), "little")


MAX_KEY_LENGTH = 255


@dataclass(frozen=True, slots=True)
class ClientPosition:
    """Says how much of one output the client has."""

    num_tokens: int
    num_chars: int
    """Characters of the text, before it was parsed."""
    finished: bool = False
    """The client has the end too."""
    num_prompt_logprobs: int = 0
    """Tokens of the prompt whose log probabilities the client has."""


@dataclass(frozen=True, slots=True)
class ResumeToken:
    """What a client's call claims. Without a fingerprint its request ends with the call or the gateway."""

    request_id: str = ""
    """Empty: a new one is made."""
    fingerprint: bytes = b""
    """Of the body, so that the request can be resumed with an equal body only."""
    resumes: bool = False
    """Continue a request; it must be running or have ended a short time ago."""
    takes_over: bool = False
    """Continue the request if it is known, otherwise begin it."""
    num_delivered: tuple[int, ...] = ()
    """Tokens of each output that the client has, where it resumes a request."""
    recipe: bytes = b""
    """What another gateway needs to continue the request without the client's body; empty: the client repeats it."""
    is_held: bool = False
    """Only a gateway that gets the client's connection continues the request; without that connection it ends."""


NEW = ResumeToken()


def token_of_key(tenant: str, key: str, fingerprint: bytes, field: str) -> ResumeToken:
    """Return the token of a call with an idempotency key. Raises ``InvalidArgument`` naming ``field``."""
    if not 0 < len(key) <= MAX_KEY_LENGTH or not (key.isascii() and key.isprintable()):
        raise InvalidArgument(f"{field} must be 1 to {MAX_KEY_LENGTH} printable ASCII characters", field)
    return ResumeToken(id_of_key(tenant, key), fingerprint, takes_over=True)


def fingerprint(method: str, body: bytes | bytearray) -> bytes:
    """Return what identifies a body. ``method``: what the body was sent to."""
    key = hashlib.blake2b(method.encode(), digest_size=16).digest()
    return hashlib.blake2b(body, key=key, digest_size=16).digest()


def tokens_of(positions: Mapping[int, ClientPosition]) -> tuple[int, ...]:
    """Return how many tokens of each output a client has. ``positions``: by output; it has nothing of the others."""
    return tuple(
        positions[index].num_tokens if index in positions else 0 for index in range(max(positions, default=-1) + 1)
    )
