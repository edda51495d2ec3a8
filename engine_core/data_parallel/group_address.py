"""The address of a data-parallel group's hub, ``unix:/path`` or ``host:port``; and proofs that the ranks and the hub
know the same secret, without sending it.

Both sides draw a nonce and answer that of the other one with an HMAC (RFC 2104). The proof is bound to the group and
the rank. What follows on the connection is neither encrypted nor authenticated. Workers of the group prove in the same
way that they know a key that follows from the secret; the rows that they exchange then are not encrypted either. So the
network between machines must be private (docs/operate/security.md).
"""

import contextlib
import hashlib
import hmac
import ipaddress
import secrets
import socket
from pathlib import Path
from typing import NamedTuple

from tokenloom.process import unix_socket

from ..data.config import ParallelConfig
from .messages import Challenge, Frames, GroupHello, Proof, Refused, ToHub, ToRank

# A core holds none of the mesh's certificates, and others may reach the hub's port.
_LEAST_BYTES = 16
_PREFIX = "unix:"
CONNECT_SECONDS = 5.0
_BACKLOG = 128


_EVERY_ADDRESS = "0.0.0.0"
_SILENT_SECONDS = 1
"""A machine that is lost closes no connection: the kernel asks it each second whether it is there, and gives up after
two questions."""


def check_address(address: str, *, has_secret: bool = False) -> None:
    """Raise ``ValueError`` for an address that is not understood, or that other hosts can reach without a secret with
    which ranks prove who they are."""
    if address.startswith(_PREFIX):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"data_parallel_address is {address!r}; use unix:/path or host:port")
    if not has_secret and not _is_loopback(host):
        raise ValueError(
            f"data_parallel_address is {address!r}, which other hosts can reach: name a data_parallel_secret_file, or "
            "use unix:/path or 127.0.0.1:port for ranks of one host"
        )


def listen(address: str) -> socket.socket:
    """Return a socket that listens. A unix socket takes the place of the one that an earlier process left. Raises
    ``OSError``."""
    if address.startswith(_PREFIX):
        path = address.removeprefix(_PREFIX)
        listener = unix_socket.listen(path, _BACKLOG, mode=0o600)
        listener.setblocking(True)
        return listener
    host, _, port = address.rpartition(":")
    return socket.create_server((host, int(port)))


def connect(address: str) -> socket.socket:
    """Return a connected socket. Raises ``OSError``."""
    if address.startswith(_PREFIX):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(CONNECT_SECONDS)
        try:
            connection.connect(address.removeprefix(_PREFIX))
        except OSError:
            connection.close()
            raise
    else:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), CONNECT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        notice_loss(connection)
    connection.settimeout(None)
    return connection


def notice_loss(connection: socket.socket) -> None:
    """Let a connection to another host end within three seconds if that host is lost."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3000 * _SILENT_SECONDS)


def worker_host(address: str) -> str:
    """Return the address of this host at which workers of the group's other ranks reach those of this one. Raises
    ``OSError`` if the hub's host is unknown, ``ValueError`` for an address that names no host."""
    if is_of_this_host(address):
        return "127.0.0.1"
    host, _, port = address.rpartition(":")
    if host == _EVERY_ADDRESS:  # by it this host would look like one that the others do not reach
        raise ValueError(
            f"data_parallel_address is {address!r}: name the address at which the other ranks reach rank 0"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # finds the interface; nothing is sent
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


def is_of_this_host(address: str) -> bool:
    """Return whether only processes of this host can reach an address."""
    return address.startswith(_PREFIX) or _is_loopback(address.rpartition(":")[0])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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


class Meeting(NamedTuple):
    """Says where the ranks of a group meet whose cores are in actors of a Ray cluster, on any machines."""

    address: str
    """``HOST:PORT`` of the hub, which runs on the machine of rank 0's client."""
    secret: bytes


def meeting_of(config: ParallelConfig, host: str, *, anew: bool = False) -> Meeting:
    """Return where the ranks of a group meet, for a client on this machine, which other machines reach at ``host``.

    If the configuration names a unix socket, all clients are on this machine: the first one chooses a port and a
    secret, and writes both beside the socket, so that rank 0 is found again after it was lost. ``anew``: choose others,
    because the port is not to be had any more. Raises ``ValueError`` for an address that others reach without a secret,
    ``OSError`` if no port is free.
    """
    address = config.data_parallel_address
    if not chooses_meeting(config):
        secret = read_secret(config.data_parallel_secret_file)
        check_address(address, has_secret=bool(secret))
        return Meeting(address, secret)
    path = Path(f"{address.removeprefix(_PREFIX)}.hub")
    if anew:
        path.unlink(missing_ok=True)
    while not path.exists():
        with socket.create_server((host, 0)) as probe:
            chosen = f"{host}:{probe.getsockname()[1]} {secrets.token_hex(32)}"
        own = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        try:
            own.touch(mode=0o600)
            own.write_text(chosen)
            with contextlib.suppress(FileExistsError):  # another client was first
                path.hardlink_to(own)  # unlike a rename it replaces nothing
        finally:
            own.unlink(missing_ok=True)
    written, secret_text = path.read_text().split()
    return Meeting(written, bytes.fromhex(secret_text))


def chooses_meeting(config: ParallelConfig) -> bool:
    """Return whether the clients of a group choose where its ranks meet, because all clients are on one machine."""
    return config.data_parallel_address.startswith(_PREFIX)


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
