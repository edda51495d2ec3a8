"""The hub of a data-parallel group: threads beside rank 0 that count the votes of the group, pass them on, notice ranks
that are lost, and decide who belongs to the group."""

import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable

from ..data.config import ParallelConfig
from .group_address import (
    Meeting,
    challenge_rank,
    chooses_meeting,
    listen,
    meeting_of,
    new_nonce,
    notice_loss,
)
from .messages import (
    Accepted,
    Broken,
    Called,
    Ended,
    Frames,
    GroupHello,
    Lost,
    Newcomers,
    Outcome,
    Refused,
    Roster,
    ToHub,
    ToRank,
    Vote,
    VoteVerdict,
    Want,
    Welcome,
    decoder_of,
)

log = logging.getLogger(__name__)

Letters = list[tuple[int, ToRank]]
"""Messages to ranks, in the order in which they are sent."""


class Rounds:
    """Holds what the hub of one group knows. Each member votes once a round; the last vote decides the round.

    Attributes:
        size: Ranks of the group. Of these, some may be lost and not back yet.
        members: The ranks that vote; none before the first ``size`` ranks have come.
        epoch: Counts the changes of the members.
    """

    def __init__(self, size: int, draw_nonce: Callable[[], bytes] = new_nonce) -> None:
        """``draw_nonce``: as :attr:`Roster.nonce`."""
        self.size = size
        self.members: set[int] = set()
        self.epoch = 0
        self._draw_nonce = draw_nonce
        self._waiting: set[int] = set()  # connected, and not members
        self._workers: dict[int, list[str]] = {}  # of ranks that are connected
        self._votes: dict[int, Vote] = {}
        self._known_size = 0  # as members of a group whose hub has ended say
        self._wave = 0  # that runs, or the next one
        self._oldest_wave = 0  # votes on earlier ones were cast before a member was lost

    def join(self, rank: int, hello: GroupHello | None = None) -> Letters:
        """Take a rank that has connected: as a member once the group is complete, or as a newcomer. ``hello``: what it
        said; None: nothing but its number."""
        if rank in self.members or rank in self._waiting:
            return [(rank, Refused(f"rank {rank} of the group has joined already", permanent=False))]
        self._waiting.add(rank)
        self._workers[rank] = [] if hello is None else hello.workers
        letters: Letters = [(rank, Accepted())]
        if self.members:
            return letters + [(member, Newcomers(sorted(self._waiting))) for member in sorted(self.members)]
        if hello is not None and hello.size:  # it outlived an earlier hub, whose group may have changed its size
            self.size = self._known_size = max(self._known_size, hello.size)
            self._wave = self._oldest_wave = max(self._wave, hello.wave + 1)
        if not self._waiting.issuperset(range(self.size)):
            return letters
        admitted = self._admit()
        welcome = Welcome(self._wave, 0, runs=False, size=self.size, roster=self._changed_roster())
        return letters + [(each, welcome) for each in admitted]

    def leave(self, rank: int) -> Letters:
        """Note that a connection has ended. Returns what the members that are left must know, if it was a member's."""
        self._waiting.discard(rank)
        self._workers.pop(rank, None)
        if rank not in self.members:
            return []
        self.members.discard(rank)
        return self._begin_anew()

    def complain(self, rank: int, epoch: int) -> Letters:
        """Let the workers of all members join anew, because one cannot reach another one. What was said of earlier
        members is ignored."""
        return self._begin_anew() if rank in self.members and epoch == self.epoch else []

    def vote(self, rank: int, vote: Vote) -> Letters:
        """Take a vote. With the first one of a wave, returns calls for the other ranks; with the last one of a round,
        the outcome for all, and a welcome for new members.

        Raises ``ValueError`` for a vote that the group cannot count: of a rank that is no member, or on another step
        than those of the others.
        """
        if rank not in self.members:
            raise ValueError(f"rank {rank} votes and is no member of the group")
        if vote.wave < self._oldest_wave:
            return []
        if other := next((each for each in self._votes.values() if _step_of(each) != _step_of(vote)), None):
            raise ValueError(f"ranks vote on different steps: {other} and {vote} of rank {rank}")
        # The ranks may belong to meshes whose coordinators do not know each other: the hub's call begins a wave without
        # any of them, and a coordinator's start that comes later is stale.
        is_call = vote.step == 0 and not self._votes
        self._votes[rank] = vote
        if self._votes.keys() != self.members:
            return [(member, Called(vote.wave)) for member in sorted(self.members - {rank})] if is_call else []
        return self._decide(vote)

    def _decide(self, vote: Vote) -> Letters:
        """Return the outcome of the round whose last vote is this one."""
        votes, self._votes = self._votes, {}
        before, size = self.members, self._agreed_size(votes)
        verdict = _verdict([each for member, each in votes.items() if member < size])
        runs = verdict is VoteVerdict.RUN
        self._wave = vote.wave + (not runs)
        self.size, self.members = size, {member for member in before if member < size}
        admitted = self._admit()
        roster = self._changed_roster() if self.members != before else None
        letters: Letters = [
            (member, Outcome(vote.wave, vote.step, verdict, size, roster if member < size else None))
            for member in sorted(before)
        ]
        welcome = Welcome(self._wave, vote.step if runs else 0, runs, size, roster)
        return letters + [(rank, welcome) for rank in admitted]

    def _agreed_size(self, votes: dict[int, Vote]) -> int:
        """Return how many ranks the group has from now on. It changes to what all members ask for once all new ranks
        have joined and the ranks that leave have no requests."""
        # Ranks learn of another size at different times, and a new one may be lost while it joins: the size changes
        # only in a round in which all name the same.
        targets = {vote.target for vote in votes.values()}
        target = targets.pop()
        if targets or any(vote.want is Want.RUN for rank, vote in votes.items() if rank >= target):
            return self.size
        return target if self._waiting.issuperset(range(self.size, target)) else self.size

    def _admit(self) -> list[int]:
        """Make members of those that wait and belong to the group. Returns them."""
        new = sorted(rank for rank in self._waiting if rank < self.size)
        self._waiting.difference_update(new)
        self.members = self.members.union(new)
        return new

    def _begin_anew(self) -> Letters:
        """Let the members rest at the begin of a wave that none of them has begun."""
        self._votes = {}
        self._wave += 1
        self._oldest_wave = self._wave
        lost = Lost(self._wave, self.size, self._changed_roster())
        return [(member, lost) for member in sorted(self.members)]

    def _changed_roster(self) -> Roster | None:
        """Return the members after they have changed; None: they share no experts."""
        self.epoch += 1
        ranks = sorted(self.members)
        if not all(self._workers[rank] for rank in ranks):
            return None
        return Roster(self.epoch, ranks, [self._workers[rank] for rank in ranks], self._draw_nonce())


