"""The handshake compares identities and models, and credit limits frames."""

import asyncio

import pytest

from tokenloom.request.errors import FailedPrecondition
from tokenloom.services.engine.kv import kv_reading
from tokenloom.services.gateway.mesh import process_stream, tokenizer_client
from tokenloom.services.output_processor.placement import engine_link
from tokenloom.services.runtime.peers.hello import (
    HEARTBEAT_SECONDS,
    NO_CREDIT_SECONDS,
    PROTOCOL_VERSION,
    SILENCE_SECONDS,
    Credit,
    check_hello,
    fingerprint_difference,
    make_hello,
)
from tokenloom.services.runtime.peers.message_limit import MAX_MESSAGE_BYTES
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


async def test_takes_what_was_granted() -> None:
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


def test_credit_is_withheld_only_by_a_peer_that_grants_nothing() -> None:
    now = 100.0
    credit = Credit(clock=lambda: now)

    def looks(*, wanted: bool, grants: int) -> list[bool]:
        nonlocal now
        seen = []
        for _ in range(30):
            now += HEARTBEAT_SECONDS
            if grants:
                credit.grant(grants)
                while credit.take():
                    pass
            seen.append(credit.is_withheld(wanted=wanted))
        return seen

    assert not any(looks(wanted=False, grants=0))
    assert not any(looks(wanted=True, grants=1)), "a slow peer is not a lost one"
    assert looks(wanted=True, grants=0).index(True) == round(NO_CREDIT_SECONDS / HEARTBEAT_SECONDS) - 1


def test_a_busy_loop_has_more_than_5_seconds() -> None:
    assert 5.0 < SILENCE_SECONDS <= 10.0
    assert process_stream.SILENT_TICKS * HEARTBEAT_SECONDS == SILENCE_SECONDS
    assert engine_link._SILENT_TICKS * engine_link._TICK_SECONDS == SILENCE_SECONDS
    assert min(engine_link.CONNECT_SECONDS, kv_reading.CALL_SECONDS, tokenizer_client.ANSWER_SECONDS) > 5.0
