"""Which ranks of a data-parallel group one mesh runs, and what is refused."""

from pathlib import Path

import pytest

from tokenloom.supervisor.local_ranks import LocalRanks

SOCKET = Path("/run/mesh/group.sock")
GROUP = ("--data-parallel-group", "data-parallel", "--data-parallel-size", "4")


def test_without_a_group_engines_get_no_flags() -> None:
    ranks = LocalRanks(None, None, 0, is_split=False)
    ranks.check()
    assert (ranks.count, ranks.flags(0, SOCKET)) == (0, ())


def test_all_ranks_of_a_group_here_meet_at_a_socket() -> None:
    ranks = LocalRanks(4, None, 0, is_split=False)
    ranks.check()
    assert ranks.count == 4
    assert ranks.flags(3, SOCKET) == (
        *GROUP, "--data-parallel-rank", "3", "--data-parallel-address", "unix:/run/mesh/group.sock",
    )  # fmt: skip


def test_ranks_behind_a_balancer_have_no_address_for_waves() -> None:
    ranks = LocalRanks(4, 2, 2, is_split=True)
    ranks.check()
    assert ranks.flags(1, SOCKET) == (*GROUP, "--data-parallel-rank", "3")


def test_ranks_of_several_machines_meet_where_the_option_says() -> None:
    ranks = LocalRanks(4, 2, 2, is_split=True, address="10.77.0.1:7000")
    ranks.check()
    assert ranks.flags(0, SOCKET)[-2:] == ("--data-parallel-address", "10.77.0.1:7000")


@pytest.mark.parametrize(
    ("ranks", "error"),
    [
        (LocalRanks(None, 2, 0, is_split=False), "need --data-parallel-size"),
        (LocalRanks(4, 2, 0, is_split=False), "--data-parallel-size-local 2 is less than --data-parallel-size 4"),
        (LocalRanks(4, 2, 3, is_split=True), "--data-parallel-start-rank 3 and 2 engines here exceed"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(ranks: LocalRanks, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        ranks.check()
