"""Ranks of a data-parallel group in processes of their own: equal tokens, pauses, another size, lost ranks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine_core.data_parallel.cores import Group, start_rank
from tests.engine_core.helpers import make_request
from tokenloom.engine_core.data.errors import EngineConfigError
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens


@pytest.fixture
def group(socket_dir: Path) -> Iterator[Group]:
    made = Group(socket_dir)
    yield made
    made.close()


def expected(prompt: list[int], count: int) -> list[int]:
    return expected_tokens(prompt, count)[-count:]


def test_one_rank_is_busy_while_the_other_is_idle_and_both_rest_afterwards(group: Group) -> None:
    group.add(0, make_request("long", [1, 2, 3], max_tokens=100))
    group.finish()
    group.pump(group.is_resting)
    group.add(1, make_request("other", [4, 5], max_tokens=3))
    group.finish()
    assert group.tokens == {"long": expected([1, 2, 3], 100), "other": expected([4, 5], 3)}
    group.pump(group.is_resting)
    assert group.num_waves == 2


def test_ranks_of_different_meshes_begin_waves_without_a_coordinator(socket_dir: Path) -> None:
    group = Group(socket_dir, has_coordinator=False)
    for rank in (1, 0):
        group.add(rank, make_request(f"r{rank}", [rank, 9], max_tokens=40))
        group.finish()
        group.pump(group.is_resting)
    assert group.tokens == {f"r{rank}": expected([rank, 9], 40) for rank in (0, 1)}
    group.close()


def test_requests_of_both_ranks_are_served_in_one_wave(group: Group) -> None:
    for number in range(20):
        group.add(number % 2, make_request(f"r{number}", [number, 7], max_tokens=5 + number))
    group.finish()
    assert group.tokens == {f"r{number}": expected([number, 7], 5 + number) for number in range(20)}


def test_a_group_grows_and_shrinks_while_it_serves(group: Group) -> None:
    group.add(0, make_request("lasting", [1, 2], max_tokens=200))
    group.start_rank(2, 3)
    for rank in range(2):
        group.ranks[rank].call_utility("resize_group", 3)
    group.pump(lambda: all(state is not None and state.size == 3 for state in group.states))
    group.add(2, make_request("new", [5, 6], max_tokens=40))
    group.finish()
    group.add(0, make_request("last", [3], max_tokens=100))
    for client in group.ranks:
        client.call_utility("resize_group", 2)
    group.pump(lambda: all(state is not None and state.size == 2 for state in group.states))
    assert [state is not None and state.is_member for state in group.states] == [True, True, False]
    group.close_last()
    group.finish()
    assert group.tokens["lasting"] == expected([1, 2], 200)
    assert group.tokens["last"] == expected([3], 100)


def test_a_pause_waits_for_the_wave_and_a_paused_rank_begins_none(group: Group) -> None:
    group.add(0, make_request("a", [1, 2], max_tokens=50))
    group.finish()
    group.call(0, "pause", "keep")
    group.call(1, "pause", "keep")
    group.pump(lambda: not group.num_unanswered)
    group.add(0, make_request("b", [3, 4], max_tokens=5))
    group.call(0, "resume")
    group.add(1, make_request("c", [5, 6], max_tokens=5))
    group.pump(lambda: group.num_waves >= 2 and group.is_resting())  # rank 0 asked for a wave, which was held
    assert not group.ended.keys() & {"b", "c"}
    group.call(1, "resume")
    group.finish()
    assert group.tokens["b"] == expected([3, 4], 5)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_rank_that_is_lost_costs_no_request_and_comes_again(socket_dir: Path, lost: int) -> None:
    """Also rank 0, beside which the hub runs: its requests and those of the others wait for the next one."""
    group = Group(socket_dir, 3, num_blocks=400)
    for rank in range(3):
        group.add(rank, make_request(f"r{rank}", [rank, 2], max_tokens=300))
    group.pump(lambda: all(len(tokens) > 20 for tokens in group.tokens.values()))
    others = {rank: group.ranks[rank].pid for rank in range(3) if rank != lost}
    group.lose(lost)
    group.finish()
    assert group.tokens == {f"r{rank}": expected([rank, 2], 300) for rank in range(3)}
    group.add(lost, make_request("again", [7], max_tokens=40))
    group.finish()
    group.pump(group.is_resting)
    assert {rank: group.ranks[rank].pid for rank in others} == others, "no other core has ended"
    assert all(state is not None and state.size == 3 for state in group.states)
    group.close()


def test_a_rank_with_another_setting_is_refused_by_name(socket_dir: Path) -> None:
    first = start_rank(socket_dir, 0)
    with pytest.raises(EngineConfigError, match=r"block_size is '8' on rank 1 and '4' on rank 0 of group 'data-paral"):
        start_rank(socket_dir, 1, block_size=8)
    first.close()
