"""Input and output of a core's process: a thread that receives and decodes messages, and the socket for outputs."""

import contextlib
import queue
import threading
import time
from typing import Final

import zmq

from ..data_parallel.messages import ToRank
from ..wire.array_arena import ArenaReader
from ..wire.frames import FrameSender, receive_frames
from ..wire.messages import AcceptTokens, EngineCoreOutputs, EngineCoreRequest, RequestType, UtilityCall
from ..wire.serialization import Decoder, Frame

ENGINE_CORE_DEAD: Final = b"ENGINE_CORE_DEAD"
"""The only frame of the core's last message when it fails."""

INPUT_QUEUE_SIZE = 4096
"""Limit of messages that arrive during one step; the core takes all before the next. Beyond it, sends wait."""
OUTPUT_QUEUE_SIZE = 64
"""Limit of unsent messages: a client that stops reading stops the core instead of filling its memory."""
LINGER_MS = 2000
"""How long sending the last messages may take."""


InputMessage = EngineCoreRequest | AcceptTokens | UtilityCall | ToRank | list[str] | int | None
InputItem = tuple[RequestType, InputMessage]
InputQueue = queue.Queue[InputItem]


class InputThread:
    """Moves messages from the socket into queues. Ends when its ZMQ context is terminated."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, arrays: ArenaReader | None = None
    ) -> None:
        """``arrays``: shared memory that may hold arrays of requests."""
        self.input_queue: InputQueue = queue.Queue(INPUT_QUEUE_SIZE)
        # A fast lane for aborts, read while a step's results are processed. An abort that it loses is also in the other
        # queue, behind its ADD.
        self._aborts_queue: queue.Queue[list[str]] = queue.Queue(INPUT_QUEUE_SIZE)
        self._socket = context.socket(zmq.PULL)
        self._socket.connect(address)
        self._thread = threading.Thread(target=self._run, name="core-input", daemon=True)
        self._requests = Decoder(EngineCoreRequest, arrays)
        self._calls = Decoder(UtilityCall)
        self._accepts = Decoder(AcceptTokens)
        self._aborts: Decoder[list[str]] = Decoder(list[str])
        self._waves: Decoder[int] = Decoder(int)

    def start(self) -> None:
        """Start to receive messages."""
        self._thread.start()

    def take_aborts(self) -> list[str]:
        """Return the ids aborted since the last call. Their requests may have ended, or may not have been added yet."""
        request_ids: list[str] = []
        for _ in range(self._aborts_queue.qsize()):
            request_ids += self._aborts_queue.get()
        return request_ids

    def _run(self) -> None:
        with self._socket:
            while True:
                try:
                    kind, *body = receive_frames(self._socket, num_small=2)
                except zmq.ContextTerminated:
                    return
                self._receive(RequestType(kind), body)

    def _receive(self, kind: RequestType, body: list[Frame]) -> None:
        match kind:
            case RequestType.ADD:
                request = self._requests.decode(body)
                request.arrival_ns = (
                    time.monotonic_ns()
                )  # taken here because the request may wait in the queue for the rest of a step
                self.input_queue.put((kind, request))
            case RequestType.ABORT:
                request_ids = self._aborts.decode(body)
                with contextlib.suppress(queue.Full):
                    self._aborts_queue.put_nowait(request_ids)
                self.input_queue.put((kind, request_ids))
            case RequestType.ACCEPT:
                self.input_queue.put((kind, self._accepts.decode(body)))
            case RequestType.UTILITY:
                self.input_queue.put((kind, self._calls.decode(body)))
            case RequestType.START_DP_WAVE:
                self.input_queue.put((kind, self._waves.decode(body)))
            case _:
                raise AssertionError(f"clients must not send {kind}")


class OutputSocket:
    """Sends outputs from the thread that steps. Another thread would have to wait for the interpreter lock, which the
    stepping thread holds until its next step runs."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.sndhwm = OUTPUT_QUEUE_SIZE
        self._socket.linger = LINGER_MS
        self._socket.connect(address)
        self._sender = FrameSender(self._socket)

    def send(self, outputs: EngineCoreOutputs) -> None:
        """Send a message; wait while the client is too far behind."""
        self._sender.send(outputs)

    def send_dead(self) -> None:
        """Send the last message of a core that has failed. A client that does not read does not get it."""
        self._socket.sndtimeo = LINGER_MS
        with contextlib.suppress(zmq.Again):
            self._socket.send(ENGINE_CORE_DEAD)

    def close(self) -> None:
        """Close the socket; messages in its queue are still sent, within ``LINGER_MS``."""
        self._socket.close()
