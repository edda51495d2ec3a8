"""Proves what subsets promise: equal shares for all members, and few moves when one comes or goes."""

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from tokenloom.services.runtime.peers import subset
from tokenloom.services.runtime.peers.subset import ReplicaPosition

MOVES = 2
"""Members that one subset may gain, and lose, when one comes or goes."""

counts = st.integers(1, 120)
sizes = st.integers(1, 64)


def members(count: int) -> list[str]:
    return [f"engine-{number}" for number in range(count)]


def owners(count: int) -> list[str]:
    return [f"output-processor-{number}" for number in range(count)]


def subsets(member_names: list[str], owner_names: list[str], size: int) -> dict[str, set[str]]:
    places = subset.positions(owner_names)
    return {name: set(subset.choose(member_names, places[name], size)) for name in owner_names}


def by_member(chosen: dict[str, set[str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for owner, names in chosen.items():
        for name in names:
            found.setdefault(name, set()).add(owner)
    return found


@given(counts, counts, sizes)
@example(1000, 100, 32)
@example(1, 1, 1)
def test_each_member_is_in_equally_many_subsets(num_members: int, num_owners: int, size: int) -> None:
    chosen = subsets(members(num_members), owners(num_owners), size)
    copies = subset.num_copies(num_members, num_owners, size)
    uses = Counter(name for names in chosen.values() for name in names)
    assert set(uses) == set(members(num_members)), "each is in some"
    if copies < num_owners:
        assert set(uses.values()) == {copies}, "evenly, which is more than within 10 %"
    lengths = {len(names) for names in chosen.values()}
    assert max(lengths) - min(lengths) <= 1


@given(counts, counts, sizes)
def test_no_subset_is_larger_than_asked_unless_members_would_have_less_than_two_owners(
    num_members: int, num_owners: int, size: int
) -> None:
    longest = max(map(len, subsets(members(num_members), owners(num_owners), size).values()))
    assert longest <= max(size, -(-2 * num_members // num_owners))


@given(counts, counts, sizes)
def test_a_mesh_that_fits_has_all_members_in_all_subsets(num_members: int, num_owners: int, more: int) -> None:
    names = members(num_members)
    for chosen in subsets(names, owners(num_owners), num_members + more - 1).values():
        assert chosen == set(names)


@given(st.integers(2, 120), counts, sizes, st.data())
@example(1001, 100, 32, None)
def test_a_member_that_comes_or_goes_moves_few(
    num_members: int, num_owners: int, size: int, data: st.DataObject | None
) -> None:
    names = members(num_members)
    left_out = data.draw(st.sampled_from(names)) if data else names[500]
    fewer = [name for name in names if name != left_out]
    step = abs(subset.num_copies(num_members, num_owners, size) - subset.num_copies(num_members - 1, num_owners, size))
    before, after = subsets(fewer, owners(num_owners), size), subsets(names, owners(num_owners), size)
    for owner in before:
        moves = max(len(before[owner] - after[owner]), len(after[owner] - before[owner]))
        assert moves <= MOVES + step * -(-num_members // num_owners)


@given(counts, st.integers(2, 120), sizes, st.data())
@example(1000, 101, 32, None)
def test_an_owner_that_comes_or_goes_moves_few(
    num_members: int, num_owners: int, size: int, data: st.DataObject | None
) -> None:
    names = owners(num_owners)
    left_out = data.draw(st.sampled_from(names)) if data else names[50]
    fewer = [name for name in names if name != left_out]
    step = abs(subset.num_copies(num_members, num_owners, size) - subset.num_copies(num_members, num_owners - 1, size))
    before = by_member(subsets(members(num_members), fewer, size))
    after = by_member(subsets(members(num_members), names, size))
    for member in before:
        moves = max(len(before[member] - after[member]), len(after[member] - before[member]))
        assert moves <= MOVES + step


def test_the_order_of_the_names_given_does_not_matter() -> None:
    names, place = members(100), ReplicaPosition(3, 10)
    assert subset.choose(names, place, 16) == subset.choose(reversed(names), place, 16)


def test_without_a_position_all_are_chosen() -> None:
    assert sorted(subset.choose(members(9), None, 1)) == members(9)


def test_a_thousand_engines_and_a_hundred_output_processors_need_few_links() -> None:
    chosen = subsets(members(1000), owners(100), 32)
    assert sum(map(len, chosen.values())) == 3000
