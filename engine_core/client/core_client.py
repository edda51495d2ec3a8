"""Clients of an engine core for code without an event loop: in process, or over ZMQ."""

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import zmq

from ..config import EngineConfig
from ..control.core_calls import CoreCalls
from ..control.utilities import UtilityCall
from ..core import EngineCore
from ..errors import EngineDeadError, UtilityError
from ..executor.executor import Executor
from ..process.core_io import ENGINE_CORE_DEAD
from ..process.core_launch import CORE_COMMAND, CoreProcess
from ..wire.array_arena import ArrayArena
from ..wire.frames import FrameSender, receive_frames
from ..wire.messages import CoreReady, EngineCoreOutputs, EngineCoreRequest, RequestType, UtilityOutput
from ..wire.serialization import Decoder, from_raw, to_raw

_POLL_MS = 100
"""How often a wait looks whether the core's process still lives."""
_LAST_POLL_MS = 500
"""How long the last outputs of a process that has ended may take to arrive."""


class SyncClient(Protocol):
    """What :class:`InprocClient` and :class:`SyncMPClient` have in common."""

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


class InprocClient:
    """The core in the caller's own process and thread: :meth:`get_output` is where it computes."""

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self._core = EngineCore(config, executor)
        self._news = threading.Event()
        self._core.on_news(self._news.set)
        self._calls = CoreCalls(self._core)
        # Refusals, one for each bad request not yet read, and steps that a utility call had to wait for.
        self._early: deque[EngineCoreOutputs] = deque()
        self.ready = self._core.ready

    def add_request(self, request: EngineCoreRequest) -> None:
        if (refusal := self._calls.add(request)) is not None:
            self._early.append(refusal)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self._calls.abort(list(request_ids))

    def get_output(self) -> EngineCoreOutputs:
        if self._early:
            return self._early.popleft()
        while self._core.is_compiling() and not self._core.has_work():
            self._news.wait()
            self._news.clear()
        return self._calls.step()

    def call_utility(self, method: str, *args: object) -> object:
        answers: list[EngineCoreOutputs] = []
        self._calls.call(UtilityCall(0, method, [to_raw(arg) for arg in args]), answers.append)
        while not answers:
            if not self._core.has_work():
                raise UtilityError(f"{method}: waits for something that no step will bring")
            self._early.append(self._calls.step())
        output = answers[0].utility_output
        assert output is not None
        return utility_result(output)

    def close(self) -> None:
        self._core.shutdown()


class SyncMPClient:
    """The core in a process of its own, so that detokenizing and stepping overlap."""

    def __init__(self, config: EngineConfig, command: Sequence[str] = CORE_COMMAND) -> None:
        self._process = CoreProcess(command)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._input = self._context.socket(zmq.PUSH)
        self._output = self._context.socket(zmq.PULL)
        self._input.bind(self._process.input_address)
        self._output.bind(self._process.output_address)
        self._sender = FrameSender(self._input)
        self._arena = ArrayArena(config.parallel.array_arena_bytes)
        self._decoder = Decoder(EngineCoreOutputs)
        self._call_ids = itertools.count(1)
        self._early: deque[EngineCoreOutputs] = deque()  # steps that ended while a utility call was awaited
        try:
            self.ready = self._process.start(config, self._arena.address)
        except BaseException:
            self.close()
            raise

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

    def call_utility(self, method: str, *args: object) -> object:
        call_id = next(self._call_ids)
        self._send(RequestType.UTILITY, UtilityCall(call_id, method, [to_raw(arg) for arg in args]))
        while True:
            outputs = self._receive()
            if (answer := outputs.utility_output) is None:
                self._early.append(outputs)
            elif answer.call_id == call_id:
                return utility_result(answer)

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._process.kill()  # an offline client has nobody left who could want an answer
        self._process.stop(grace=0)
        self._arena.close()

    def _send(self, kind: RequestType, message: object) -> None:
        while not self._input.poll(_POLL_MS, zmq.POLLOUT):
            self._check_alive()
        with self._arena.lend() as loan:
            self._sender.send(message, kind.value, loan=loan)

    def _receive(self) -> EngineCoreOutputs:
        while not self._output.poll(_POLL_MS):
            # A process that ends sends its outputs first, and they may have come after the poll.
            if self._process.exit_status() is not None and not self._output.poll(_LAST_POLL_MS):
                self._check_alive()
        frames = receive_frames(self._output, num_small=1)
        if frames[0] == ENGINE_CORE_DEAD:
            raise EngineDeadError("the engine core failed; its log says why")
        return self._decoder.decode(frames)

    def _check_alive(self) -> None:
        if (status := self._process.exit_status()) is not None:
            raise EngineDeadError(f"the engine core's process ended with status {status}")


def utility_result(output: UtilityOutput) -> object:
    """The value that a utility call returned. Raises ``UtilityError`` when it failed."""
    if output.error:
        raise UtilityError(output.error)
    return from_raw(output.result)
