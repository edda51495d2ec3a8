"""Keeps the connections of a gateway that is killed, and gives them to a gateway that lives.

The holder is a process that shares the gateway's table of descriptors, so it has each connection without a call for it.
It waits for the gateway's end. Then it closes those that no gateway continues, and gives those whose responses are
stored (:mod:`..held_table`) to the first gateway that takes them, by a unix socket of the directory in which they meet.
That gateway writes what the kernel has not taken, and answers on.
"""

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import platform
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NoReturn

from prometheus_client import Counter

from tokenloom.process import unix_socket
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.runtime.addresses import MAX_UNIX_PATH
from tokenloom.services.runtime.tasks import Tasks

from ..held_table import ARRIVED, FOLLOWED, HeldRecord, HeldTable, OutputEntry, PastResponse
from ..tcp_counters import cookie_of, num_taken

log = logging.getLogger(__name__)

SUFFIX = ".held"
"""Of the sockets at which gateways take connections: the name of each gateway stands before it."""
GIVE_SECONDS = 30.0
"""For so long a holder looks for a gateway. Output processors keep the requests for twice as long."""
_LOOK_SECONDS = 0.05
_READY_SECONDS = 2.0
"""For so long a holder waits until a gateway is ready: one that hangs is given nothing."""
_TAKE_SECONDS = 10.0
"""Limit on the time that a gateway takes for one connection."""
_RESTART_SECONDS = 1.0
_LENGTHS = struct.Struct(">III")
"""Bytes of the description, of the request and of the tail."""
_TAKEN_WORDS = {
    "not_begun": "took the connection of a request that another gateway had not begun to answer",
    "begun": "took the connection of an answer that another gateway had begun",
    "complete": "took the connection of an answer that another gateway had completed",
    "idle": "took a connection without a request from another gateway",
    "refused": "took a connection from another gateway that cannot go on",
}
"""For the log, by what was found: see :class:`.held_protocol.HeldProtocol`."""
_READY, _TAKEN = b"r", b"t"
"""What a gateway sends: that it takes connections, and that it has taken one."""
_BACKLOG = 16
_PR_SET_NAME = 15
_CLONE_FILES = 0x400
_CLONE = {"x86_64": 56, "aarch64": 220}
"""Numbers of the system call by architecture."""


_NO_SLOT = -1
IDLE = HeldRecord(_NO_SLOT, -1, 0, 0, 0, b"", PastResponse(b"", state=ARRIVED))
"""Stands for a connection without a request: of each that the gateway has read, the client has the response."""


def start_holder(directory: Path, name: str) -> HeldTable:
    """Start the holder of this process's connections, and return the table for their responses.

    Call it before the process has a second thread. ``directory``: where gateways meet; it is made if it is missing.
    ``name``: of this gateway. Raises ``InvalidArgument`` where descriptors cannot be shared, or the path is too long
    for a socket, and ``OSError`` where the directory or the process cannot be made.
    """
    if sys.platform != "linux" or platform.machine() not in _CLONE:
        raise InvalidArgument("it needs Linux on x86-64 or ARM64", "hold_connections")
    if len(os.fsencode(directory / f"{name}{SUFFIX}")) > MAX_UNIX_PATH:
        message = (
            f"{directory} is too long for a unix socket {name}{SUFFIX} in it, whose path has {MAX_UNIX_PATH} bytes"
        )
        raise InvalidArgument(f"{message} at most", "hold_connections")
    assert len(os.listdir("/proc/self/task")) == 1, "a lock of another thread would stay locked in the holder"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    table = HeldTable()
    gateway, parent = os.getpid(), os.getppid()
    if _clone() == 0:
        _end_with(partial(_keep_holder, table, directory, gateway, parent))
    return table


def _clone() -> int:
    """Fork a process that shares the table of descriptors; return 0 in it. Raises ``OSError``."""
    # Not os.fork: it copies the table, and each connection would have to be sent to the copy and taken back from it, 30
    # to 60 microseconds a response. The handlers that os.fork runs in a child are for threads and locks, of which this
    # process has none yet.
    pid: int = ctypes.PyDLL(None, use_errno=True).syscall(
        ctypes.c_long(_CLONE[platform.machine()]), ctypes.c_long(_CLONE_FILES | signal.SIGCHLD), 0, 0, 0, 0
    )
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return pid


