"""When one rank of a data-parallel group computes."""

from tokenloom.engine_core.data_parallel.messages import Outcome, Vote, VoteVerdict, Want, Welcome
from tokenloom.engine_core.data_parallel.wave_loop import STEPS_BETWEEN_VOTES, Waves, WaveState


class Rank:
    """A rank whose wish is set by the test."""

    def __init__(self, *, welcome: Welcome | None = None) -> None:
        self.want = Want.IDLE
        self.votes: list[Vote] = []
        self.waves = Waves(1, lambda: self.want, self.votes.append)
        if welcome is not None:
            self.waves.welcome(welcome)

    def decide(self, verdict: VoteVerdict, size: int = 2) -> None:
        vote = self.votes[-1]
        self.waves.decided(Outcome(vote.wave, vote.step, verdict, size))


def member(wave: int = 0) -> Rank:
    return Rank(welcome=Welcome(wave, 0, runs=False, size=2))


def test_a_request_begins_a_wave_that_ends_by_a_vote_after_32_steps() -> None:
    rank = member()
    rank.waves.look()
    assert (rank.waves.started, rank.waves.completed, rank.votes) == (None, None, [])
    rank.want = Want.RUN
    rank.waves.look()
    assert rank.votes == [Vote(0, 0, Want.RUN, 2)]
    assert rank.waves.started == 0
    assert not rank.waves.is_running, "it waits for the other ranks"
    rank.decide(VoteVerdict.RUN)
    for _ in range(STEPS_BETWEEN_VOTES):
        assert rank.waves.is_running
        rank.waves.stepped()
    rank.want = Want.IDLE
    assert rank.votes[-1] == Vote(0, 32, Want.RUN, 2)
    rank.decide(VoteVerdict.REST)
    assert (rank.waves.started, rank.waves.completed) == (None, 0)


def test_stale_starts_are_ignored_and_early_ones_are_kept() -> None:
    rank = member(wave=7)
    rank.waves.start(6)
    assert not rank.votes, "wave 6 has ended"
    rank.waves.start(7)
    rank.waves.start(7)
    assert len(rank.votes) == 1
    rank.waves.start(8)  # another rank knows the outcome already
    rank.decide(VoteVerdict.REST)
    assert rank.votes[-1].wave == 8


def test_a_wave_that_a_lost_rank_held_begins_with_the_next_hub() -> None:
    rank = member()
    rank.want = Want.RUN
    rank.waves.look()
    rank.decide(VoteVerdict.HELD)
    assert len(rank.votes) == 1
    rank.waves.break_off()
    rank.waves.welcome(Welcome(5, 0, runs=False, size=2))
    assert rank.votes[-1] == Vote(5, 0, Want.RUN, 2)


def test_a_start_that_overtakes_the_welcome_is_kept() -> None:
    rank = Rank()
    rank.waves.start(0)
    assert not rank.votes
    rank.waves.welcome(Welcome(0, 0, runs=False, size=2))
    assert rank.votes == [Vote(0, 0, Want.IDLE, 2)]


def test_a_request_that_comes_after_the_vote_begins_the_next_wave() -> None:
    rank = member()
    rank.waves.start(0)
    rank.want = Want.RUN
    rank.waves.look()
    rank.decide(VoteVerdict.REST)
    assert rank.votes[-1] == Vote(1, 0, Want.RUN, 2)


def test_a_rank_waits_for_another_one_that_is_paused_and_is_called_when_that_resumes() -> None:
    rank = member()
    rank.want = Want.RUN
    rank.waves.look()
    rank.decide(VoteVerdict.HELD)
    rank.waves.look()
    assert len(rank.votes) == 1, "voting again would change nothing"
    rank.waves.start(1)
    assert rank.votes[-1] == Vote(1, 0, Want.RUN, 2)


def test_a_resume_during_a_vote_is_not_lost() -> None:
    rank = member()
    rank.want = Want.PAUSED
    rank.waves.start(0)
    rank.want = Want.RUN
    rank.waves.call()
    rank.decide(VoteVerdict.HELD)
    assert rank.votes[-1] == Vote(1, 0, Want.RUN, 2)


def test_a_removed_rank_rests_for_good() -> None:
    rank = member()
    rank.waves.resize(1)
    assert rank.votes == [Vote(0, 0, Want.IDLE, 1)]
    rank.decide(VoteVerdict.REST, size=1)
    rank.want = Want.RUN
    rank.waves.look()
    rank.waves.call()
    assert (rank.waves.state, len(rank.votes)) == (WaveState.REMOVED, 1)
