"""The first message of every long-lived stream, both ways: who, which incarnation, what it serves."""

from collections.abc import Iterable

from tokenloom.request.errors import FailedPrecondition
from tokenloom.v1 import types_pb2

from .channels import MAX_MESSAGE_BYTES

PROTOCOL_VERSION = 1
HEARTBEAT_SECONDS = 0.5
"""A sender with live slots and nothing to say sends an empty frame this often."""
SILENCE_SECONDS = 2.0
"""A peer with live slots that says nothing for so long is dead."""

_COMPARED = ("model", "weights", "tokenizer", "block_hash_seed", "block_size", "kv_layout", "numerics")


def make_hello(
    peer_id: str,
    epoch: int,
    *,
    fingerprint: types_pb2.Fingerprint | None = None,
    expected_peer_id: str = "",
    expected_epoch: int = 0,
    initial_credit: int = 0,
    features: Iterable[str] = (),
) -> types_pb2.Hello:
    """A Hello of this process. ``expected_*`` name whom it means to talk to; empty: whoever answers."""
    return types_pb2.Hello(
        protocol=PROTOCOL_VERSION,
        peer_id=peer_id,
        epoch=epoch,
        expected_peer_id=expected_peer_id,
        expected_epoch=expected_epoch,
        fingerprint=fingerprint,
        max_message_bytes=MAX_MESSAGE_BYTES,
        initial_credit=initial_credit,
        features=features,
    )


def check_hello(
    hello: types_pb2.Hello,
    *,
    peer_id: str = "",
    epoch: int = 0,
    expected_peer: str | None = None,
    expected_epoch: int | None = None,
    fingerprint: types_pb2.Fingerprint | None = None,
) -> None:
    """Checks a peer's Hello; ``FailedPrecondition`` names the first difference.

    Args:
        peer_id, epoch: Who we are: the peer may say whom it expects. Empty: not compared.
        expected_peer, expected_epoch: Who the peer should be. None: not compared.
        fingerprint: What we serve. None: not compared.
    """
    if hello.protocol != PROTOCOL_VERSION:
        raise FailedPrecondition(f"hello: protocol {hello.protocol}, expected {PROTOCOL_VERSION}")
    if not hello.peer_id:
        raise FailedPrecondition("hello: peer_id is empty")
    if peer_id and hello.expected_peer_id not in ("", peer_id):
        raise FailedPrecondition(f"hello: the peer expects {hello.expected_peer_id!r}, this is {peer_id!r}")
    if epoch and hello.expected_epoch not in (0, epoch):
        raise FailedPrecondition(f"hello: the peer expects another incarnation of {peer_id!r}")
    if expected_peer is not None and hello.peer_id != expected_peer:
        raise FailedPrecondition(f"hello: expected {expected_peer!r}, found {hello.peer_id!r}")
    if expected_epoch is not None and hello.epoch != expected_epoch:
        raise FailedPrecondition(f"hello: {hello.peer_id!r} is another incarnation than expected")
    if fingerprint is not None and (difference := fingerprint_difference(fingerprint, hello.fingerprint)):
        raise FailedPrecondition(f"hello: {hello.peer_id!r} serves something else: {difference}")


def fingerprint_difference(
    ours: types_pb2.Fingerprint, theirs: types_pb2.Fingerprint, fields: Iterable[str] = _COMPARED
) -> str | None:
    """Names the first field in which the two differ; a field that is empty on either side is not compared."""
    for field in fields:
        a, b = getattr(ours, field), getattr(theirs, field)
        if a and b and a != b:
            return f"{field} {_show(a)} against {_show(b)}"
    return None


def _show(value: object) -> str:
    return value.hex()[:12] if isinstance(value, bytes) else repr(value)
