"""The connection of one rank to the hub of its data-parallel group, and the hub: threads beside rank 0 that pass on
votes and notice ranks that are lost.

The hub counts the votes of the group, and decides who belongs to it.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from tokenloom.process.rendezvous_dir import RendezvousDir

from ..core import EngineCore
from ..data.config import ParallelConfig
from .group_address import check_address, connect, is_of_this_host, listen, meeting_place, notice_loss
from .group_secret import challenge_rank, new_nonce, prove_to_hub, read_secret
from .messages import (
    Accepted,
    Called,
    Challenge,
    Frames,
    GroupHello,
    Newcomers,
    Outcome,
    Refused,
    ToHub,
    ToRank,
    Vote,
    VoteVerdict,
    Want,
    Welcome,
    decoder_of,
)

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
        runs = verdict is VoteVerdict.RUN
        self.size, self.members = size, {member for member in self.members if member < size}
        return letters + self._admit(size, Welcome(vote.wave + (not runs), vote.step if runs else 0, runs, size))

    def _agreed_size(self, votes: dict[int, Vote]) -> int:
        """Return how many ranks the group has from now on. It changes to what all members ask for once all new ranks
        have joined and the ranks that leave have no requests."""
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


class GroupHub:
    """Serves one group until :meth:`close`. When a member is lost, all connections end: the other ranks notice at
    once, because none of them can compute without it."""

    def __init__(self, address: str, hello: GroupHello, size: int, secret: bytes = b"") -> None:
        """``hello``: that of rank 0, whose group and facts the other ranks must share. ``secret``: what they must know;
        empty: nothing. Raises ``OSError``."""
        self._hello = hello
        self._secret = secret
        self._listener = listen(address)
        # Workers of one host meet at a file, which other users cannot open.
        self._directory = RendezvousDir() if is_of_this_host(address) else None
        meeting = meeting_place(address) if self._directory is None else str(self._directory.path / "experts")
        self._rounds = Rounds(size, meeting)
        self._lock = threading.Lock()  # of the rounds, and of writing to the ranks
        # The connection that speaks for a rank now. Its predecessor's may still be open, and end later.
        self._ranks: dict[int, Frames[ToHub]] = {}
        self._is_closed = False
        self._decoder = decoder_of(ToHub)
        threading.Thread(target=self._accept, name="group-hub", daemon=True).start()

    def close(self) -> None:
        """End all connections. Idempotent."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for frames in self._ranks.values():
            frames.close()
        if self._directory is not None:
            self._directory.remove()

    def _accept(self) -> None:
        while not self._is_closed:
            connection = None
            try:
                connection, _ = self._listener.accept()
                # A rank that stopped reading would block the thread of another rank, which holds the lock, and with it
                # the group.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_TIMEOUT)
                notice_loss(connection)
                # One thread for each rank, as long as the rank lives: a group has tens of ranks at most.
                threading.Thread(target=self._serve, args=(connection,), name="group-rank", daemon=True).start()
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
            frames.limit(_SEND_SECONDS)  # or connections that say nothing would each keep a thread
            hello = frames.receive()
            if (refused := self._refusal(frames, hello)) is not None:
                frames.send(refused)
                return
            frames.limit(None)
            assert isinstance(hello, GroupHello)
            if not self._join(hello.rank, frames):
                return
            rank = hello.rank
            while True:
                self._take(rank, frames, frames.receive())
        except OSError as error:
            if rank >= 0:
                self._leave(rank, frames, error)
        finally:
            frames.close()

    def _refusal(self, frames: Frames[ToHub], hello: ToHub) -> Refused | None:
        own = self._hello
        if not isinstance(hello, GroupHello):
            return Refused("a rank must say hello first", permanent=True)
        if self._secret and not challenge_rank(frames, self._secret, hello):
            return Refused("the secret of the group is another one; give all ranks the same file", permanent=True)
        if hello.group_id != own.group_id:
            return Refused(f"the group here is {own.group_id!r}, not {hello.group_id!r}", permanent=True)
        for name in sorted({*own.facts, *hello.facts}):
            here, there = own.facts.get(name, "not set"), hello.facts.get(name, "not set")
            if here != there:
                reason = f"{name} is {there!r} on rank {hello.rank} and {here!r} on rank 0 of group {own.group_id!r}"
                return Refused(reason, permanent=True)
        return None

    def _join(self, rank: int, frames: Frames[ToHub]) -> bool:
        with self._lock:
            if self._is_closed:
                return False
            letters = self._rounds.join(rank)
            if letters and isinstance(refused := letters[0][1], Refused):
                frames.send(refused)
                return False
            self._ranks[rank] = frames
            self._send(letters)
            return True

    def _take(self, rank: int, frames: Frames[ToHub], message: ToHub) -> None:
        if not isinstance(message, Vote):
            raise ConnectionError("only votes may follow the hello")
        with self._lock:
            if self._ranks.get(rank) is not frames:
                raise ConnectionError(f"another process is rank {rank} by now")
            try:
                letters = self._rounds.vote(rank, message)
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
            if self._rounds.leave(rank) and not self._is_closed:
                log.info("rank %d of group %s has left (%s)", rank, self._hello.group_id, error)
                self._close()


