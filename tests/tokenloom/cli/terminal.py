"""A command on a pseudo-terminal, as a person has it."""

import codecs
import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

_PATIENCE_SECONDS = 60.0


class Terminal:
    """Types and reads."""

    def __init__(self, process: "subprocess.Popen[bytes]", descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end within a character

    def type(self, text: str) -> None:
        """``\\x03`` is Ctrl-C, ``\\x04`` Ctrl-D."""
        os.write(self._descriptor, text.encode())

    def read_until(self, wanted: str) -> str:
        """What came up to and with `wanted`, since the last call."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while wanted not in self._text:
            assert select.select([self._descriptor], [], [], max(0, deadline - time.monotonic()))[0], self._text
            self._text += self._read()
        end = self._text.index(wanted) + len(wanted)
        text, self._text = self._text[:end], self._text[end:]
        return text

    def end(self) -> int:
        """Reads what is left until the command ends; its exit status."""
        deadline, text = time.monotonic() + _PATIENCE_SECONDS, self._text
        with contextlib.suppress(OSError):  # how Linux tells that nobody is at the other end
            while True:
                assert select.select([self._descriptor], [], [], max(0, deadline - time.monotonic()))[0], text
                text += self._read()
        return self.process.wait(_PATIENCE_SECONDS)

    def _read(self) -> str:
        return self._decoder.decode(os.read(self._descriptor, 65536))


@contextlib.contextmanager
def terminal(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Terminal]:
    """Runs ``tokenloom`` with the arguments."""
    ours, theirs = pty.openpty()
    command = (sys.executable, "-m", "tokenloom.cli.main", *arguments)
    names = {**os.environ, "TERM": "dumb", **(environment or {})}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=names, start_new_session=True, preexec_fn=_control
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(ours)


def _control() -> None:
    """Makes the terminal the one whose Ctrl-C the command hears."""
    import fcntl
    import termios

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a shell has its background jobs, and so these tests, ignore
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
