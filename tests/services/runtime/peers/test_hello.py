"""The handshake compares identities and models, and credit limits frames."""

import asyncio

import pytest

from tokenloom.request.errors import FailedPrecondition
from tokenloom.services.runtime.peers.channels import MAX_MESSAGE_BYTES
from tokenloom.services.runtime.peers.hello import (
    PROTOCOL_VERSION,
    Credit,
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


def test_takes_what_was_granted() -> None:
    credit = Credit(1)
    assert [credit.take(), credit.take()] == [True, False]
    credit.grant(2)
    assert credit.left == 2
    assert [credit.take() for _ in range(3)] == [True, True, False]


async def test_waits_for_a_grant() -> None:
    credit = Credit()
    waiter = asyncio.create_task(credit.wait())
    await asyncio.sleep(0)
    assert not waiter.done()
    credit.grant(0)
    await asyncio.sleep(0)
    assert not waiter.done()
    credit.grant(1)
    await waiter
    assert credit.take()


async def test_a_cancelled_wait_takes_nothing() -> None:
    credit = Credit()
    waiter = asyncio.create_task(credit.wait())
    await asyncio.sleep(0)
    waiter.cancel()
    credit.grant(1)
    assert credit.take()
