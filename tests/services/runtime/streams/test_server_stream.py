"""The server's end of a slotted stream: its credit, its slots, its heartbeats and its ends."""

from tokenloom.services.runtime.peers.hello import HEARTBEAT_SECONDS, NO_CREDIT_SECONDS
from tokenloom.services.runtime.streams.server_stream import Credit


async def test_takes_what_was_granted() -> None:
    credit = Credit(1)
    assert [credit.take(), credit.take()] == [True, False]
    credit.grant(2)
    assert credit.left == 2
    assert [credit.take() for _ in range(3)] == [True, True, False]


def test_credit_is_withheld_only_by_a_peer_that_grants_nothing() -> None:
    now = 100.0
    credit = Credit(read=lambda: now)

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
