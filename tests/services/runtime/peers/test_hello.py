"""The handshake compares identities and models, and credit limits frames."""

import pytest

from tokenloom.request.errors import FailedPrecondition
from tokenloom.request.limits import MAX_MESSAGE_BYTES
from tokenloom.services.engine.kv import kv_peers
from tokenloom.services.gateway.mesh import tokenizer_client
from tokenloom.services.output_processor.placement import engine_link
from tokenloom.services.runtime.peers.hello import (
    PROTOCOL_VERSION,
    SILENCE_SECONDS,
    check_hello,
    fingerprint_difference,
    make_hello,
)
from tokenloom.v1.types_pb2 import Fingerprint, Hello


def test_a_hello_names_the_sender_and_what_it_serves() -> None:
    hello = make_hello(
        "e", 7, fingerprint=Fingerprint(model="m"), expected_peer_id="o", expected_epoch=3, initial_credit=8
    )
    assert (hello.protocol, hello.peer_id, hello.epoch) == (PROTOCOL_VERSION, "e", 7)
    assert (hello.expected_peer_id, hello.expected_epoch, hello.initial_credit) == ("o", 3, 8)
    assert hello.max_message_bytes == MAX_MESSAGE_BYTES
    check_hello(hello, peer_id="o", epoch=3, expected_peer="e", expected_epoch=7, fingerprint=Fingerprint(model="m"))


@pytest.mark.parametrize(
    ("change", "check", "named"),
    [
        ({"protocol": 2}, {}, "protocol 2"),
        ({"peer_id": ""}, {}, "peer_id"),
        ({"expected_peer_id": "x"}, {"peer_id": "o"}, "'x'"),
        ({"expected_epoch": 4}, {"peer_id": "o", "epoch": 3}, "earlier or later incarnation"),
        ({}, {"expected_peer": "f"}, "'f'"),
        ({}, {"expected_epoch": 8}, "was restarted"),
        ({}, {"fingerprint": Fingerprint(model="n")}, "model is 'm', expected 'n'"),
        ({}, {"fingerprint": Fingerprint(tokenizer=b"\xff")}, "tokenizer is aa, expected ff"),
    ],
)
def test_differences_are_named(change: dict[str, object], check: dict[str, object], named: str) -> None:
    hello = make_hello("e", 7, fingerprint=Fingerprint(model="m", tokenizer=b"\xaa"))
    hello.MergeFrom(Hello(**change))
    for name in change:
        setattr(hello, name, change[name])
    with pytest.raises(FailedPrecondition, match=named):
        check_hello(hello, **check)


def test_empty_fields_are_not_compared() -> None:
    ours, theirs = Fingerprint(model="m", weights=b"w"), Fingerprint(model="m", tokenizer=b"t", block_size=16)
    assert fingerprint_difference(ours, theirs) is None
    theirs.weights = b"v"
    assert "weights" in (fingerprint_difference(ours, theirs) or "")
    assert fingerprint_difference(ours, theirs, fields=("model", "tokenizer")) is None


def test_a_busy_loop_has_more_than_5_seconds() -> None:
    assert 5.0 < SILENCE_SECONDS <= 10.0
    assert min(engine_link.CONNECT_SECONDS, kv_peers.CALL_SECONDS, tokenizer_client.ANSWER_SECONDS) > 5.0
