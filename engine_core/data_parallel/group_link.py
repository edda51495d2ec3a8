"""The connection of one rank to the hub of its data-parallel group, also to one that is started again."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable

import msgspec

from ..core import EngineCore
from ..data.config import ParallelConfig
from .group_address import (
    Meeting,
    check_address,
    connect,
    is_of_this_host,
    new_nonce,
    peers_key,
    prove_to_hub,
    read_secret,
    worker_host,
)
from .group_hub import GroupHub
from .messages import (
    Accepted,
    Broken,
    Challenge,
    Frames,
    GroupHello,
    Lost,
    Outcome,
    Refused,
    Roster,
    ToRank,
    Vote,
    Welcome,
    decoder_of,
)

log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.1
"""Between two hellos to a hub that does not answer."""


class GroupLink:
    """Keeps a rank in its group, also in one whose hub has ended and is started again. Rank 0 runs the hub too."""

    def __init__(
        self,
        address: str,
        hello: GroupHello,
        size: int,
        timeout: float,
        secret: bytes = b"",
        *,
        has_hub_elsewhere: bool = False,
    ) -> None:
        """``size``: ranks of the group at its start. ``timeout``: seconds that the hub may take to accept this rank.
        ``secret``: of the group; empty: it has none. ``has_hub_elsewhere``: rank 0 runs no hub either.

        Raises ``ValueError`` if the group refuses this rank for good, ``OSError`` if its hub cannot be reached in time.
        """
        self.address, self._hello, self._timeout, self._secret = address, hello, timeout, secret
        self._workers, self._known = hello.workers, (0, 0)  # the size of the group and its wave
        runs_hub = hello.rank == 0 and not has_hub_elsewhere
        self._hub = GroupHub(address, hello, size, secret) if runs_hub else None
        self._is_closed = False
        self._is_muted = False
        self._connection = 0  # counts the connections to a hub
        self._may_join = threading.Event()
        self._may_join.set()
        self._lock = threading.Lock()  # of what the next connection says, and of the change to it
        try:
            self._join()
        except BaseException:
            if self._hub is not None:
                self._hub.close()
            raise
        log.info("rank %d has reached its data-parallel group %s", hello.rank, hello.group_id)

    def start(self, on_message: Callable[[ToRank, int], None], on_lost: Callable[[bool], None]) -> None:
        """Call ``on_message`` for each message, from a thread, with the number of the connection that it came by. Call
        ``on_lost`` when the connection has ended, with False; a welcome follows if the hub is reached again, and a call
        with True if it is not."""
        threading.Thread(target=self._read, args=(on_message, on_lost), name="group-link", daemon=True).start()

    def cast(self, vote: Vote) -> None:
        """Send a vote."""
        self._send(vote)

    def complain(self, epoch: int) -> None:
        """Say that a worker cannot reach another one of the roster with this epoch."""
        self._send(Broken(epoch))

    def key_of(self, roster: Roster) -> bytes:
        """Return the key by which the workers of a roster know each other."""
        return peers_key(self._secret, roster.nonce)

    def listen_again(self) -> None:
        """Speak to the hub: the rank knows that it is a member of the group that the hub has now."""
        self._is_muted = False

    def is_current(self, connection: int) -> bool:
        """Return whether a message of this connection counts: what an earlier one brought is of another group."""
        return connection == self._connection

    def step_back(self) -> None:
        """Leave the group until :meth:`come_again`. Idempotent."""
        with self._lock:
            self._may_join.clear()
            self._connection += 1
            self._is_muted = True
            self._frames.close()

    def come_again(self, workers: list[str]) -> None:
        """Join the group with other workers, after :meth:`step_back`."""
        with self._lock:
            self._workers = workers
            self._may_join.set()

    def close(self) -> None:
        """Leave the group. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._may_join.set()
        if self._hub is not None:
            self._hub.close()
        self._frames.close()

    def _send(self, message: Vote | Broken) -> None:
        # What a rank says before it knows that the hub is another one would be of no member.
        if not self._is_muted:
            with contextlib.suppress(OSError):  # the thread that reads notices that the hub is lost
                self._frames.send(message)

    def _read(self, on_message: Callable[[ToRank, int], None], on_lost: Callable[[bool], None]) -> None:
        while True:
            connection = self._connection
            try:
                while True:
                    message = self._frames.receive()
                    self._note(message)
                    on_message(message, connection)
            except OSError:
                self._connection += connection == self._connection
                self._is_muted = True
                self._frames.close()
            if self._is_closed:
                return
            on_lost(False)
            try:
                self._join()
            except (OSError, ValueError) as error:
                if not self._is_closed:
                    log.error("the data-parallel group is lost: %s", error)
                    on_lost(True)
                return

    def _note(self, message: ToRank) -> None:
        """Remember what the next hub must know of the group."""
        if isinstance(message, (Welcome, Outcome, Lost)):
            self._known = message.size, message.wave
        if isinstance(message, Outcome) and message.size <= self._hello.rank:
            self._is_closed = True  # the group goes on without this rank, with any hub

    def _join(self) -> None:
        """Say hello until the hub accepts it, and use the connection from then on. Rank 0 may start later, or run on
        with a group that is about to end."""
        deadline = time.monotonic() + self._timeout
        while True:
            if not self._may_join.is_set():
                self._may_join.wait()  # other workers are started
                deadline = time.monotonic() + self._timeout
            if self._is_closed:
                raise OSError("this rank has left the group")
            try:
                size, wave = self._known
                hello = msgspec.structs.replace(self._hello, workers=self._workers, size=size, wave=wave)
                left = max(_RETRY_SECONDS, deadline - time.monotonic())
                frames = _say_hello(self.address, hello, self._secret, left)
                with self._lock:
                    if self._may_join.is_set() and hello.workers is self._workers and not self._is_closed:
                        self._frames = frames
                        return
                frames.close()  # the workers have ended, or are others by now, or the rank leaves
            except OSError as error:
                if time.monotonic() > deadline or self._is_closed:
                    raise OSError(f"no data-parallel group at {self.address}: {error}") from None
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


