"""What is taken is held by one owner, and given back once."""

import copy
import pickle

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tokenloom.request.limits import AdmissionLimit, Reservation


def taken(limit: AdmissionLimit, amount: int) -> Reservation:
    reservation = limit.take(amount)
    assert reservation is not None
    return reservation


def test_no_more_is_taken_than_is_free() -> None:
    limit = AdmissionLimit(10)
    seven = taken(limit, 7)
    assert limit.take(4) is None
    assert limit.taken == 7
    taken(limit, 3)
    seven.release()
    assert limit.taken == 3


def test_without_a_size_everything_is_counted() -> None:
    limit = AdmissionLimit(None)
    assert taken(limit, 1 << 40).amount == limit.taken == 1 << 40


def test_another_rule_may_take_beyond_the_size() -> None:
    limit = AdmissionLimit(10)
    with limit.take_anyway(25):
        assert limit.taken == 25
        assert limit.take(1) is None
    assert limit.taken == 0


def test_a_second_release_gives_back_nothing() -> None:
    limit = AdmissionLimit(10)
    first, other = taken(limit, 4), taken(limit, 4)
    first.release()
    first.release()
    assert limit.taken == other.amount == 4


def test_the_old_owner_of_what_was_moved_gives_back_nothing() -> None:
    limit = AdmissionLimit(10)
    old = taken(limit, 4)
    with old:
        new = old.move()
        assert old.amount == 0
    assert limit.taken == 4, "held by the successor"
    new.release()
    assert limit.taken == 0


def test_parts_are_given_back_one_by_one_but_not_more_than_is_held() -> None:
    limit = AdmissionLimit(10)
    whole = taken(limit, 5)
    whole.release(2)
    part = whole.split(2)
    assert (whole.amount, part.amount, limit.taken) == (1, 2, 3)
    with pytest.raises(AssertionError):
        whole.release(2)
    with pytest.raises(AssertionError):
        part.split(3)
    assert limit.taken == 3


def test_only_reservations_of_one_limit_are_joined() -> None:
    limit, other = AdmissionLimit(10), AdmissionLimit(10)
    whole, more = limit.empty(), taken(limit, 3)
    whole.absorb(more)
    assert (whole.amount, more.amount, limit.taken) == (3, 0, 3)
    with pytest.raises(AssertionError):
        whole.absorb(taken(other, 1))
    with pytest.raises(AssertionError):
        whole.absorb(whole)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_not_copied(duplicate: object) -> None:
    assert callable(duplicate)
    reservation = taken(AdmissionLimit(10), 3)
    with pytest.raises(TypeError, match="a reservation"):
        duplicate(reservation)


def test_giving_back_may_release_again() -> None:
    """A limit that wakes a waiting owner from ``give_back`` may end up in the same ``close``."""
    given: list[int] = []

    def give_back(amount: int) -> None:
        given.append(amount)
        reservation.release()

    reservation = Reservation(give_back, 3)
    reservation.release()
    assert given == [3]


class Owners(RuleBasedStateMachine):
    """Takes, moves, splits, joins and releases in any order."""

    reservations: Bundle[Reservation] = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.limit = AdmissionLimit(100)
        self.all: list[Reservation] = []

    def _known(self, *reservations: Reservation) -> tuple[Reservation, ...]:
        self.all += reservations
        return reservations

    @rule(target=reservations, amount=st.integers(0, 60))
    def take(self, amount: int) -> Reservation | MultipleResults[Reservation]:
        free = 100 - self.limit.taken
        reservation = self.limit.take(amount)
        assert (reservation is not None) == (amount <= free)
        return multiple() if reservation is None else self._known(reservation)[0]

    @rule(target=reservations, old=reservations)
    def move(self, old: Reservation) -> Reservation:
        before = old.amount
        new = old.move()
        assert (old.amount, new.amount) == (0, before)
        return self._known(new)[0]

    @rule(target=reservations, old=reservations, data=st.data())
    def split(self, old: Reservation, data: st.DataObject) -> Reservation:
        return self._known(old.split(data.draw(st.integers(0, old.amount))))[0]

    @rule(one=reservations, other=consumes(reservations))
    def absorb(self, one: Reservation, other: Reservation) -> None:
        if one is not other:
            one.absorb(other)
            assert other.amount == 0

    @rule(reservation=reservations)
    def release(self, reservation: Reservation) -> None:
        reservation.release()
        assert reservation.amount == 0

    @invariant()
    def what_is_taken_is_held_once(self) -> None:
        assert self.limit.taken == sum(reservation.amount for reservation in self.all) <= 100


TestOwners = Owners.TestCase