def _end_with(run: Callable[[], object]) -> NoReturn:
    """Run a function in a child, and end it: its parent's handlers and buffers are not the child's."""
    status = 1
    try:
        run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _keep_holder(table: HeldTable, directory: Path, gateway: int, parent: int) -> None:
    """Run the holder, and another one if it is killed: this process does nothing else, so nothing ends it."""
    os.setsid()  # the supervisor ends the group of a gateway with it
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"holder", 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    gc.disable()
    was_killed = True
    while was_killed:
        if (pid := _clone()) == 0:
            _end_with(partial(_hold, table, directory, gateway, parent))
        was_killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        if was_killed:
            time.sleep(_RESTART_SECONDS)


def _hold(table: HeldTable, directory: Path, gateway: int, parent: int) -> None:
    """Wait for the end of the gateway, then give its connections away."""
    with contextlib.suppress(ProcessLookupError):
        _wait_for_end(os.pidfd_open(gateway))
    held = _held_of(table)
    try:
        above = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    # At once: peers of the gateway learn of its end by that. The files are read again if this holder is killed too.
    files = frozenset().union(*(record.files for record, _ in held))
    _close_all_but({above, *(connection.fileno() for _, connection in held), *files})
    until = time.monotonic() + GIVE_SECONDS
    while held and time.monotonic() < until and not _has_ended(above):
        for path in directory.glob(f"*{SUFFIX}"):
            _give_all(table, path, held)
        time.sleep(_LOOK_SECONDS)


def _held_of(table: HeldTable) -> list[tuple[HeldRecord, socket.socket]]:
    """Return the connections with which another gateway can go on, the most urgent last."""
    records = table.records()
    held = [(_whole(table, record), found) for record in records if (found := _connection_of(record)) is not None]
    busy = {connection.fileno() for _, connection in held}
    # On most of the others no client waits for an answer.
    others = [(each, data) for each in _descriptors() - busy if (data := table.waiting(each)) is not None]
    return [*((IDLE.read_on(data), socket.socket(fileno=each)) for each, data in others), *held]


def _wait_for_end(process: int) -> None:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.poll()


def _has_ended(process: int) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def _close_all_but(keep: Iterable[int]) -> None:
    start = 0
    for descriptor in sorted(keep):
        os.closerange(start, descriptor)
        start = descriptor + 1
    os.closerange(start, os.sysconf("SC_OPEN_MAX"))


def _descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd")}


def _connection_of(record: HeldRecord) -> socket.socket | None:
    """Return the connection of a response that is not over; None if there is none: its descriptor may be another
    connection's by now."""
    try:
        if cookie_of(record.descriptor) != record.cookie:
            return None
    except OSError:
        return None
    return socket.socket(fileno=record.descriptor)


def _whole(table: HeldTable, record: HeldRecord) -> HeldRecord:
    """Return a record with what was read of its connection behind what the slot has."""
    return record.read_on(table.unstored(record.descriptor, record.cookie, record.num_read))


