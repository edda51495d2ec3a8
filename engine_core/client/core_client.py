"""The clients of an engine core for code without an event loop; the core runs in the caller's thread or in a process of
its own."""

import contextlib
import itertools
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from ..core import EngineCore
from ..core_calls import CoreCalls
from ..data.config import EngineConfig
from ..data.errors import EngineDeadError, EnginePausedError, UtilityError
from ..data.handshake import CoreReady
from ..data.messages import ArrivedRows, EngineCoreOutputs, EngineCoreRequest, RequestType, UtilityCall
from ..executor.executor import Executor
from ..process.core_io import ENGINE_CORE_DEAD, death_of
from ..process.core_launch import CoreProcess
from ..wire.array_arena import ArrayArena
from ..wire.frames import Decoder, FrameReceiver, Pieces, encode, head, to_raw

_CLOSED = "the engine core was closed"


class CoreClient(Protocol):
    """Describes what code without an event loop needs of a core. For one thread at a time.

    Every method but :meth:`close`, :meth:`abort_requests` and :meth:`kill` raises ``EngineDeadError`` once the core was
    closed, or has ended in a process of its own.
    """

    @property
    def ready(self) -> CoreReady: ...

    def add_request(self, request: EngineCoreRequest) -> None:
        """Add a request; a refusal comes as its output."""

    def send_rows(self, message: ArrivedRows) -> None:
        """Give the core rows that it has asked for."""

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests without an output; unknown ids are ignored."""

    def check_awake(self) -> None:
        """Raise ``EnginePausedError`` if a new request would not run because the engine is paused or asleep."""

    def get_output(self) -> EngineCoreOutputs:
        """Return what the next step has produced. Call it only while requests are unfinished.

        Raises ``EnginePausedError`` if none of them can advance because the engine is paused or asleep.
        """

    def call_utility(self, method: str, *args: object) -> object:
        """Call one of the core's utilities. Raises ``UtilityError`` when it fails."""

    def unread(self) -> dict[str, bool]:
        """Return the requests in steps that :meth:`get_output` has not returned yet, and whether these end them."""

    def waker(self) -> Callable[[], None]:
        """Return a function for any thread after which a :meth:`get_output` that waits returns without outputs."""

    def kill(self) -> None:
        """From any thread: kill a core in a process of its own, so that calls that wait for its answer end."""

    def close(self) -> None:
        """End the core. Idempotent."""


class InprocClient:
    """Runs the core in the caller's thread: :meth:`get_output` computes a step."""

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self._core = EngineCore(config, executor)
        self._news = threading.Event()
        self._core.on_update(self._news.set)
        self._calls = CoreCalls(self._core)
        # Outputs not read yet: refusals of bad requests, and steps that a utility call had to wait for.
        self._early: deque[EngineCoreOutputs] = deque()
        self._dead: EngineDeadError | None = None
        self.ready = self._core.ready

    def add_request(self, request: EngineCoreRequest) -> None:
        """Add a request; a refusal comes as its output. Raises ``EngineDeadError``."""
        self._check_open()
        if (refusal := self._calls.add(request)) is not None:
            self._early.append(refusal)

    def send_rows(self, message: ArrivedRows) -> None:
        """Give the core rows that it has asked for. Raises ``EngineDeadError``."""
        self._check_open()
        if (refusal := self._calls.take_rows(message)) is not None:
            self._early.append(refusal)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests without an output; unknown ids are ignored, and so are all once the core was closed."""
        if self._dead is None:
            self._calls.abort(list(request_ids))
        gone = set(request_ids)
        for outputs in self._early:
            outputs.outputs = [output for output in outputs.outputs if output.request_id not in gone]

    def check_awake(self) -> None:
        """Raise ``EnginePausedError`` if a new request would not run because the engine is paused or asleep,
        ``EngineDeadError``."""
        self._check_open()
        if sentence := self._core.calls_to_run():
            raise EnginePausedError(sentence)

    def get_output(self) -> EngineCoreOutputs:
        """Run a step and return what it produced. Call it only while requests are unfinished.

        Raises ``EnginePausedError`` if none of them can advance because the engine is paused or asleep,
        ``EngineDeadError``.
        """
        if self._dead is not None:
            raise self._dead
        if self._early:
            return self._early.popleft()
        if self._core.is_compiling() and not self._core.has_work():
            self._news.wait()  # for a grammar, or for a caller that has something else to do meanwhile
            self._news.clear()
        outputs = self._calls.step()
        if not outputs.outputs and not self._core.has_work():
            self.check_awake()
        return outputs

    def call_utility(self, method: str, *args: object) -> object:
        """Call one of the core's utilities. Raises ``UtilityError`` when it fails, ``EngineDeadError``."""
        self._check_open()
        answers: list[EngineCoreOutputs] = []
        self._calls.call(UtilityCall(0, method, [to_raw(arg) for arg in args]), answers.append)
        while not answers:
            if not self._core.has_work():
                raise UtilityError(f"{method} cannot finish: no request is left that a step could advance")
            self._early.append(self._calls.step())
        output = answers[0].utility_output
        assert output is not None
        return output.value()

    def unread(self) -> dict[str, bool]:
        """Return the requests in steps that :meth:`get_output` has not returned yet, and whether these end them."""
        outputs = [output for step in self._early for output in step.outputs]
        return {output.request_id: output.finish_reason is not None for output in outputs}

    def waker(self) -> Callable[[], None]:
        """Return a function for any thread after which a :meth:`get_output` that waits returns without outputs."""
        return self._news.set

    def kill(self) -> None:
        """Do nothing: the core is in this process."""

    def close(self) -> None:
        """End the core. Idempotent."""
        self._dead = self._dead or EngineDeadError(_CLOSED)
        self._core.shutdown()

    def _check_open(self) -> None:
        # A core that was shut down still takes requests, and its worker would compute in memory that it gave back.
        if self._dead is not None:
            raise self._dead


