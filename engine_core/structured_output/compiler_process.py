"""``python -m tokenloom.engine_core.structured_output.compiler_process`` compiles constraints in a process of its own.

Stdin and stdout carry msgpack after 4-byte big-endian lengths: first a ``Setup``, answered by a ``Reply`` without a
grammar, then one ``Reply`` for each ``StructuredOutput``. The process ends when stdin ends, and at once when a
constraint exceeds its processor time or memory, or has not been compiled after a much longer time, because the machine
is busy.
"""

import contextlib
import hashlib
import os
import resource
import select
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from tokenloom.process.plugins import load_part
from tokenloom.process.process_guard import is_stopped, wake_with_parent, yield_processors

from ..data.config import StructuredOutputConfig
from ..data.core_params import StructuredOutput
from .grammar_backend import GrammarError, StructuredOutputBackend

# Two seconds of wall time on a busy machine once refused good schemas. `multipleOf` of large numbers takes seconds and
# hundreds of MB in llguidance, which its own limits do not bound, hence a process that can be killed.
COMPILE_SECONDS = 2.0
"""The processor time that a constraint may take. It is the constraint's own, however busy the machine is."""
_WAIT_SECONDS = 30.0
"""As long as a compile may take until it is given up, and not judged."""
_START_SECONDS = 30.0
_LOOK_MILLISECONDS = 500
"""How often a process that owes an answer is looked at: its own limits of time do not end one that is stopped."""
_TOO_LARGE = "it takes too much memory to compile"
_OUT_OF_MEMORY = 3
"""The status of a process that ran out of the memory for a constraint. Python's own failures have status 1."""
_LENGTH = struct.Struct(">I")
_COMMAND = (sys.executable, "-m", "tokenloom.engine_core.structured_output.compiler_process")

T = TypeVar("T")


class CompilerUnavailable(GrammarError):
    """The constraint was not judged; the request may be retried."""


class CompilerDied(CompilerUnavailable):
    """The process was ended or stopped from outside, or crashed; another one may compile the constraint."""


class Setup(msgspec.Struct, frozen=True):
    """Configures the process; it is the first message."""

    config: StructuredOutputConfig
    vocab_size: int
    seconds: float = COMPILE_SECONDS
    """The limit of processor time for one constraint."""
    wait_seconds: float = _WAIT_SECONDS
    """The limit of time for one constraint."""


class Reply(msgspec.Struct, frozen=True):
    """Answers one message."""

    prepared: str = ""
    refused: str = ""
    """Why the constraint is refused, in words for a client; empty if it is not."""
    unavailable: str = ""
    """Why the process cannot compile, or could not judge the constraint; empty if it can."""


