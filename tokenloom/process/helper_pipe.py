"""What a helper process does at its end of the pipe: reads messages, answers them, and limits what it takes.

A message is bytes behind their length, of 4 bytes, big-endian. A helper has the pipe as its stdin and stdout, and ends
when stdin does.
"""

import os
import resource
import signal
import socket
import struct
import sys

from tokenloom.process.process_guard import wake_with_parent

LENGTH = struct.Struct(">I")
MAX_DESCRIPTORS = 4
"""That come with one message."""
OUT_OF_MEMORY = 3
"""The status of a process that a job left without memory. Python's own failures have status 1."""


def begin() -> None:
    """Leave signals of the terminal to the parent, and notice its end. Call it first."""
    wake_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the whole group; the parent decides


def read_message() -> bytes | None:
    """Return the next message; None: the parent has closed the pipe, or was killed, also within a message."""
    try:
        header = sys.stdin.buffer.read(LENGTH.size)
        return _read_rest(header) if len(header) == LENGTH.size else None
    except ConnectionResetError:  # it had not read the last answer
        return None


def _read_rest(header: bytes) -> bytes | None:
    (size,) = LENGTH.unpack(header)
    data = sys.stdin.buffer.read(size)
    return data if len(data) == size else None


def read_message_with_files(pipe: socket.socket) -> tuple[bytes, list[int]] | None:
    """Return the next message and the descriptors that came with it, which the caller closes; None as
    :func:`read_message`. ``pipe``: stdin, opened before the process confined itself."""
    header, files = b"", list[int]()
    try:
        while len(header) < LENGTH.size:
            part, more, _, _ = socket.recv_fds(pipe, LENGTH.size - len(header), MAX_DESCRIPTORS)
            files += more
            if not part:
                return None
            header += part
        data = _read_rest(header)
    except ConnectionResetError:
        return None
    return None if data is None else (data, files)


def write_message(data: bytes) -> None:
    """Answer the last message. If the parent has ended meanwhile, the process ends too."""
    try:
        sys.stdout.buffer.write(LENGTH.pack(len(data)) + data)
        sys.stdout.buffer.flush()
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)  # at once: the interpreter would flush the rest at its end, and print a traceback for that too


def limit_time(processor_seconds: float, seconds: float) -> None:
    """End the process after this much time, by the default actions of SIGPROF and SIGALRM; 0: never."""
    signal.setitimer(signal.ITIMER_PROF, processor_seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def limit_memory(num_bytes: int) -> None:
    """Let the process take so many bytes more than it has now."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmData:"))
    limit = (int(line.split()[1]) << 10) + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a library that gets no more aborts
