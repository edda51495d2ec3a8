"""API keys of the public edge. Keys are kept and compared as SHA-256 digests, never as text."""

import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import grpc

from tokenloom.request import errors

_DIGEST = re.compile(r"[0-9a-f]{64}")


class ApiKeys:
    """Holds the accepted keys.

    Attributes:
        required: Whether clients need a key.
    """

    def __init__(self, digests: Iterable[bytes] = (), *, required: bool = True) -> None:
        self._digests = tuple(digests)
        self.required = required

    @classmethod
    def load(cls, keys: Iterable[str], file: Path | None) -> "ApiKeys":
        """Load keys in plain text, and a file with the hex SHA-256 of one key on each line (``#`` starts a comment).

        Without both no key is required; with an empty file no key is accepted. Raises :class:`errors.InvalidArgument`
        for a file that cannot be read, or naming a line that is not a digest.
        """
        digests = [_digest(key.encode()) for key in keys]
        if file is not None:
            digests += _read_digests(file)
        return cls(digests, required=bool(digests) or file is not None)

    def authorize(self, authorization: bytes | None) -> None:
        """Check the value of an ``authorization`` header. Raises :class:`errors.Unauthenticated`."""
        if not self.required:
            return
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key:
            raise errors.Unauthenticated("an API key is required: Authorization: Bearer <key>")
        presented = _digest(key.strip())
        # No early exit: the time taken must not reveal which key came close.
        matches = [hmac.compare_digest(presented, digest) for digest in self._digests]
        if not any(matches):
            raise errors.Unauthenticated("the API key is not valid")

    def authorize_call(self, details: grpc.HandlerCallDetails) -> None:
        """Check the metadata of a gRPC call in the same way."""
        for key, value in details.invocation_metadata or ():
            if key == "authorization":
                self.authorize(value.encode() if isinstance(value, str) else value)
                return
        self.authorize(None)


def _read_digests(file: Path) -> Iterator[bytes]:
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        raise errors.InvalidArgument(f"api_key_file: cannot read {file.name!r}", "api_key_file") from None
    for number, line in enumerate(lines, start=1):
        word = line.partition("#")[0].strip().lower()
        if word and not _DIGEST.fullmatch(word):
            message = f"api_key_file: line {number} is not the hex SHA-256 of a key"
            raise errors.InvalidArgument(message, "api_key_file")
        if word:
            yield bytes.fromhex(word)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