class CompilerProcess:
    """Starts the process and talks to it. Only one thread at a time may use it; any thread may call :meth:`end`."""

    was_stopped = False
    """Whether it was stopped while it owed a reply, and ended for that: no constraint is the cause."""

    def __init__(self, setup: Setup) -> None:
        """Start the process and wait until it is ready.

        Raises ``GrammarError`` if the backend is not there or does not suit the model, ``CompilerUnavailable`` if the
        process does not start, or cannot load the backend at present.
        """
        # Its errors are in its replies; a library that aborts without memory must not write into the engine's log.
        try:
            self._process = subprocess.Popen(
                _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            reply = self._exchange(setup)
        except (GrammarError, OSError):
            raise CompilerUnavailable("the process that compiles grammars did not start") from None
        if reply.refused or reply.unavailable:
            self.kill()
        _raise_failure(reply)

    def prepare(self, constraint: StructuredOutput) -> str:
        """Return what the backend loads a grammar from.

        Raises ``GrammarError`` for a constraint that is refused, ``CompilerUnavailable`` for one that was not judged,
        ``CompilerDied`` if the process ended by no limit of its own. It may have ended then: see :attr:`is_alive`.
        """
        reply = self._exchange(constraint)
        _raise_failure(reply)
        return reply.prepared

    @property
    def is_alive(self) -> bool:
        """Whether the process can compile another constraint: it has neither ended nor been stopped."""
        return self._process.poll() is None and not is_stopped(self._process.pid)

    def end(self) -> None:
        """Send the process the signal that ends it, without waiting. :meth:`prepare`, if it runs, raises then."""
        self._process.kill()

    def kill(self) -> None:
        """End the process and wait for that. Idempotent."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):  # unsent input is lost
                stream.close()

    def _exchange(self, message: Setup | StructuredOutput) -> Reply:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            _write(stdin, message)
            header = self._receive(stdout.fileno(), _LENGTH.size)
            return msgspec.msgpack.decode(self._receive(stdout.fileno(), *_LENGTH.unpack(header)), type=Reply)
        except (OSError, EOFError):  # the process has ended
            self.kill()
            raise _error_of(self._process.returncode) from None

    def _receive(self, fd: int, size: int) -> bytes:
        """Return so many bytes. A process that is stopped meanwhile is ended. Raises ``EOFError``."""
        readable = select.poll()
        readable.register(fd, select.POLLIN)
        data = b""
        while len(data) < size:
            if not readable.poll(_LOOK_MILLISECONDS):
                if is_stopped(self._process.pid):
                    self.was_stopped = True
                    self._process.kill()
            elif piece := os.read(fd, size - len(data)):
                data += piece
            else:
                raise EOFError
        return data


_REFUSALS = {
    -signal.SIGPROF: f"it takes more than {COMPILE_SECONDS:g} s of processor time to compile",
    -signal.SIGABRT: _TOO_LARGE,  # a library that gets no more memory aborts
    _OUT_OF_MEMORY: _TOO_LARGE,
}


def _raise_failure(reply: Reply) -> None:
    if reply.unavailable:
        raise CompilerUnavailable(reply.unavailable)
    if reply.refused:
        raise GrammarError(reply.refused)


def _error_of(status: int) -> GrammarError:
    """Return why a compile ended the process. Only the limits of a constraint are the constraint's fault."""
    if status in _REFUSALS:
        return GrammarError(_REFUSALS[status])
    if status == -signal.SIGALRM:
        return CompilerUnavailable("the machine is too busy to compile the grammar; retry later")
    return CompilerDied("the process that compiles grammars was ended; retry")


def make_backend(config: StructuredOutputConfig, vocab_size: int) -> StructuredOutputBackend:
    """Return the backend that ``config`` names, for a model of ``vocab_size`` logits.

    Raises ``GrammarError`` if the library is not installed or the tokenizer not supported, ``CompilerUnavailable`` if
    the tokenizer's file is missing or changed.
    """
    file = Path(config.tokenizer)
    try:
        if hashlib.sha256(file.read_bytes()).digest() != config.tokenizer_digest:
            raise CompilerUnavailable("the engine's tokenizer file was changed after the engine started")
    except OSError:
        raise CompilerUnavailable("the engine's tokenizer file can no longer be read") from None
    try:
        make = load_part("grammar_backends", config.backend, _BACKENDS, config.plugins)
        backend: StructuredOutputBackend = make(
            file, vocab_size, config.eos_token_ids, disable_any_whitespace=config.disable_any_whitespace
        )
    except ImportError as error:
        raise GrammarError(
            f"the backend {config.backend} is not installed ({error.name}); run: pip install "
            f"'tokenloom[{config.backend}]'"
        ) from None
    except ValueError as error:
        raise GrammarError(f"this model's tokenizer is not supported: {error}") from None
    return backend


_BACKENDS = {
    "auto": "tokenloom.engine_core.structured_output.llguidance_backend:LLGuidanceBackend",
    "llguidance": "tokenloom.engine_core.structured_output.llguidance_backend:LLGuidanceBackend",
    "xgrammar": "tokenloom.engine_core.structured_output.xgrammar_backend:XGrammarBackend",
}
"""What is built in, by the name that an operator gives it; each is imported by the first request that needs it."""


def main() -> None:
    """Serve until stdin ends."""
    wake_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the whole group; the parent handles it
    yield_processors()
    signal.setitimer(signal.ITIMER_REAL, _START_SECONDS)  # SIGALRM's default action ends the process
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    setup = _read(stdin, Setup) or sys.exit()
    try:
        backend = make_backend(setup.config, setup.vocab_size)
    except CompilerUnavailable as error:
        _write(stdout, Reply(unavailable=str(error)))
        return
    except GrammarError as error:
        _write(stdout, Reply(refused=str(error)))
        return
    # Relative to what is loaded: the tokenizer's tables differ by model, and a constraint gets the same room with each.
    limit = _data_bytes() + backend.COMPILE_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    # A library that aborts for want of memory would write a core file for each such constraint.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _write(stdout, Reply())
    while True:
        _limit(0, 0)
        if (constraint := _read(stdin, StructuredOutput)) is None:
            return
        _limit(setup.seconds, setup.wait_seconds)
        try:
            reply = Reply(prepared=backend.prepare(constraint))
        except GrammarError as error:
            reply = Reply(refused=str(error))
        except MemoryError:
            os._exit(_OUT_OF_MEMORY)  # the process ends also when the library itself runs out of memory
        except Exception as error:  # no verdict on the constraint
            reply = Reply(unavailable=f"the engine could not compile the grammar ({type(error).__name__})")
        _write(stdout, reply)


def _limit(processor_seconds: float, seconds: float) -> None:
    """End the process after this much time, by the default actions of the signals; 0: never."""
    # The default actions of these signals end the process inside of native code, where no handler of Python would run.
    signal.setitimer(signal.ITIMER_PROF, processor_seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _data_bytes() -> int:
    """Return the private memory of this process in bytes, as RLIMIT_DATA counts it."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmData:"))
    return int(line.split()[1]) << 10


def _write(stream: IO[bytes], message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def _read(stream: IO[bytes], message_type: type[T]) -> T | None:
    """Return the next message, or None at the end of the stream."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    data = stream.read(_LENGTH.unpack(header)[0])
    return msgspec.msgpack.decode(data, type=message_type) if data else None


if __name__ == "__main__":
    main()
