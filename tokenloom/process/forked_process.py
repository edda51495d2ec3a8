"""Forks the first processes of parts from this one, which has imported what all of them share.

A part of its own spends a quarter of a second of CPU on these imports. The child gets what a started process has: its
own process group, environment, descriptors, standard streams and command line; it never returns into this program.
"""

import asyncio
import contextlib
import ctypes
import io
import mmap
import os
import runpy
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NoReturn, TextIO

from .launch import die_with_parent

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


def fork_part(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: int,
    descriptors: Sequence[int] = (),
    prepare: Callable[[], None] = lambda: None,
) -> ForkedProcess:
    """Run the module of a part's command in a fork of this process, which must fulfil :func:`can_fork`.

    Args:
        command: It begins with :data:`PYTHON_MODULE`, followed by the module and its flags.
        environment: All variables of the child.
        output: The descriptor for its standard output and error.
        descriptors: Those of this process that the child keeps, under the same numbers.
        prepare: Called in the child before the module runs.

    Raises ``OSError`` if the kernel makes no process.
    """
    supervisor = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # such as after `2>&-`
            stream.flush()
    with interrupts_wait() as mask:  # so that Ctrl-C does not raise in the child before it catches everything
        pid = os.fork()
        if not pid:
            end(_part_from(supervisor, mask, output, descriptors, prepare) or become(command, environment))
        with contextlib.suppress(OSError):  # the child does the same: whichever is first
            os.setpgid(pid, pid)
    return ForkedProcess(pid)


@contextlib.contextmanager
def interrupts_wait() -> Iterator[set[signal.Signals | int]]:
    """Hold SIGINT back, and yield the mask of signals that was set before."""
    mask: set[signal.Signals | int] = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _part_from(
    supervisor: int,
    mask: Iterable[signal.Signals | int],
    output: int,
    descriptors: Sequence[int],
    prepare: Callable[[], None],
) -> int:
    """Take from the child what it has of the supervisor. Returns an exit status, 0 if it may go on."""
    try:
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        die_with_parent(supervisor)
        take_streams(output)
        close_all_but(descriptors)
        prepare()
    except SystemExit as end:
        return _status_of(end.code)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def become(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the module of a command, which begins with :data:`PYTHON_MODULE`, as the program of this process, and return
    the exit status. ``environment``: all variables."""
    try:
        # In the child, and not on a command line: secrets of a part then stand in no /proc/PID/environ, which shows
        # what the supervisor was started with.
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = None  # what TMPDIR was of the process that this one is a fork of
        show_command_line(command)
        module, *flags = command[len(PYTHON_MODULE) :]
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


def end(status: int) -> NoReturn:
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


def take_streams(output: int) -> None:
    """Let standard output and error go to a descriptor; standard input has nothing."""
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - as long as the process
    sys.stdout, sys.stderr = _unbuffered(1), _unbuffered(2)


def _unbuffered(descriptor: int) -> TextIO:
    binary = open(descriptor, "wb", buffering=0, closefd=False)  # noqa: SIM115 - as long as the process
    return io.TextIOWrapper(binary, encoding="utf-8", errors="backslashreplace", write_through=True)


def close_all_but(kept: Sequence[int], *, inheritable: bool = True) -> None:
    """Close the descriptors of this process but the standard streams and those that are ``kept``; programs that it
    executes get these if they are ``inheritable``."""
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number not in kept:
            with contextlib.suppress(OSError):  # the one that lists them has been closed
                os.close(number)
    for number in kept:
        os.set_inheritable(number, inheritable)


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


_PR_SET_NAME, _PR_SET_MM, _PR_SET_MM_MAP = 15, 35, 14
_FIRST_FIELD = 3
_CODE, _END_CODE, _STACK, _DATA, _END_DATA, _HEAP, _ARG, _END_ARG, _ENV, _END_ENV = (
    number - _FIRST_FIELD for number in (26, 27, 28, 45, 46, 47, 48, 49, 50, 51)
)
"""Places of fields of /proc/self/stat behind the name; proc(5) counts from one."""


class _MemoryMap(ctypes.Structure):
    """Mirrors the kernel's ``prctl_mm_map``."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("code", "end_code", "data", "end_data", "heap", "end_heap", "stack")),
        *((name, ctypes.c_uint64) for name in ("arg", "end_arg", "env", "end_env", "auxv")),
        *((name, ctypes.c_uint32) for name in ("auxv_size", "exe_fd")),
    )


def show_command_line(words: Sequence[str]) -> None:
    """Show a command in place of the one that started this process. Linux only.

    Where the kernel takes no other memory for it, its words are joined by blanks and cut to the room of the first
    command and its environment. The C library's strings of the environment must not be in use: assign ``os.environ``
    anew before.
    """
    with open("/proc/self/stat", encoding="ascii", errors="replace") as stat:
        fields = [*map(int, stat.read().rpartition(")")[2].split()[1:])]
    fields.insert(0, 0)  # the state, a letter
    if not _place(words, fields):
        _overwrite(words, fields)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, os.fsencode(os.path.basename(words[0])), 0, 0, 0)


def _place(words: Sequence[str], fields: Sequence[int]) -> bool:
    """Let the kernel read the command line from memory of its own. Returns False if it does not."""
    text = b"".join(word.encode(errors="replace") + b"\0" for word in words)
    memory = mmap.mmap(-1, len(text), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # it shows no memory that can be shared
    memory.write(text)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    described = _MemoryMap(
        *(fields[_CODE], fields[_END_CODE], fields[_DATA], fields[_END_DATA], fields[_HEAP], libc.sbrk(0)),
        *(fields[_STACK], start, start + len(text), fields[_ENV], fields[_END_ENV], 0, 0, 2**32 - 1),
    )
    _kept.append(memory)  # before the kernel knows it
    size = ctypes.c_ulong(ctypes.sizeof(described))
    return not libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(described), size, 0)


_kept: list[mmap.mmap] = []
"""What the kernel reads, as long as the process."""


def _overwrite(words: Sequence[str], fields: Sequence[int]) -> None:
    start, end = fields[_ARG], fields[_END_ENV] if fields[_ENV] == fields[_END_ARG] else fields[_END_ARG]
    if 0 < start < end:
        text = " ".join(words).encode(errors="replace")[: end - start - 1]
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, text, len(text))
