"""Leases: granted, acquired, released, expired, revoked, and what is answered after their end."""

import itertools

import pytest

from tests.engine_core.kv_transfer.kv_pair import Clock
from tokenloom.engine_core.kv_transfer.kv_transport import KVTransferError
from tokenloom.engine_core.kv_transfer.leases import ANSWER_SECONDS, Lease, LeaseTable, prompt_digest

DIGEST = prompt_digest([1, 2, 3], b"")


class Table(LeaseTable):
    """With a clock, and a pool of eight blocks."""

    def __init__(self) -> None:
        self.clock = Clock()
        numbers = itertools.count()
        super().__init__(30.0, list(range(8)), clock=self.clock, new_id=lambda: b"acquisition-%d" % next(numbers))

    def grant_one(self, name: str = "a", *, kept: bool = True) -> Lease:
        lease = self.grant(name.encode(), name, [3, 1], 7, DIGEST)
        if kept:
            self.publish(lease, 7)
            assert self.keep(name)
        return lease


@pytest.fixture
def table() -> Table:
    return Table()


def reason(call: object, *arguments: object) -> str:
    with pytest.raises(KVTransferError) as error:
        call(*arguments)  # type: ignore[operator]
    return error.value.reason


def test_the_digest_covers_tokens_salt_and_where_one_ends() -> None:
    digests = [
        prompt_digest(tokens, salt)
        for tokens, salt in [([1, 2], b""), ([2, 1], b""), ([1], b""), ([2], b"\1\0\0\0"), ([1, 2], b"x")]
    ]
    assert len(set(digests)) == len(digests)
    assert digests[-1].hex() == "4892d60eb5ba003deeac42829ccfa2a97a8873e08f7ce548d2bddee2302c6347"


def test_a_reader_gets_the_blocks_and_their_generations(table: Table) -> None:
    table.grant_one()
    lease, seconds = table.acquire(b"a", DIGEST)
    assert (lease.block_ids, lease.generations, lease.num_tokens, seconds) == ([3, 1], [3, 1], 7, 30.0)
    assert table.progress(lease.acquisition_id) == (7, 7)
    table.release(lease.acquisition_id, lease.generations)
    assert table.take_freed() == {"a"}
    assert len(table) == 0


def test_another_prompt_or_an_unknown_id_is_refused(table: Table) -> None:
    table.grant_one()
    assert reason(table.acquire, b"a", prompt_digest([1, 2, 4], b"")) == "digest"
    assert reason(table.acquire, b"b", DIGEST) == "not_found"
    assert reason(table.renew, b"acquisition-0") == "not_found"


def test_a_later_reader_supersedes_an_earlier_one(table: Table) -> None:
    table.grant_one()
    first, _ = table.acquire(b"a", DIGEST)
    second, _ = table.acquire(b"a", DIGEST)
    assert reason(table.renew, first.acquisition_id) == "not_found"
    assert reason(table.release, first.acquisition_id, first.generations) == "not_found"
    table.release(second.acquisition_id, second.generations)


def test_a_release_is_answered_the_same_for_a_minute(table: Table) -> None:
    table.grant_one()
    lease, _ = table.acquire(b"a", DIGEST)
    table.release(lease.acquisition_id, lease.generations)
    table.clock.now += ANSWER_SECONDS - 1
    table.release(lease.acquisition_id, lease.generations)
    assert table.take_freed() == {"a"}
    table.clock.now += 2
    table.grant_one("b")
    table.drop("b")
    assert reason(table.release, lease.acquisition_id, lease.generations) == "not_found"


@pytest.mark.parametrize("whose", ["reader", "pool"])
def test_generations_that_differ_make_the_copy_worthless(table: Table, whose: str) -> None:
    table.grant_one()
    lease, _ = table.acquire(b"a", DIGEST)
    generations = list(lease.generations)
    if whose == "reader":
        generations[0] += 1
    else:
        table.generations[1] += 1  # type: ignore[index]
    assert reason(table.release, lease.acquisition_id, generations) == "generation_changed"
    assert reason(table.release, lease.acquisition_id, lease.generations) == "generation_changed"
    assert table.take_freed() == {"a"}


def test_what_is_not_computed_yet_cannot_have_been_read(table: Table) -> None:
    table.publish(table.grant_one(kept=False), 4)
    lease, _ = table.acquire(b"a", DIGEST)
    assert table.progress(lease.acquisition_id) == (4, 7)
    assert reason(table.release, lease.acquisition_id, lease.generations) == "generation_changed"
    assert not table.keep("a")
    assert not table.take_freed()


def test_time_runs_from_the_end_of_the_prefill_and_can_be_renewed(table: Table) -> None:
    granted = table.grant_one(kept=False)
    table.clock.now += 100
    assert table.expire() is None
    table.publish(granted, 7)
    table.keep("a")
    lease, _ = table.acquire(b"a", DIGEST)
    table.clock.now += 20
    assert table.expire() == pytest.approx(10)
    assert table.renew(lease.acquisition_id) == 30.0
    table.clock.now += 29
    assert table.expire() == pytest.approx(1)
    table.clock.now += 1
    assert table.expire() is None
    assert table.take_freed() == {"a"}
    assert reason(table.renew, lease.acquisition_id) == "lease_expired"
    assert reason(table.acquire, b"a", DIGEST) == "lease_expired"


def test_the_oldest_is_revoked_first_and_not_what_still_runs(table: Table) -> None:
    table.grant_one("running", kept=False)
    table.grant_one("old")
    table.grant_one("new")
    assert [table.revoke_oldest() for _ in range(3)] == ["old", "new", None]
    assert not table.any_freed()
    assert reason(table.acquire, b"old", DIGEST) == "lease_revoked"
    assert len(table) == 1


def test_who_can_wait_gets_the_oldest_lease_after_a_while_if_none_ended(table: Table) -> None:
    table.grant_one("old")
    table.clock.now += 2
    table.grant_one("new")
    table.shorten_oldest_lease()
    assert table.expire() == pytest.approx(3)
    table.clock.now += 3
    table.expire()
    assert table.take_freed() == {"old"}
    table.clock.now += 10
    table.expire()
    assert not table.take_freed()
    table.shorten_oldest_lease()
    table.expire()
    assert table.take_freed() == {"new"}


def test_a_prefill_that_starts_anew_is_granted_anew(table: Table) -> None:
    table.grant_one(kept=False)
    lease, _ = table.acquire(b"a", DIGEST)
    table.drop("a")
    assert reason(table.progress, lease.acquisition_id) == "lease_revoked"
    table.grant_one()
    again, _ = table.acquire(b"a", DIGEST)
    table.release(again.acquisition_id, again.generations)


def test_only_a_lease_that_nobody_acquired_is_dropped_with_its_request(table: Table) -> None:
    table.grant_one("a")
    table.grant_one("b")
    table.acquire(b"b", DIGEST)
    for name in ("a", "b", "unknown"):
        table.drop_unacquired(name)
    assert table.take_freed() == {"a"}
    assert len(table) == 1
