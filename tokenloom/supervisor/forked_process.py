"""Forks the first processes of parts from this one, which has imported what all of them share.

A part of its own spends a quarter of a second of CPU on these imports. The child gets what a started process has: its
own process group, environment, descriptors, standard streams and command line; it never returns into this program.
"""

import asyncio
import contextlib
import ctypes
import io
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NoReturn, TextIO

from .launch import die_with_parent
from .part_spec import PartSpec

PYTHON_MODULE = (sys.executable, "-m")
"""How the command of a part begins that can be forked."""
_END_SECONDS = 10.0
"""How long a part that has ended waits for its threads."""
_POLL_SECONDS = 0.05
"""Between two looks at a process where the kernel announces no end."""


def can_fork() -> bool:
    """Return whether a fork of this process is safe: it has one thread, and gRPC does not watch for forks."""
    if sys.platform != "linux" or "GRPC_ENABLE_FORK_SUPPORT" in os.environ:
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
        # A fork copies only the calling thread: a lock that another thread holds would stay locked in the child for
        # ever.
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:  # an old kernel, or a sandbox without /proc
        return False


class ForkedProcess:
    """Stands for a child that :func:`fork_part` made, with the methods of ``asyncio.subprocess.Process`` in use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    async def wait(self) -> int:
        """Wait for the end and return the exit status; negative: the signal that ended the process."""
        if self._status is None:
            await _ended(self.pid)
        return self._reap()

    def _reap(self) -> int:
        if self._status is None:  # another caller may have waited as well
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def send_signal(self, number: int) -> None:
        """Send a signal. Raises ``ProcessLookupError`` when the process has been waited for."""
        if self._status is not None:
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, number)


def fork_part(spec: PartSpec, environment: Mapping[str, str], output: int) -> ForkedProcess:
    """Run the module of a part's command in a fork of this process, which must fulfil :func:`can_fork`.

    Args:
        spec: Its command begins with :data:`PYTHON_MODULE`, followed by the module and its flags.
        environment: All variables of the child.
        output: The descriptor for its standard output and error.

    Raises ``OSError`` if the kernel makes no process.
    """
    supervisor = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # such as after `2>&-`
            stream.flush()
    with _interrupts_wait() as mask:  # so that Ctrl-C does not raise in the child before it catches everything
        pid = os.fork()
        if not pid:
            _end(_run(spec, environment, output, supervisor, mask))
        with contextlib.suppress(OSError):  # the child does the same: whichever is first
            os.setpgid(pid, pid)
    return ForkedProcess(pid)


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[set[signal.Signals | int]]:
    """Hold SIGINT back, and yield the mask of signals that was set before."""
    mask: set[signal.Signals | int] = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _run(
    spec: PartSpec, environment: Mapping[str, str], output: int, supervisor: int, mask: Iterable[signal.Signals | int]
) -> int:
    """Become the part. Returns the exit status."""
    try:
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        die_with_parent(supervisor)
        _take_streams(output)
        _close_all_but(spec.descriptors)
        # In the child, and not on a command line: secrets of a part then stand in no /proc/PID/environ, which shows
        # what the supervisor was started with.
        os.environ.clear()
        os.environ.update(environment)
        show_command_line(spec.command)
        module, *flags = spec.command[len(PYTHON_MODULE) :]
        sys.argv = [module, *flags]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return _status_of(end.code)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _status_of(code: object) -> int:
    if code is None or isinstance(code, int):
        return code or 0
    sys.stderr.write(f"{code}\n")
    return 1


def _end(status: int) -> NoReturn:
    """End the child as an interpreter does, but without the exit handlers of the supervisor."""
    # A part that has ended must not stay: the supervisor would wait for it, neither serving nor failing.
    late = threading.Timer(_END_SECONDS, os._exit, (status & 0xFF,))
    late.daemon = True
    try:
        late.start()
        # Joining the threads is not enough: those of an executor that nothing has shut down, such as that of a service
        # whose start failed, wait for work until the interpreter's end, which wakes them here.
        threading._shutdown()  # type: ignore[attr-defined]
    finally:
        os._exit(status & 0xFF)


def _take_streams(output: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - as long as the process
    sys.stdout, sys.stderr = _unbuffered(1), _unbuffered(2)


def _unbuffered(descriptor: int) -> TextIO:
    binary = open(descriptor, "wb", buffering=0, closefd=False)  # noqa: SIM115 - as long as the process
    return io.TextIOWrapper(binary, encoding="utf-8", errors="backslashreplace", write_through=True)


def _close_all_but(kept: tuple[int, ...]) -> None:
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number not in kept:
            with contextlib.suppress(OSError):  # the one that lists them has been closed
                os.close(number)
    for number in kept:
        os.set_inheritable(number, True)


async def _ended(pid: int) -> None:
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    while True:
        try:
            descriptor = os.pidfd_open(pid)
            break
        except OSError:  # no descriptor is free; the process runs on, and is not to be ended for that
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:  # noqa: ASYNC222 - WNOHANG
                return
        await asyncio.sleep(_POLL_SECONDS)

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    loop.add_reader(descriptor, end)
    try:
        await ended
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


_PR_SET_NAME = 15
_FIRST_FIELD = 3
_ARG_START, _ARG_END, _ENV_START, _ENV_END = (number - _FIRST_FIELD for number in range(48, 52))
"""Places of fields of /proc/self/stat behind the name; proc(5) counts from one."""


def show_command_line(words: Sequence[str]) -> None:
    """Write a command over the one that started this process, cut to the room of that one and its environment.

    The C library's strings of the environment must not be in use: assign ``os.environ`` anew before. Linux only.
    """
    start, size = _room()
    text = " ".join(words).encode(errors="replace")[: max(size - 1, 0)]
    if size:
        ctypes.memset(start, 0, size)
        ctypes.memmove(start, text, len(text))
    ctypes.CDLL(None).prctl(_PR_SET_NAME, os.fsencode(os.path.basename(words[0])), 0, 0, 0)


def _room() -> tuple[int, int]:
    """Return the address and size of the memory that the kernel reads the command line from; zero: unknown."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as stat:
        fields = stat.read().rpartition(")")[2].split()
    arg_start, arg_end, env_start, env_end = (int(fields[i]) for i in (_ARG_START, _ARG_END, _ENV_START, _ENV_END))
    if not 0 < arg_start < arg_end:
        return 0, 0
    return arg_start, (env_end if env_start == arg_end else arg_end) - arg_start