def join_group(config: ParallelConfig, core: EngineCore, meeting: Meeting | None = None) -> GroupLink:
    """Connect a core that has loaded its model to its data-parallel group. ``meeting``: where its ranks meet if Ray has
    placed the core; None: where the configuration says. Raises as :class:`GroupLink`, and ``ValueError`` for a setting
    that does not work."""
    if not config.data_parallel_address:
        raise ValueError(
            f"data_parallel_address is empty: the ranks of group {config.group_id!r} need it, because their model has "
            "experts"
        )
    if meeting is None:
        secret = read_secret(config.data_parallel_secret_file)
        check_address(config.data_parallel_address, has_secret=bool(secret))
        address = config.data_parallel_address
    else:
        address, secret = meeting
    hello = GroupHello(config.group_id, config.data_parallel_rank, core.parallel_facts)
    if config.spreads_experts_over_engines:
        hello.workers = listening_workers(address, config, core)
    size, timeout = config.data_parallel_size, config.data_parallel_timeout
    return GroupLink(address, hello, size, timeout, secret, has_hub_elsewhere=meeting is not None)


def listening_workers(address: str, config: ParallelConfig, core: EngineCore) -> list[str]:
    """Let the workers of an engine with a part of the experts take connections, and return where. ``address``: of the
    hub. Raises ``OSError`` if its host is unknown."""
    host = worker_host(address)
    if config.distributed_executor_backend == "ray" and is_of_this_host(address):
        from ..executor.ray_cluster import node_address  # its workers may be on other machines than the hub's ranks

        host = node_address()
    return msgspec.convert(core.executor.collective_rpc("listen_experts", host), list[str])
