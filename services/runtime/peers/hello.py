"""What both ends of a long-lived stream agree on: the first message, the heartbeat and the flow control.

The first message in each direction is a Hello: name, incarnation and what the sender serves. Then the receiver grants
frames, and the sender takes one credit per frame.
"""

from collections.abc import Iterable

from tokenloom.request.errors import FailedPrecondition
from tokenloom.request.limits import MAX_MESSAGE_BYTES
from tokenloom.v1 import types_pb2

PROTOCOL_VERSION = 1
HEARTBEAT_SECONDS = 0.5
"""How often a sender with live slots and no data sends an empty frame."""
SILENCE_SECONDS = 10.0
"""A peer with live slots is considered hung when it has sent no frame for this long. The transport notices one that was
stopped or cut off earlier, within 2.6 s: this must be longer than any time for which an event loop is only busy."""
NO_CREDIT_SECONDS = SILENCE_SECONDS
"""After so long the stream of a peer that grants no credit ends."""
HELLO_SECONDS = SILENCE_SECONDS
"""How long a peer may take to send its Hello."""

MAX_REVISION = 1 << 62
"""Bound of the revisions and incarnations that engines and coordinators believe of each other: each coordinator must be
able to give larger ones."""

PACKED_IDS = "packed_token_ids"
"""Names the feature of a hello whose sender reads ``Prompt.packed_token_ids``."""
LIVE_MOVES = "live_moves"
"""Names the feature of a hello whose sender moves running requests from engine to engine (``KVGrant.moves``)."""
JOURNAL_COPIES = "journal_copies"
"""Names the feature of a hello whose sender, an output processor, keeps ``ProcessInput.journal_copies``."""
QUARANTINE = "quarantine"
"""Names the feature of a hello whose sender, an engine, ends when its tokens are wrong (``EngineInput.quarantine``)."""

_COMPARED = ("model", "weights", "tokenizer", "block_hash_seed", "block_size", "kv_layout", "numerics")
FOREIGN = ("vllm",)
"""First words of the numerics of engines that compute by a server of others."""
SERVED_FIELDS = ("model", "tokenizer")
"""What every part knows of the model that it serves; only engines know the others."""


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
    """Return this process's Hello. ``expected_*`` name the peer that it expects; empty: any peer. ``features``: beside
    those that all parts of this release have."""
    return types_pb2.Hello(
        protocol=PROTOCOL_VERSION,
        peer_id=peer_id,
        epoch=epoch,
        expected_peer_id=expected_peer_id,
        expected_epoch=expected_epoch,
        fingerprint=fingerprint,
        max_message_bytes=MAX_MESSAGE_BYTES,
        initial_credit=initial_credit,
        features=(PACKED_IDS, LIVE_MOVES, *features),
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
    """Check a peer's Hello. Raises ``FailedPrecondition`` naming the first difference.

    Args:
        peer_id, epoch: Our own, to be what the peer expects, if it says so. Empty: not compared.
        expected_peer, expected_epoch: The peer's. None: not compared.
        fingerprint: What we serve. None: not compared.
    """
    if hello.protocol != PROTOCOL_VERSION:
        raise FailedPrecondition(f"hello: protocol {hello.protocol}, expected {PROTOCOL_VERSION}")
    if not hello.peer_id:
        raise FailedPrecondition("hello: peer_id is empty")
    if peer_id and hello.expected_peer_id not in ("", peer_id):
        raise FailedPrecondition(f"hello: the peer expects {hello.expected_peer_id!r}, this is {peer_id!r}")
    if epoch and hello.expected_epoch not in (0, epoch):
        raise FailedPrecondition(f"hello: the peer expects an earlier or later incarnation of {peer_id!r}")
    if expected_peer is not None and hello.peer_id != expected_peer:
        raise FailedPrecondition(f"hello: expected {expected_peer!r}, found {hello.peer_id!r}")
    if expected_epoch is not None and hello.epoch != expected_epoch:
        raise FailedPrecondition(f"hello: {hello.peer_id!r} was restarted: its epoch is not the expected one")
    if fingerprint is not None and (difference := fingerprint_difference(fingerprint, hello.fingerprint)):
        raise FailedPrecondition(f"hello: {hello.peer_id!r} serves a different model: {difference}")


def fingerprint_difference(
    ours: types_pb2.Fingerprint, theirs: types_pb2.Fingerprint, fields: Iterable[str] = _COMPARED
) -> str | None:
    """Return the first field that differs, with both values. A field that is empty on either side is not compared:
    parts without weights leave it empty. Between engines it has a meaning: see :func:`engine_difference`."""
    for field in fields:
        a, b = getattr(ours, field), getattr(theirs, field)
        # Empty means unknown here, so that a mesh of fake workers, which have no weights, still connects.
        if a and b and a != b:
            return f"{field} is {_show(b)}, expected {_show(a)}"
    return None


def misfit_of(encoder: types_pb2.Fingerprint, engines: Iterable[types_pb2.Fingerprint]) -> str:
    """Return in what an encoder differs from each of the engines that serve; empty: it may have the weights of one."""
    differences = [fingerprint_difference(engine, encoder, ("weights",)) for engine in engines]
    return "" if None in differences else next(filter(None, differences), "")


def is_foreign(numerics: str) -> bool:
    """Return whether an engine with these numerics computes by a server of others: it draws other random numbers, and
    does less than an engine of ours."""
    return numerics.partition("/")[0] in FOREIGN


def engine_difference(ours: types_pb2.Fingerprint, theirs: types_pb2.Fingerprint, fields: Iterable[str]) -> str | None:
    """Return the first of ``fields`` in which two engines differ, with both values. An empty field equals only an empty
    one: an engine that does not say which weights it has, because it has none or is of an older release, is like no
    other that does."""
    for field in fields:
        a, b = getattr(ours, field), getattr(theirs, field)
        if a != b:
            return f"{field} is {_show(b)}, expected {_show(a)}"
    return None


def _show(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()[:12] or "empty"
    return repr(value)