log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.1


class GroupLink:
    """Keeps a rank in its group. Rank 0 runs the hub too."""

    def __init__(self, address: str, hello: GroupHello, size: int, timeout: float, secret: bytes = b"") -> None:
        """``size``: ranks of the group at its start. ``timeout``: seconds that the hub may take to accept this rank.
        ``secret``: of the group; empty: it has none.

        Raises ``ValueError`` if the group refuses this rank for good, ``OSError`` if its hub cannot be reached in time.
        """
        self._hub = GroupHub(address, hello, size, secret) if hello.rank == 0 else None
        try:
            self._frames = _join(address, hello, secret, time.monotonic() + timeout)
        except BaseException:
            if self._hub is not None:
                self._hub.close()
            raise
        log.info("rank %d has reached its data-parallel group %s", hello.rank, hello.group_id)

    def start(self, on_message: Callable[[ToRank], None], on_lost: Callable[[], None]) -> None:
        """Call ``on_message`` for each message, and ``on_lost`` once when the group is lost, from a thread."""
        threading.Thread(target=self._read, args=(on_message, on_lost), name="group-link", daemon=True).start()

    def cast(self, vote: Vote) -> None:
        """Send a vote."""
        with contextlib.suppress(OSError):  # the thread that reads notices that the group is lost
            self._frames.send(vote)

    def close(self) -> None:
        """Leave the group. Idempotent."""
        if self._hub is not None:
            self._hub.close()
        self._frames.close()

    def _read(self, on_message: Callable[[ToRank], None], on_lost: Callable[[], None]) -> None:
        try:
            while True:
                on_message(self._frames.receive())
        except OSError:
            on_lost()


def _join(address: str, hello: GroupHello, secret: bytes, deadline: float) -> Frames[ToRank]:
    """Say hello until the hub accepts it. Rank 0 may start later, or run on with a group that is about to end."""
    while True:
        try:
            return _say_hello(address, hello, secret, max(_RETRY_SECONDS, deadline - time.monotonic()))
        except OSError as error:
            if time.monotonic() > deadline:
                raise OSError(f"no data-parallel group at {address}: {error}") from None
        time.sleep(_RETRY_SECONDS)


def _say_hello(address: str, hello: GroupHello, secret: bytes, timeout: float) -> Frames[ToRank]:
    """Return the connection if the hub answers within ``timeout`` seconds and accepts this rank.

    Raises ``ValueError`` if the hub refuses it for good, ``OSError`` if another attempt may succeed.
    """
    frames: Frames[ToRank] = Frames(connect(address), decoder_of(ToRank))
    hello = msgspec.structs.replace(hello, nonce=new_nonce() if secret else b"")
    try:
        frames.limit(timeout)
        frames.send(hello)
        answer = frames.receive()
        if secret or isinstance(answer, Challenge):
            answer = prove_to_hub(frames, secret, hello, answer)
        if isinstance(answer, Refused):
            if answer.permanent:
                raise ValueError(f"data parallel: {answer.reason}")
            raise ConnectionRefusedError(answer.reason)
        assert isinstance(answer, Accepted), answer
        frames.limit(None)
    except BaseException:
        frames.close()
        raise
    return frames


def join_group(config: ParallelConfig, core: EngineCore) -> GroupLink:
    """Connect a core that has loaded its model to its data-parallel group. Raises as :class:`GroupLink`, and
    ``ValueError`` for a setting that does not work."""
    if not config.data_parallel_address:
        raise ValueError(
            f"data_parallel_address is empty: the ranks of group {config.group_id!r} need it, because their model has "
            "experts"
        )
    secret = read_secret(config.data_parallel_secret_file)
    check_address(config.data_parallel_address, has_secret=bool(secret))
    hello = GroupHello(config.group_id, config.data_parallel_rank, core.parallel_facts)
    size, timeout = config.data_parallel_size, config.data_parallel_timeout
    return GroupLink(config.data_parallel_address, hello, size, timeout, secret)
