"""Who belongs to a data-parallel group, and what its votes decide."""

import pytest

from tokenloom.engine_core.data_parallel.group_hub import Letters, Rounds
from tokenloom.engine_core.data_parallel.messages import (
    Accepted,
    Called,
    GroupHello,
    Lost,
    Newcomers,
    Outcome,
    Refused,
    Roster,
    Vote,
    VoteVerdict,
    Want,
    Welcome,
)


def complete(size: int) -> Rounds:
    rounds = Rounds(size)
    for rank in range(size):
        rounds.join(rank)
    return rounds


def vote(rounds: Rounds, *wants: Want, step: int = 0, target: int | None = None) -> Letters:
    letters: Letters = []
    for rank, want in enumerate(wants):
        letters = rounds.vote(rank, Vote(5, step, want, rounds.size if target is None else target))
    return letters


def test_the_first_ranks_become_members_together() -> None:
    rounds, welcome = Rounds(2), Welcome(0, 0, runs=False, size=2)
    assert rounds.join(1) == [(1, Accepted())]
    assert rounds.join(0) == [(0, Accepted()), (0, welcome), (1, welcome)]
    assert isinstance(rounds.join(1)[0][1], Refused), "its process is still there"


def test_the_first_vote_of_a_wave_calls_the_other_ranks() -> None:
    rounds = complete(3)
    assert rounds.vote(1, Vote(5, 0, Want.RUN, 3)) == [(0, Called(5)), (2, Called(5))]
    assert rounds.vote(0, Vote(5, 0, Want.IDLE, 3)) == []
    assert len(rounds.vote(2, Vote(5, 0, Want.IDLE, 3))) == 3
    assert rounds.vote(1, Vote(5, 32, Want.RUN, 3)) == [], "all ranks run, and will vote"


@pytest.mark.parametrize(
    ("wants", "step", "verdict"),
    [
        ((Want.RUN, Want.IDLE), 0, VoteVerdict.RUN),
        ((Want.IDLE, Want.IDLE), 32, VoteVerdict.REST),
        ((Want.PAUSED, Want.PAUSED), 32, VoteVerdict.REST),
        ((Want.RUN, Want.PAUSED), 32, VoteVerdict.RUN),
        ((Want.RUN, Want.PAUSED), 0, VoteVerdict.HELD),
    ],
)
def test_one_rank_that_wants_to_run_keeps_all_running_but_begins_no_wave_while_another_is_paused(
    wants: tuple[Want, Want], step: int, verdict: VoteVerdict
) -> None:
    outcome = Outcome(5, step, verdict, 2)
    assert vote(complete(2), *wants, step=step) == [(0, outcome), (1, outcome)]


def test_a_newcomer_is_announced_and_joins_the_wave_that_runs() -> None:
    rounds = complete(1)
    assert rounds.join(1) == [(1, Accepted()), (0, Newcomers([1]))]
    assert vote(rounds, Want.RUN, step=64) == [(0, Outcome(5, 64, VoteVerdict.RUN, 1))], "no member asked for it"
    assert vote(rounds, Want.RUN, step=96, target=2) == [
        (0, Outcome(5, 96, VoteVerdict.RUN, 2)),
        (1, Welcome(5, 96, runs=True, size=2)),
    ]


def test_a_group_grows_only_when_all_newcomers_are_there() -> None:
    rounds = complete(1)
    rounds.join(1)
    assert vote(rounds, Want.IDLE, target=3) == [(0, Outcome(5, 0, VoteVerdict.REST, 1))]
    assert rounds.leave(1) == [], "a newcomer that is lost is no loss for the group"
    rounds.join(1)
    rounds.join(2)
    assert vote(rounds, Want.IDLE, target=3)[1:] == [
        (1, Welcome(6, 0, runs=False, size=3)),
        (2, Welcome(6, 0, runs=False, size=3)),
    ]


def test_a_rank_is_removed_after_its_last_request_and_may_then_leave() -> None:
    rounds = complete(2)
    assert vote(rounds, Want.IDLE, Want.RUN, step=32, target=1)[0][1] == Outcome(5, 32, VoteVerdict.RUN, 2)
    assert vote(rounds, Want.RUN, Want.IDLE, step=64, target=1)[1] == (1, Outcome(5, 64, VoteVerdict.RUN, 1))
    assert rounds.leave(1) == []


def test_the_members_that_are_left_go_on_and_the_lost_one_comes_again() -> None:
    rounds = complete(3)
    assert len(vote(rounds, Want.RUN, Want.IDLE, Want.IDLE)) == 3
    rounds.vote(0, Vote(5, 32, Want.RUN, 3))
    assert rounds.leave(1) == [(0, Lost(6, 3)), (2, Lost(6, 3))]
    assert rounds.vote(2, Vote(5, 32, Want.RUN, 3)) == [], "it was cast before the loss was known"
    assert rounds.vote(0, Vote(6, 0, Want.RUN, 3)) == [(2, Called(6))]
    assert rounds.vote(2, Vote(6, 0, Want.IDLE, 3)) == [(rank, Outcome(6, 0, VoteVerdict.RUN, 3)) for rank in (0, 2)]
    assert rounds.join(1) == [(1, Accepted()), (0, Newcomers([1])), (2, Newcomers([1]))]
    rounds.vote(0, Vote(6, 32, Want.RUN, 3))
    assert rounds.vote(2, Vote(6, 32, Want.IDLE, 3))[2:] == [(1, Welcome(6, 32, runs=True, size=3))]


def hello(rank: int, size: int = 0, wave: int = 0) -> GroupHello:
    return GroupHello("group", rank, {}, workers=[f"127.0.0.1:{9000 + rank}"], size=size, wave=wave)


def test_members_that_share_experts_learn_of_each_change_where_the_others_are() -> None:
    rounds = Rounds(2, lambda: b"nonce")
    rounds.join(0, hello(0))
    roster = Roster(1, [0, 1], [["127.0.0.1:9000"], ["127.0.0.1:9001"]], b"nonce")
    welcome = Welcome(0, 0, runs=False, size=2, roster=roster)
    assert rounds.join(1, hello(1))[1:] == [(0, welcome), (1, welcome)]
    assert vote(rounds, Want.RUN, Want.IDLE)[0][1] == Outcome(5, 0, VoteVerdict.RUN, 2), "no rank has come or gone"
    assert vote(rounds, Want.IDLE, Want.IDLE, step=32, target=1) == [
        (0, Outcome(5, 32, VoteVerdict.REST, 1, Roster(2, [0], [["127.0.0.1:9000"]], b"nonce"))),
        (1, Outcome(5, 32, VoteVerdict.REST, 1)),
    ]
    assert rounds.complain(0, 1) == [], "the members have changed since"
    assert rounds.complain(0, 2) == [(0, Lost(7, 1, Roster(3, [0], [["127.0.0.1:9000"]], b"nonce")))]


def test_another_hub_learns_the_size_and_the_wave_from_those_that_outlived_the_one_before() -> None:
    rounds = Rounds(2)
    rounds.join(0, hello(0))
    assert rounds.join(1, hello(1, size=3, wave=8))[1:] == []
    welcomes = [message for _, message in rounds.join(2, hello(2, size=3, wave=9))[1:]]
    assert [message.wave for message in welcomes if isinstance(message, Welcome)] == [10, 10, 10]
