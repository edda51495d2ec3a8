"""Replicas by address and by name."""

import asyncio

import pytest

from tests.loop_clock import pass_time
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.runtime.addresses import parse_member
from tokenloom.services.runtime.peers import members, subset
from tokenloom.services.runtime.peers.members import WIDE_SECONDS, PeerMembers
from tokenloom.services.runtime.peers.subset import ReplicaPosition


class Zone:
    """Resolves a name whose entries a test changes."""

    def __init__(self) -> None:
        self.entries: list[str] | None = []
        self.looks = asyncio.Semaphore(0)

    async def resolve(self, host: str, port: int) -> list[str]:
        assert (host, port) == ("tokenizer", 7)
        self.looks.release()
        if self.entries is None:
            raise OSError("no answer")
        return self.entries

    async def looked_at(self, times: int = 2) -> None:
        """Return once the second look-up from now has begun: the first has been processed by then."""
        for _ in range(times):
            await self.looks.acquire()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "REFRESH_SECONDS", 0.001)


async def test_a_name_stands_for_whoever_is_there() -> None:
    zone, joined = Zone(), []
    both = PeerMembers(["unix:/fixed", "dns:///tokenizer:7"], zone.resolve)
    async with asyncio.timeout(30):
        task = asyncio.create_task(both.watch(joined.append))
        await zone.looked_at()
        assert joined == ["unix:/fixed"]
        zone.entries = ["10.0.0.2", "10.0.0.1"]
        await zone.looked_at()
        assert joined[1:] == ["10.0.0.1:7", "10.0.0.2:7"]
        zone.entries = ["10.0.0.2", "fd00::1"]
        await zone.looked_at()
        assert joined[3:] == ["[fd00::1]:7"]
        assert "10.0.0.1:7" not in both.chosen
        assert "10.0.0.2:7" in both.chosen
        zone.entries = None
        await zone.looked_at()
        assert "10.0.0.2:7" in both.chosen  # no answer is not the answer that there is none
        zone.entries = ["10.0.0.1"]
        await zone.looked_at()
        assert joined[4:] == ["10.0.0.1:7"]
        assert "unix:/fixed" in both.chosen
        task.cancel()


async def test_a_process_works_with_its_subset_and_for_a_while_with_all() -> None:
    names, joined = [f"unix:/{number}" for number in range(10)], list[str]()
    few = PeerMembers(names, size=4)
    task = asyncio.create_task(few.watch(joined.append))
    await asyncio.sleep(0)
    assert sorted(joined) == names, "all, until the position is known"
    joined.clear()
    few.move(ReplicaPosition(1, 5))
    mine = set(subset.choose(names, ReplicaPosition(1, 5), 4))
    assert (len(mine), joined) == (4, [])
    assert few.chosen == mine
    other = next(name for name in names if name not in mine)
    assert few.is_narrow
    assert [few.is_left_to_others(name) for name in (other, "unix:/elsewhere")] == [True, False]
    few.widen()
    assert few.is_wide
    assert set(joined) == set(names) - mine
    pass_time(WIDE_SECONDS)
    while few.is_wide:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert few.chosen == mine
    task.cancel()


async def test_a_mesh_that_fits_is_never_narrow() -> None:
    names = [f"unix:/{number}" for number in range(4)]
    all_of_them = PeerMembers(names, size=4)
    all_of_them.move(ReplicaPosition(1, 5))
    all_of_them.widen()
    assert (all_of_them.is_narrow, all_of_them.is_wide) == (False, False)
    assert all_of_them.chosen == set(names)


def test_spellings() -> None:
    assert parse_member("dns:///tokenizer.ns.svc:50051") == "dns:///tokenizer.ns.svc:50051"
    assert parse_member("127.0.0.1:1") == "127.0.0.1:1"
    for wrong in ("dns:///tokenizer", "dns:///unix:/x", "dns://tokenizer:1x"):
        with pytest.raises(InvalidArgument):
            parse_member(wrong)