def _step_of(vote: Vote) -> tuple[int, int]:
    return vote.wave, vote.step


def _verdict(votes: list[Vote]) -> VoteVerdict:
    wants = {vote.want for vote in votes}
    if Want.RUN not in wants:
        return VoteVerdict.REST
    is_beginning = votes[0].step == 0
    return VoteVerdict.HELD if is_beginning and Want.PAUSED in wants else VoteVerdict.RUN


# vLLM's ranks agree by an all-reduce, which blocks the thread that steps until all have called it, and would need torch
# in a core. With a hub a waiting rank still answers pauses and health checks, and a lost rank shows at once.
_SEND_SECONDS = 5
"""How long a rank may take to read: its link has a thread that does nothing else."""
_SEND_TIMEOUT = _SEND_SECONDS.to_bytes(8, "little") + bytes(8)
_RETRY_SECONDS = 0.1
"""Between two attempts to take a connection, where the system has no descriptor or thread to give."""
_MOST_UNKNOWN = 64
"""Connections that may be saying who they are at the same time; others are closed, and ranks try again."""


class GroupHub:
    """Serves one group until :meth:`close`. When a member is lost, the hub sends that to the others at once, and they
    go on without it until it comes again."""

    def __init__(
        self, address: str, hello: GroupHello, size: int, secret: bytes = b"", *, takes_facts: bool = False
    ) -> None:
        """``hello``: that of rank 0, whose group and facts the other ranks must share. ``secret``: what they must know;
        empty: nothing. ``takes_facts``: the hub was started before rank 0 knew its facts: those of the first rank that
        joins count, as long as any rank is in the group. Raises ``OSError``."""
        self._hello, self._takes_facts = hello, takes_facts
        self._secret = secret
        self._listener = listen(address)
        self._rounds = Rounds(size)
        self._lock = threading.Lock()  # of the rounds, and of writing to the ranks
        # The connection that speaks for a rank now. Its predecessor's may still be open, and end later.
        self._ranks: dict[int, Frames[ToHub]] = {}
        self._is_closed = False
        self._unknown = threading.BoundedSemaphore(_MOST_UNKNOWN)
        self._decoder = decoder_of(ToHub)
        threading.Thread(target=self._accept, name="group-hub", daemon=True).start()

    def close(self) -> None:
        """Tell all ranks that the hub ends as it was asked to, and end their connections. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._send([(rank, Ended()) for rank in self._ranks])
            for frames in self._ranks.values():
                frames.close()

    def _accept(self) -> None:
        while not self._is_closed:
            connection = None
            try:
                connection, _ = self._listener.accept()
                # A rank that stopped reading would block the thread of another rank, which holds the lock, and with it
                # the group.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
                notice_loss(connection)
                if not self._unknown.acquire(blocking=False):
                    connection.close()
                    continue
                # One thread for each rank, as long as the rank lives: a group has tens of ranks at most.
                try:
                    threading.Thread(target=self._serve, args=(connection,), name="group-rank", daemon=True).start()
                except RuntimeError:
                    self._unknown.release()
                    raise
            except (OSError, RuntimeError) as error:  # closed, or the system has no descriptor or thread to give now
                if connection is not None:
                    connection.close()
                if not self._is_closed:
                    log.warning("group %s cannot take a connection: %s", self._hello.group_id, error)
                    time.sleep(_RETRY_SECONDS)

    def _serve(self, connection: socket.socket) -> None:
        frames: Frames[ToHub] = Frames(connection, self._decoder)
        rank = -1
        try:
            hello = self._known(frames)
            if hello is None or not self._join(hello, frames):
                return
            rank = hello.rank
            while True:
                self._take(rank, frames, frames.receive())
        except OSError as error:
            if rank >= 0:
                self._leave(rank, frames, error)
        finally:
            frames.close()

    def _known(self, frames: Frames[ToHub]) -> GroupHello | None:
        """Return the hello of a rank that may be of this group; None: it was refused. Raises ``OSError``."""
        try:
            frames.limit(_SEND_SECONDS)  # or connections that say nothing would each keep a thread
            hello = frames.receive()
            if (refused := self._refusal(frames, hello)) is not None:
                frames.send(refused)
                return None
            frames.limit(None)
        finally:
            self._unknown.release()
        assert isinstance(hello, GroupHello)
        return hello

    def _refusal(self, frames: Frames[ToHub], hello: ToHub) -> Refused | None:
        if not isinstance(hello, GroupHello):
            return Refused("a rank must say hello first", permanent=True)
        if self._secret and not challenge_rank(frames, self._secret, hello):
            return Refused("the secret of the group is another one; give all ranks the same file", permanent=True)
        if hello.group_id != self._hello.group_id:
            return Refused(f"the group here is {self._hello.group_id!r}, not {hello.group_id!r}", permanent=True)
        return None

    def _other_facts(self, hello: GroupHello) -> Refused | None:
        own = self._hello
        for name in sorted({*own.facts, *hello.facts}):
            here, there = own.facts.get(name, "not set"), hello.facts.get(name, "not set")
            if here != there:
                reason = (
                    f"{name} is {there!r} on rank {hello.rank} and {here!r} on rank {own.rank} of group "
                    f"{own.group_id!r}"
                )
                return Refused(reason, permanent=True)
        return None

    def _join(self, hello: GroupHello, frames: Frames[ToHub]) -> bool:
        rank = hello.rank
        with self._lock:
            if self._is_closed:
                return False
            is_first = self._takes_facts and not self._ranks.keys() - {rank}  # its predecessor may not have left yet
            if not is_first and (differs := self._other_facts(hello)) is not None:
                frames.send(differs)
                return False
            letters = self._rounds.join(rank, hello)
            if letters and isinstance(refused := letters[0][1], Refused):
                frames.send(refused)
                return False
            if is_first:
                self._hello = hello
            self._ranks[rank] = frames
            self._send(letters)
            return True

    def _take(self, rank: int, frames: Frames[ToHub], message: ToHub) -> None:
        if not isinstance(message, (Vote, Broken)):
            raise ConnectionError("only votes may follow the hello")
        with self._lock:
            if self._ranks.get(rank) is not frames:
                raise ConnectionError(f"another process is rank {rank} by now")
            try:
                if isinstance(message, Vote):
                    letters = self._rounds.vote(rank, message)
                else:
                    letters = self._rounds.complain(rank, message.epoch)
            except ValueError as error:
                raise ConnectionError(str(error)) from None
            self._send(letters)

    def _send(self, letters: Letters) -> None:
        for rank, message in letters:
            # A rank that cannot be written to is lost: the thread that reads from it says so.
            if (frames := self._ranks.get(rank)) is not None:
                with contextlib.suppress(OSError):
                    frames.send(message)

    def _leave(self, rank: int, frames: Frames[ToHub], error: OSError) -> None:
        with self._lock:
            if self._ranks.get(rank) is not frames:
                # The end of a rank that was removed once arrived after its successor had joined, and took the successor
                # out.
                return  # it was removed from the group, and its successor goes on
            del self._ranks[rank]
            letters = self._rounds.leave(rank)
            if not self._is_closed:
                log.info("rank %d of group %s has left (%s)", rank, self._hello.group_id, error)
                self._send(letters)


_PLACE_LOST = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
"""Another program has the port, or this machine has another address by now."""


def open_meeting(config: ParallelConfig, host: str) -> tuple[Meeting, GroupHub | None]:
    """Return where the ranks of a group meet whose cores Ray places, and its hub if this is the client of rank 0.
    ``host``, errors: as of :func:`.meeting_of`; ``OSError`` also if the hub cannot listen there."""
    meeting = meeting_of(config, host)
    if config.data_parallel_rank:
        return meeting, None
    try:
        return meeting, _start_hub(config, meeting)
    except OSError as error:
        if error.errno not in _PLACE_LOST or not chooses_meeting(config):
            raise
        # While no process listened, the system gave the port to another program. Ranks that know the old one give up in
        # time, and ask again where to meet when they are started anew.
        log.warning("group %s meets at another port than %s: %s", config.group_id, meeting.address, error)
        meeting = meeting_of(config, host, anew=True)
        return meeting, _start_hub(config, meeting)


def _start_hub(config: ParallelConfig, meeting: Meeting) -> GroupHub:
    hello, size = GroupHello(config.group_id, 0, {}), config.data_parallel_size
    return GroupHub(meeting.address, hello, size, meeting.secret, takes_facts=True)
