"""The connection of one rank to the hub of its data-parallel group."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable

import msgspec

from ..core import EngineCore
from ..data.config import ParallelConfig
from .group_address import check_address, connect
from .group_secret import new_nonce, prove_to_hub, read_secret
from .hub import GroupHub
from .messages import Accepted, Challenge, Frames, GroupHello, Refused, ToRank, Vote, decoder_of

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
