"""The two ends of a core's process: a thread that decodes what comes, and the socket that outputs leave by."""

import contextlib
import queue
import threading
import time
from typing import Final

import zmq

from ..wire.array_arena import ArenaReader
from ..wire.frames import FrameSender, receive_frames
from ..wire.messages import AcceptTokens, EngineCoreOutputs, EngineCoreRequest, RequestType, UtilityCall
from ..wire.serialization import Decoder, Frame

ENGINE_CORE_DEAD: Final = b"ENGINE_CORE_DEAD"
"""The only frame of the core's last message when it gives up."""

INPUT_QUEUE_SIZE = 4096
"""Messages: the core takes all of them before each step, so this many may come during one; then sends wait."""
OUTPUT_QUEUE_SIZE = 64
"""Messages that wait to leave: a client that reads no more stops the core rather than filling its memory."""
LINGER_MS = 2000
"""How long the last messages may take to leave."""


InputMessage = EngineCoreRequest | AcceptTokens | UtilityCall | list[str] | None
InputItem = tuple[RequestType, InputMessage]
InputQueue = queue.Queue[InputItem]


class InputThread:
    """Socket → queues. Ends when its ZMQ context is terminated."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, arrays: ArenaReader | None = None
    ) -> None:
        """``arrays``: where arrays of requests may lie."""
        self.input_queue: InputQueue = queue.Queue(INPUT_QUEUE_SIZE)
        # The fast lane, read while a step's results come in; what it loses comes by the other queue, behind its ADD.
        self._aborts_queue: queue.Queue[list[str]] = queue.Queue(INPUT_QUEUE_SIZE)
        self._socket = context.socket(zmq.PULL)
        self._socket.connect(address)
        self._thread = threading.Thread(target=self._run, name="core-input", daemon=True)
        self._requests = Decoder(EngineCoreRequest, arrays)
        self._calls = Decoder(UtilityCall)
        self._accepts = Decoder(AcceptTokens)
        self._aborts: Decoder[list[str]] = Decoder(list[str])

    def start(self) -> None:
        self._thread.start()

    def take_aborts(self) -> list[str]:
        """Ids of requests that were aborted since the last call; some may have ended, or may not have come yet."""
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
                request.arrival_ns = time.monotonic_ns()  # it may wait here for the rest of a step
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
            case _:
                raise AssertionError(f"a client does not send {kind}")


class OutputSocket:
    """Outputs → socket, from the thread that steps: handed to another one they would wait for the interpreter, which
    that thread holds until its next step runs. Ends after :meth:`close`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.sndhwm = OUTPUT_QUEUE_SIZE
        self._socket.linger = LINGER_MS
        self._socket.connect(address)
        self._sender = FrameSender(self._socket)

    def send(self, outputs: EngineCoreOutputs) -> None:
        """Sends a message; waits while the client is too far behind."""
        self._sender.send(outputs)

    def send_dead(self) -> None:
        """The last message: the core gives up. A client that does not read does not get it."""
        self._socket.sndtimeo = LINGER_MS
        with contextlib.suppress(zmq.Again):
            self._socket.send(ENGINE_CORE_DEAD)

    def close(self) -> None:
        """What was sent still leaves, within ``LINGER_MS``."""
        self._socket.close()
