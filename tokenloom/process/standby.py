"""A process without threads that has imported what others need, and of which those are forks: they import nothing.

supervisor ──socket──▶ standby ──fork──▶ process between ──fork──▶ part

The process between ends at once, so that the part becomes a child of the supervisor, which takes orphans meanwhile
(:func:`taking_orphans`). The part begins when the supervisor knows its id and says so, and otherwise ends.

A part may get a waiting child (:class:`WaitingChild`), forked before its first thread, which has imported the same and
becomes the command that the part gives it later.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Final, NoReturn

from .forked_process import become, close_all_but, end, interrupts_wait, show_command_line, take_streams
from .launch import die_with_parent
from .memory import forget_start
from .uncollected_imports import uncollected_imports

NUMBER: Final = struct.Struct("=q")
"""What the standby answers: :data:`READY`, or the id of the part that it has forked; negative: the number of an
error."""
READY: Final = 0
_MOST_DESCRIPTORS = 64
_COMMAND = (sys.executable, "-m", __name__)
"""What lists of processes show. It is no command that anybody starts."""


def send_request(
    connection: socket.socket,
    command: Sequence[str],
    environment: Mapping[str, str],
    descriptors: Mapping[int, int],
    *,
    has_child: bool = False,
) -> None:
    """Ask for a process. It does not wait, because the message is a byte.

    Args:
        connection: A socket of the kind SOCK_SEQPACKET.
        command: As of :func:`.forked_process.become`.
        environment: All variables of the process.
        descriptors: Those of this process that it gets, by the number that each has there.
        has_child: Whether it gets a waiting child.

    Raises ``OSError`` where the system makes no memory for the request, or the other side is gone or reads nothing.
    """
    request = {"command": [*command], "environment": {**environment}, "numbers": [*descriptors], "child": has_child}
    # In a file in memory, because a socket takes no more than its buffer has room for.
    with open(os.memfd_create("tokenloom-request", os.MFD_CLOEXEC), "wb") as file:
        file.write(json.dumps(request).encode())
        file.flush()
        file.seek(0)
        socket.send_fds(connection, [b"\0"], [file.fileno(), *descriptors.values()], socket.MSG_DONTWAIT)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Wait for a request; return it with its descriptors, in the order of its numbers. None: the other side is gone."""
    data, descriptors, _, _ = socket.recv_fds(connection, 1, _MOST_DESCRIPTORS)
    if not data:
        return None
    with open(descriptors[0], "rb") as file:
        request: dict[str, Any] = json.loads(file.read())
    return request, descriptors[1:]


_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


@contextlib.contextmanager
def taking_orphans() -> Iterator[None]:
    """Become the parent of processes below this one whose own parents end during the block. Raises ``OSError``."""
    libc, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def fork_standby(modules: Sequence[str], output: int) -> tuple[int, socket.socket]:
    """Fork a standby of this process, which must fulfil :func:`.forked_process.can_fork`. It imports ``modules``,
    answers :data:`READY`, and ends with this process, or when the socket closes. ``output``: what its errors go to.

    Returns its id, and the socket for requests. Raises ``OSError``.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    supervisor = os.getpid()
    with theirs, interrupts_wait() as mask:  # or Ctrl-C might raise in the standby before it catches everything
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            raise
        if not pid:
            _end_with(lambda: _stand_by(theirs, modules, output, supervisor, mask))
        with contextlib.suppress(OSError):  # it does the same: whichever is first
            os.setpgid(pid, pid)
        return pid, ours


def _end_with(run: Callable[[], int]) -> NoReturn:
    """Run the rest of a fork, which must never return into the program of its parent."""
    status = 1
    try:
        status = run()
    except SystemExit:  # the parent has ended
        pass
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _stand_by(
    connection: socket.socket,
    modules: Sequence[str],
    output: int,
    supervisor: int,
    mask: Iterable[signal.Signals | int],
) -> int:
    os.setpgid(0, 0)  # so that it gets no Ctrl-C of a terminal
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    die_with_parent(supervisor)
    take_streams(output)
    close_all_but([connection.fileno()], inheritable=False)
    show_command_line(_COMMAND)
    with uncollected_imports():
        for name in modules:
            import_module(name)
    forget_start()
    if len(os.listdir("/proc/self/task")) > 1:
        raise AssertionError(f"imports of {', '.join(modules)} have started a thread, which no fork has")
    with contextlib.suppress(ConnectionError):  # the other side is gone, and has not read all answers
        connection.send(NUMBER.pack(READY))
        while (received := _receive(connection)) is not None:
            request, descriptors = received
            connection.send(NUMBER.pack(_fork_away(request, descriptors, supervisor)))
            for each in descriptors:
                os.close(each)
    return 0


def _fork_away(request: dict[str, Any], descriptors: list[int], supervisor: int) -> int:
    """Return the id of a new part, which is the supervisor's child by then; or an error, negative."""
    read_end, write_end = os.pipe()
    try:
        between = os.fork()
        if not between:
            _end_with(lambda: _be_between(request, descriptors, supervisor, write_end))
        os.close(write_end)
        write_end = -1
        found = os.read(read_end, NUMBER.size)
        os.waitpid(between, 0)  # from here on the part is an orphan
    except OSError as error:
        return -(error.errno or 1)
    finally:
        os.close(read_end)
        if write_end >= 0:
            os.close(write_end)
    return int(NUMBER.unpack(found)[0]) if len(found) == NUMBER.size else -1