_PAUSING = frozenset({"sleep", "pause", "reload_weights"})
"""Utilities after which a request may wait without end."""
_RESUMING = frozenset({"wake_up", "resume"})


class SyncMPClient:
    """Runs the core in a process of its own: its steps do not wait for the caller, who outlives its end."""

    def __init__(self, config: EngineConfig, command: Sequence[str], *, grace: float = 5.0) -> None:
        """Start the core. ``command``: as for :class:`CoreProcess`; ``grace``: seconds until :meth:`close` kills it.

        Raises ``EngineStartError``.
        """
        self._grace = grace
        self._process = CoreProcess(command)
        self._connection = self._process.connection
        self._receiver = FrameReceiver(self._connection)
        self._arena = ArrayArena(config.parallel.request_arena_bytes)
        self._decoder = Decoder(EngineCoreOutputs)
        self._call_ids = itertools.count(1)
        # Outputs not read yet: of steps that ended while a call's answer was awaited, or while a message was sent.
        # Bounded by the requests in flight, as the core's own memory is.
        self._early: deque[EngineCoreOutputs] = deque()
        self._dead: EngineDeadError | None = None
        self._may_be_paused = False
        self._has_begun = False  # to send the message in hand
        self._wakes: tuple[socket.socket, socket.socket] | None = None  # of :meth:`waker`: its end, and ours
        try:
            self.ready = self._process.start(config, self._arena.address)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        """The id of the core's process."""
        return self._process.pid

    def add_request(self, request: EngineCoreRequest) -> None:
        """Add a request; a refusal comes as its output. Raises ``EngineDeadError``."""
        self._send(RequestType.ADD, request)

    def send_rows(self, message: ArrivedRows) -> None:
        """Give the core rows that it has asked for. Raises ``EngineDeadError``."""
        self._send(RequestType.ROWS, message)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests without an output; unknown ids are ignored, and so are all if the core is dead."""
        if not request_ids:
            return
        with contextlib.suppress(EngineDeadError):
            self._send(RequestType.ABORT, list(request_ids))

    def check_awake(self) -> None:
        """Raise ``EnginePausedError`` if a new request would not run because the engine is paused or asleep."""
        self._check_alive()
        if self._may_be_paused and (sentence := self.call_utility("calls_to_run")):
            raise EnginePausedError(str(sentence))

    def get_output(self) -> EngineCoreOutputs:
        """Wait for the next step that the core has computed. Call it only while requests are unfinished.

        Raises ``EnginePausedError`` if none of them can advance because the engine is paused or asleep,
        ``EngineDeadError``.
        """
        while True:
            # The answer comes after the outputs of all steps before it.
            if not self._early and self._may_be_paused and not self.call_utility("has_work") and not self._early:
                self.check_awake()
            if self._is_woken():
                return EngineCoreOutputs()
            outputs = self._early.popleft() if self._early else self._receive()
            if outputs.utility_output is None:  # otherwise the answer to a call that was interrupted
                return outputs

    def call_utility(self, method: str, *args: object) -> object:
        """Call one of the core's utilities. Raises ``UtilityError`` when it fails, ``EngineDeadError``."""
        self._may_be_paused = self._may_be_paused or method in _PAUSING
        answer = self._call(method, args)
        if method in _RESUMING:
            self._may_be_paused = bool(self._call("calls_to_run", ()))
        return answer

    def unread(self) -> dict[str, bool]:
        """Return the requests in steps that :meth:`get_output` has not returned yet, and whether these end them."""
        outputs = [output for step in self._early for output in step.outputs]
        return {output.request_id: output.finish_reason is not None for output in outputs}

    def waker(self) -> Callable[[], None]:
        """Return a function for any thread after which a :meth:`get_output` that waits returns without outputs."""
        if self._wakes is None:
            self._wakes = socket.socketpair()
            for end in self._wakes:
                end.setblocking(False)
        return self._wake

    def kill(self) -> None:
        """From any thread: kill the core's process, so that calls that wait for its answer end."""
        self._process.kill()

    def close(self) -> None:
        """End the core. Idempotent."""
        self._dead = self._dead or EngineDeadError(_CLOSED)
        self._process.stop(self._grace)
        self._connection.close()
        self._arena.close()
        for end in self._wakes or ():
            end.close()

    def _wake(self) -> None:
        assert self._wakes is not None
        with contextlib.suppress(OSError):  # full: it is woken in any case; or closed
            self._wakes[0].send(b"\0")

    def _is_woken(self) -> bool:
        """Wait for outputs or a wake. Returns whether it is a wake; without a waker at once, with False."""
        if self._wakes is None or self._early or self._receiver.has_messages:
            return False
        self._check_alive()
        poll = select.poll()
        for each in (self._connection, self._wakes[1]):
            poll.register(each, select.POLLIN)
        if self._connection.fileno() in (ready := dict(poll.poll())):
            return False
        assert ready
        self._wakes[1].recv(4096)
        return True

    def _call(self, method: str, args: Sequence[object]) -> object:
        call_id = next(self._call_ids)
        self._send(RequestType.UTILITY, UtilityCall(call_id, method, [to_raw(arg) for arg in args]))
        while True:
            outputs = self._receive()
            if (answer := outputs.utility_output) is None:
                self._early.append(outputs)
            elif answer.call_id == call_id:
                return answer.value()

    def _send(self, kind: RequestType, message: object) -> None:
        self._check_alive()
        with self._arena.lend() as loan:
            frames = [kind.value, *encode(message, loan)]
            unsent = Pieces([head(frames), *frames])
            self._has_begun = False
            try:
                while pieces := unsent.head():
                    unsent.advance(self._send_some(pieces))
            except BaseException as error:
                if self._has_begun:
                    self._give_up(error)
                raise

    def _send_some(self, pieces: "Sequence[memoryview | bytes | bytearray]") -> int:
        """Send as much as the core takes now; if it takes nothing, wait, and read its outputs meanwhile."""
        # An interrupt that comes when the system has taken a part, and before it is counted, leaves a part behind too.
        had_begun, self._has_begun = self._has_begun, True
        try:
            return self._connection.sendmsg(pieces, (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            self._has_begun = had_begun
            # A core that cannot send its outputs takes no messages, so both would wait without end.
            if self._wait(select.POLLIN | select.POLLOUT):
                self._early.append(self._receive())
            return 0
        except ConnectionError:
            raise self._ended() from None

    def _wait(self, events: int) -> bool:
        """Wait for one of these events of the connection; return whether there is something to read, or its end."""
        # Not select: it takes no descriptor from 1,024 on, and the caller's process may have opened so many before.
        poll = select.poll()
        poll.register(self._connection, events)
        return poll.poll()[0][1] != select.POLLOUT

    def _receive(self) -> EngineCoreOutputs:
        self._check_alive()
        if not self._receiver.has_messages:
            self._wait(select.POLLIN)  # an interrupt here loses nothing
        try:
            frames = self._receiver.receive()
        except EOFError:  # it comes after the last outputs
            raise self._ended() from None
        except BaseException as error:
            self._give_up(error)
            raise
        if frames[0] == ENGINE_CORE_DEAD:
            self._dead = death_of(frames)
            raise self._dead
        return self._decoder.decode(frames)

    def _ended(self) -> EngineDeadError:
        """Return the error of a core whose process has ended, or is about to."""
        self._dead = EngineDeadError(f"the engine core's process ended with status {self._process.wait()}")
        return self._dead

    def _give_up(self, error: BaseException) -> None:
        """End the core, because an interrupt came in the middle of a message: no receiver understands what follows."""
        self._dead = self._dead or EngineDeadError(f"a message of the core was interrupted: {type(error).__name__}")
        self._process.kill()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._dead
