"""Proves that the ranks of a data-parallel group and its hub know the same secret, without sending it.

Both sides draw a nonce and answer that of the other one with an HMAC (RFC 2104). The proof is bound to the group and
the rank. What follows on the connection is neither encrypted nor authenticated. Workers of the group prove in the same
way that they know a key that follows from the secret; the rows that they exchange then are not encrypted either. So the
network between machines must be private (docs/operate/security.md).
"""

import hashlib
import hmac
import secrets
from pathlib import Path

from .messages import Challenge, Frames, GroupHello, Proof, Refused, ToHub, ToRank

# A core holds none of the mesh's certificates, and others may reach the hub's port.
_LEAST_BYTES = 16


def read_secret(path: str) -> bytes:
    """Return the secret in a file, without blanks around it; empty: no file is named.

    Raises ``ValueError`` for a file that cannot be read, or a secret that could be guessed.
    """
    if not path:
        return b""
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ValueError(f"data_parallel_secret_file: {error}") from None
    if len(secret) < _LEAST_BYTES:
        raise ValueError(
            f"data_parallel_secret_file: {path} holds {len(secret)} bytes; at least {_LEAST_BYTES} are needed, such as "
            "those that `openssl rand -hex 32` prints"
        )
    return secret


def new_nonce() -> bytes:
    """Return a number that is used once."""
    return secrets.token_bytes(32)


def prove_to_hub(frames: Frames[ToRank], secret: bytes, hello: GroupHello, challenge: ToRank) -> ToRank:
    """Check the hub's proof, send this rank's, and return the hub's next message. ``challenge`` is the first one.

    Raises ``ValueError`` if only one side has a secret, or if the hub has another one.
    """
    if isinstance(challenge, Refused):
        return challenge
    if not isinstance(challenge, Challenge):
        raise ValueError("data parallel: this rank has a data_parallel_secret_file and rank 0 has none")
    if not secret:
        raise ValueError("data parallel: rank 0 has a data_parallel_secret_file and this rank has none")
    if not hmac.compare_digest(challenge.proof, _proof(secret, b"hub", hello, challenge.nonce)):
        raise ValueError("data parallel: the secret of rank 0 is another one; give all ranks the same file")
    frames.send(Proof(_proof(secret, b"rank", hello, challenge.nonce)))
    return frames.receive()


def challenge_rank(frames: Frames[ToHub], secret: bytes, hello: GroupHello) -> bool:
    """Prove to a rank that the hub knows the secret, and return whether the rank knows it. Raises ``OSError``."""
    nonce = new_nonce()
    frames.send(Challenge(nonce, _proof(secret, b"hub", hello, nonce)))
    answer = frames.receive()
    return isinstance(answer, Proof) and hmac.compare_digest(answer.proof, _proof(secret, b"rank", hello, nonce))


def peers_key(secret: bytes, nonce: bytes) -> bytes:
    """Return the key by which workers of the group know each other, from a number that the hub has drawn. Without a
    secret the number is the key: at a hub that only this host reaches, every process that may be a rank may also be a
    worker."""
    return hmac.digest(secret, b"experts" + nonce, hashlib.sha256) if secret else nonce


def _proof(secret: bytes, side: bytes, hello: GroupHello, nonce: bytes) -> bytes:
    parts = (side, hello.group_id.encode(), str(hello.rank).encode(), hello.nonce, nonce)
    # With lengths, so that no two lists of parts join to the same bytes. The side is a part: a proof of the hub cannot
    # be sent back to it as a rank's.
    message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hmac.digest(secret, message, hashlib.sha256)
