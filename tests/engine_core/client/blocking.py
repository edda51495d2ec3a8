"""A client without an event loop, of a core in a process of its own: for tests of that process."""

import itertools
import select
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.data.errors import EngineDeadError
from tokenloom.engine_core.data.handshake import CoreReady
from tokenloom.engine_core.data.messages import EngineCoreOutputs, EngineCoreRequest, RequestType, UtilityCall
from tokenloom.engine_core.process.core_io import ENGINE_CORE_DEAD
from tokenloom.engine_core.process.core_launch import CoreProcess
from tokenloom.engine_core.wire.array_arena import ArrayArena
from tokenloom.engine_core.wire.frames import Decoder, FrameReceiver, FrameSender, to_raw
from tokenloom.services.engine.core.core_start import CORE_COMMAND

_POLL_SECONDS = 0.1
"""How often a wait for room checks whether the core's process is alive."""


class SyncClient(Protocol):
    """What ``InprocClient`` and :class:`SyncMPClient` have in common."""

    ready: CoreReady

    def add_request(self, request: EngineCoreRequest) -> None:
        """Hands a request over; a refusal comes as its output."""

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """Ends requests without an output; unknown ones are ignored."""

    def get_output(self) -> EngineCoreOutputs:
        """What one step produced. Only to be called while requests are unfinished. Raises ``EngineDeadError``."""

    def call_utility(self, method: str, *args: object) -> object:
        """Calls one of the core's utilities. Raises ``UtilityError`` when it fails."""

    def close(self) -> None:
        """Ends the core. Idempotent."""


class SyncMPClient:
    """The core in a process of its own, so that detokenizing and stepping overlap."""

    def __init__(self, config: EngineConfig, command: Sequence[str] = CORE_COMMAND) -> None:
        self._process = CoreProcess(command)
        self._sender = FrameSender(self._process.connection)
        self._receiver = FrameReceiver(self._process.connection)
        self._arena = ArrayArena(config.parallel.array_arena_bytes)
        self._decoder = Decoder(EngineCoreOutputs)
        self._call_ids = itertools.count(1)
        self._early: deque[EngineCoreOutputs] = deque()  # steps that ended while a utility call was awaited
        try:
            self.ready = self._process.start(config, self._arena.address)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """The descriptor that becomes readable when outputs come."""
        return self._process.connection.fileno()

    @property
    def pid(self) -> int | None:
        """Of the core's process."""
        return self._process.pid

    def add_request(self, request: EngineCoreRequest) -> None:
        self._send(RequestType.ADD, request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        self._send(RequestType.ABORT, list(request_ids))

    def get_output(self) -> EngineCoreOutputs:
        return self._early.popleft() if self._early else self._receive()

    def take_ready(self) -> list[EngineCoreOutputs]:
        """The outputs that have come, without waiting. Raises ``EngineDeadError``."""
        ready = list(self._early)
        self._early.clear()
        while self._receiver._messages or select.select([self._process.connection], [], [], 0)[0]:
            ready.append(self._receive())
        return ready

    def call_utility(self, method: str, *args: object) -> object:
        call_id = next(self._call_ids)
        self._send(RequestType.UTILITY, UtilityCall(call_id, method, [to_raw(arg) for arg in args]))
        while True:
            outputs = self._receive()
            if (answer := outputs.utility_output) is None:
                self._early.append(outputs)
            elif answer.call_id == call_id:
                return answer.value()

    def close(self) -> None:
        self._process.kill()  # no caller waits for an answer any more
        self._process.stop(grace=0)
        self._process.connection.close()
        self._arena.close()

    def _send(self, kind: RequestType, message: object) -> None:
        while not select.select([], [self._process.connection], [], _POLL_SECONDS)[1]:
            self._check_alive()
        with self._arena.lend() as loan:
            try:
                self._sender.send(message, kind.value, loan=loan)
            except ConnectionError:
                self._process.wait()
                self._check_alive()

    def _receive(self) -> EngineCoreOutputs:
        try:
            frames = self._receiver.receive()
        except EOFError:  # it comes after the last outputs
            self._process.wait()
            self._check_alive()
            raise
        if frames[0] == ENGINE_CORE_DEAD:
            raise EngineDeadError("the engine core failed; see its log")
        return self._decoder.decode(frames)

    def _check_alive(self) -> None:
        if (status := self._process.exit_status()) is not None:
            raise EngineDeadError(f"the engine core's process ended with status {status}")