def _be_between(request: dict[str, Any], descriptors: list[int], supervisor: int, answer: int) -> int:
    try:
        pid = os.fork()
    except OSError as error:
        pid = -(error.errno or 1)
    if not pid:
        _end_with(lambda: _be_part(request, descriptors, supervisor))
    os.write(answer, NUMBER.pack(pid))
    return 0


def _be_part(request: dict[str, Any], descriptors: list[int], supervisor: int) -> int:
    """Become the part, whose descriptors are the one to wait at, its output, and those that it is to keep."""
    os.setpgid(0, 0)
    if not os.read(descriptors[0], 1):
        return 0  # the supervisor has given it up, or has ended
    die_with_parent(supervisor)
    take_streams(descriptors[1])
    numbers = request["numbers"][2:]
    place(dict(zip(numbers, descriptors[2:], strict=True)))
    close_all_but(numbers)
    if request["child"]:
        make_waiting_child()
    end(become(request["command"], request["environment"]))


def place(descriptors: Mapping[int, int]) -> None:
    """Give descriptors the numbers by which they are listed."""
    # First above all of them: the number of one may be another's.
    beyond = 1 + max((*descriptors, *descriptors.values()), default=0)
    above = {number: fcntl.fcntl(given, fcntl.F_DUPFD_CLOEXEC, beyond) for number, given in descriptors.items()}
    for number, given in above.items():
        os.dup2(given, number)
        os.close(given)


_waiting: list["WaitingChild"] = []
"""The child of this process that waits for its command, if there is one."""


def make_waiting_child() -> None:
    """Fork a child that waits for its command. This process may have no other thread."""
    _waiting.append(WaitingChild())


def take_waiting_child() -> "WaitingChild | None":
    """Return the child of this process that waits for its command, which the caller then owns; None: there is none, or
    it was taken."""
    return _waiting.pop() if _waiting else None


class WaitingChild:
    """Stands for a fork of this process that waits for the command that it is to become, with the methods of
    ``subprocess.Popen`` in use. It ends with this process. Any thread may call the methods."""

    def __init__(self) -> None:
        """Fork it. This process may have no other thread, and never returns here in the child."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if not self.pid:
            ours.close()
            _end_with(lambda: _wait_for_command(theirs))
        theirs.close()
        self.stdin = ours
        """The child ends when this is closed."""
        self.returncode: int | None = None
        self._reaping = threading.Lock()

    def run(self, command: Sequence[str], descriptors: Sequence[int]) -> None:
        """Let it become ``python -m MODULE …`` in a session of its own, with this process's descriptors under the same
        numbers. Raises ``OSError`` if it is gone."""
        send_request(self.stdin, command, os.environ, {number: number for number in descriptors})

    def discard(self) -> None:
        """End it, and wait for that."""
        self.kill()
        self.wait()
        self.stdin.close()

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        with self._reaping:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit status. Raises ``subprocess.TimeoutExpired`` after ``timeout``
        seconds."""
        if (status := self.poll()) is not None:
            return status
        descriptor = os.pidfd_open(self.pid)  # the id is its own until it was waited for, which the lock orders
        try:
            ended = select.poll()
            ended.register(descriptor, select.POLLIN)
            if not ended.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        finally:
            os.close(descriptor)
        status = self.poll()
        assert status is not None
        return status

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            with self._reaping:
                if self.returncode is None:  # its id may be another process's otherwise
                    os.kill(self.pid, number)


def _wait_for_command(connection: socket.socket) -> int:
    os.dup2(connection.fileno(), 0)  # whose end is that of its parent
    connection.close()
    close_all_but([])
    with socket.socket(fileno=os.dup(0)) as waiting:
        received = _receive(waiting)
    if received is None:
        return 0
    request, descriptors = received
    os.setsid()
    place(dict(zip(request["numbers"], descriptors, strict=True)))
    close_all_but(request["numbers"])
    end(become(request["command"], request["environment"]))