def _give_all(table: HeldTable, path: Path, held: list[tuple[HeldRecord, socket.socket]]) -> None:
    """Give connections to the gateway that listens at a path, as long as it takes them, and drop them from the list."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(_READY_SECONDS)
        try:
            peer.connect(str(path))
            # The kernel accepts for a gateway that hangs, or is about to leave: what is given to that one is lost.
            if not _is_ours(peer) or peer.recv(1) != _READY:
                return
        except OSError:  # a socket that an ended gateway has left, or one of a gateway that leaves or hangs
            return
        peer.settimeout(_TAKE_SECONDS)
        goes_on = True
        while held and goes_on:
            record, connection = held.pop()
            # Whatever happens from here on, no second gateway may write on the connection.
            if record.slot == _NO_SLOT:
                table.note_given(connection.fileno())
            else:
                table.mark_given(record.slot)
            with connection:
                goes_on = _give(peer, record, connection)


def _is_ours(peer: socket.socket) -> bool:
    """Return whether a process of the same user has the other end: requests hold keys, and the directory may be one in
    which others can make files."""
    _, user, _ = struct.unpack("@iii", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.geteuid())


def _give(peer: socket.socket, record: HeldRecord, connection: socket.socket) -> bool:
    """Give a connection away, or reset it if its response cannot be continued. Return whether the gateway goes on."""
    past = record.past if record.slot == _NO_SLOT else record.rest(num_taken(connection.fileno()))
    if past is None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))
        return True
    if past.is_over and not past.tail and not past.state & FOLLOWED:
        past = IDLE.past
    about = _described(past)
    try:
        socket.send_fds(peer, [_LENGTHS.pack(len(about), len(past.request), len(past.tail))], [connection.fileno()])
        peer.sendall(about + past.request + past.tail)
        return peer.recv(1) == _TAKEN
    except OSError:
        return False


def _described(past: PastResponse) -> bytes:
    words = [entry.word for entry in past.entries]
    return json.dumps([past.state, past.request_id, past.created, words, past.number]).encode()


def _read_past(peer: socket.socket) -> tuple[PastResponse, socket.socket] | None:
    """Return the next response with its connection; None: there is no further one. Raises ``OSError`` and
    ``ValueError`` for what no holder sends."""
    head, files, _, _ = socket.recv_fds(peer, _LENGTHS.size, 1, socket.MSG_CMSG_CLOEXEC)
    if not head:
        return None
    if not files:
        raise ValueError("a response came without its connection")
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.socket(fileno=files[0]))
        sizes = _LENGTHS.unpack(head + _read_exactly(peer, _LENGTHS.size - len(head)))
        about, request, tail = (_read_exactly(peer, size) for size in sizes)
        state, request_id, created, words, number = json.loads(about)
        entries = tuple(map(OutputEntry.of, words))
        stack.pop_all()
    return PastResponse(request, tail, state, request_id, created, entries, number), connection


def _read_exactly(peer: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (piece := peer.recv(size - len(data))):
            raise ConnectionError("the holder ended within a message")
        data += piece
    return bytes(data)


Take = Callable[[PastResponse, socket.socket], Awaitable[str]]
"""Continues a response on its connection, and returns what it found to do; see :class:`.held_protocol.HeldProtocol`."""


class TakenConnections:
    """Takes the connections of gateways that were killed."""

    def __init__(self, directory: Path, name: str, take: Take, counter: Counter) -> None:
        """``name``: of this gateway. ``counter``: of what was taken, by state."""
        self._path = str(directory / f"{name}{SUFFIX}")
        self._take = take
        self._tasks = Tasks(lambda error: log.error("a connection could not be taken over", exc_info=error))
        self._counter = counter

    async def serve(self) -> None:
        """Take connections, until cancelled."""
        listener = await self._listen()
        identity = unix_socket.identity(self._path)
        loop = asyncio.get_running_loop()
        try:
            while True:
                peer, _ = await loop.sock_accept(listener)
                if not _is_ours(peer):
                    peer.close()
                    continue
                peer.settimeout(_TAKE_SECONDS)
                self._tasks.spawn(self._take_all(peer), name="connections of another gateway")
        finally:
            unix_socket.remove(self._path, identity)
            listener.close()
            await self._tasks.close()

    async def _listen(self) -> socket.socket:
        """Return a socket that listens, once no process before this one does."""
        while True:
            try:
                return unix_socket.listen(self._path, _BACKLOG, 0o600)
            except OSError as error:
                log.warning("cannot take connections at %s: %s; trying again", self._path, error.strerror)
                await asyncio.sleep(_RESTART_SECONDS)

    async def _take_all(self, peer: socket.socket) -> None:
        with peer:
            try:
                await asyncio.to_thread(peer.sendall, _READY)
                while (given := await asyncio.to_thread(_read_past, peer)) is not None:
                    state = await self._take(*given)
                    self._counter.labels(state).inc()
                    log.info(_TAKEN_WORDS[state])
                    await asyncio.to_thread(peer.sendall, _TAKEN)
            except OSError:  # the holder has ended, or does not wait any more
                return
            except Exception:  # connections of one gateway never end another one
                log.exception("connections of another gateway cannot be taken because of a bug")
