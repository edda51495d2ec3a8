"""Counts the votes of a data-parallel group, and decides who belongs to it. No I/O."""

from .messages import Accepted, Called, Newcomers, Outcome, Refused, ToRank, Verdict, Vote, Want, Welcome

Letters = list[tuple[int, ToRank]]
"""Messages to ranks, in the order in which they are sent."""


class Rounds:
    """Holds what the hub of one group knows. Each member votes once a round; the last vote decides the round.

    Attributes:
        size: Ranks of the group.
        members: The ranks that vote; none before the first ``size`` ranks have come.
    """

    def __init__(self, size: int, rendezvous: str = "") -> None:
        """``rendezvous``: as in :class:`.Welcome`, for the first members."""
        self.size = size
        self._rendezvous = rendezvous
        self.members: set[int] = set()
        self._waiting: set[int] = set()  # connected, and not members
        self._votes: dict[int, Vote] = {}

    def join(self, rank: int) -> Letters:
        """Take a rank that has connected: as a member once the group is complete, or as a newcomer."""
        if rank in self.members or rank in self._waiting:
            return [(rank, Refused(f"rank {rank} of the group has joined already", permanent=False))]
        self._waiting.add(rank)
        letters: Letters = [(rank, Accepted())]
        if self.members:
            return letters + [(member, Newcomers(sorted(self._waiting))) for member in sorted(self.members)]
        return letters + self._admit(self.size, Welcome(0, 0, runs=False, size=self.size, rendezvous=self._rendezvous))

    def leave(self, rank: int) -> bool:
        """Note that a connection has ended. Returns whether the group is lost: a member cannot be missed."""
        self._waiting.discard(rank)
        return rank in self.members

    def vote(self, rank: int, vote: Vote) -> Letters:
        """Take a vote. With the first one of a wave, returns calls for the other ranks; with the last one of a round,
        the outcome for all, and a welcome for new members.

        Raises ``ValueError`` for a vote that the group cannot count: of a rank that is no member, or on another step
        than those of the others.
        """
        if rank not in self.members:
            raise ValueError(f"rank {rank} votes and is no member of the group")
        if other := next((each for each in self._votes.values() if _step_of(each) != _step_of(vote)), None):
            raise ValueError(f"ranks vote on different steps: {other} and {vote} of rank {rank}")
        # The ranks may belong to meshes whose coordinators do not know each other: the hub's call begins a wave without
        # any of them, and a coordinator's start that comes later is stale.
        is_call = vote.step == 0 and not self._votes
        self._votes[rank] = vote
        if self._votes.keys() != self.members:
            return [(member, Called(vote.wave)) for member in sorted(self.members - {rank})] if is_call else []
        votes, self._votes = self._votes, {}
        size = self._agreed_size(votes)
        verdict = _verdict([each for member, each in votes.items() if member < size])
        letters: Letters = [(member, Outcome(vote.wave, vote.step, verdict, size)) for member in sorted(self.members)]
        runs = verdict is Verdict.RUN
        self.size, self.members = size, {member for member in self.members if member < size}
        return letters + self._admit(size, Welcome(vote.wave + (not runs), vote.step if runs else 0, runs, size))

    def _agreed_size(self, votes: dict[int, Vote]) -> int:
        """Return how many ranks the group has from now on: as all members want, if newcomers are there and those that
        leave have no requests."""
        # Ranks learn of another size at different times, and a new one may be lost while it joins: the size changes
        # only in a round in which all name the same.
        targets = {vote.target for vote in votes.values()}
        target = targets.pop()
        if targets or any(votes[rank].want is Want.RUN for rank in range(target, self.size)):
            return self.size
        return target if self._waiting.issuperset(range(self.size, target)) else self.size

    def _admit(self, size: int, welcome: Welcome) -> Letters:
        """Make members of those that wait, if the group then has ``size`` ranks."""
        new = sorted(set(range(size)) - self.members)
        if not self._waiting.issuperset(new):
            return []
        self._waiting.difference_update(new)
        self.members.update(new)
        return [(rank, welcome) for rank in new]


def _step_of(vote: Vote) -> tuple[int, int]:
    return vote.wave, vote.step


def _verdict(votes: list[Vote]) -> Verdict:
    wants = {vote.want for vote in votes}
    if Want.RUN not in wants:
        return Verdict.REST
    is_beginning = votes[0].step == 0
    return Verdict.HELD if is_beginning and Want.PAUSED in wants else Verdict.RUN
