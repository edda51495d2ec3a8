"""Replicas by address and by name."""

import asyncio

import pytest

from tokenloom.request.errors import InvalidArgument
from tokenloom.services.runtime.peers import members
from tokenloom.services.runtime.peers.addresses import parse_member
from tokenloom.services.runtime.peers.members import Members


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
    both = Members(["unix:/fixed", "dns:///tokenizer:7"], zone.resolve)
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
        assert "10.0.0.1:7" not in both
        assert "10.0.0.2:7" in both
        zone.entries = None
        await zone.looked_at()
        assert "10.0.0.2:7" in both  # no answer is not the answer that there is none
        zone.entries = ["10.0.0.1"]
        await zone.looked_at()
        assert joined[4:] == ["10.0.0.1:7"]
        assert "unix:/fixed" in both
        task.cancel()


def test_spellings() -> None:
    assert parse_member("dns:///tokenizer.ns.svc:50051") == "dns:///tokenizer.ns.svc:50051"
    assert parse_member("127.0.0.1:1") == "127.0.0.1:1"
    for wrong in ("dns:///tokenizer", "dns:///unix:/x", "dns://tokenizer:1x"):
        with pytest.raises(InvalidArgument):
            parse_member(wrong)
