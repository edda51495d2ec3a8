"""API keys: who may use the public edge. Keys are kept and compared as SHA-256 digests, never as text."""

import hashlib
import hmac
import re
from collections.abc import Iterable
from pathlib import Path

import grpc

from ..runtime import errors

_DIGEST = re.compile(r"[0-9a-f]{64}")


class ApiKeys:
    """The accepted keys; with none, everybody may come in."""

    def __init__(self, digests: Iterable[bytes] = ()) -> None:
        self._digests = tuple(digests)

    @classmethod
    def load(cls, keys: Iterable[str], file: Path | None) -> "ApiKeys":
        """From keys in plain text and a file with one hex SHA-256 of a key a line (``#`` starts a comment).

        Raises ``ValueError`` naming the line that is no digest.
        """
        digests = [_digest(key.encode()) for key in keys]
        for number, line in enumerate(file.read_text().splitlines() if file else (), start=1):
            word = line.partition("#")[0].strip().lower()
            if word and not _DIGEST.fullmatch(word):
                raise ValueError(f"line {number} of the API key file is not the hex SHA-256 of a key")
            if word:
                digests.append(bytes.fromhex(word))
        return cls(digests)

    def authorize(self, authorization: bytes | None) -> None:
        """Checks the value of an ``authorization`` header. Raises :class:`errors.Unauthenticated`."""
        if not self._digests:
            return
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key:
            raise errors.Unauthenticated("an API key is required: Authorization: Bearer <key>")
        presented = _digest(key.strip())
        # No early exit: the time must not tell which key came close.
        matches = [hmac.compare_digest(presented, digest) for digest in self._digests]
        if not any(matches):
            raise errors.Unauthenticated("the API key is not valid")

    def authorize_call(self, details: grpc.HandlerCallDetails) -> None:
        """The same for a gRPC call's metadata."""
        for key, value in details.invocation_metadata or ():
            if key == "authorization":
                self.authorize(value.encode() if isinstance(value, str) else value)
                return
        self.authorize(None)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
