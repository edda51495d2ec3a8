"""Input and output of a core's process: a thread that receives and decodes messages, and the socket for outputs."""

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Final

from ..data.errors import EngineDamagedError, EngineDeadError
from ..data.messages import AcceptTokens, ArrivedRows, EngineCoreOutputs, EngineCoreRequest, RequestType, UtilityCall
from ..data_parallel.messages import ToRank
from ..wire.array_arena import ArenaReader
from ..wire.frames import Decoder, Frame, FrameReceiver, FrameSender

ENGINE_CORE_DEAD: Final = b"ENGINE_CORE_DEAD"
"""The first frame of the core's last message when it fails. Behind it comes the reason if its weights are damaged."""

INPUT_QUEUE_SIZE = 4096
"""Limit of messages that arrive during one step; the core takes all before the next. Beyond it, sends wait."""
OUTPUT_BYTES = 4 << 20
"""Wanted size of the socket's buffer for outputs, within what the system allows: a client that stops reading stops the
core instead of filling its memory."""
LAST_SECONDS = 2
"""How long sending the last message may take."""


InputMessage = (
    EngineCoreRequest | AcceptTokens | ArrivedRows | UtilityCall | tuple[ToRank, int] | list[str] | int | None
)
InputItem = tuple[RequestType, InputMessage]
InputQueue = queue.Queue[InputItem]


class InputThread:
    """Moves messages from the socket into queues, until the client is gone."""

    def __init__(self, connection: socket.socket, arrays: ArenaReader | None = None) -> None:
        """``arrays``: shared memory that may hold arrays of requests."""
        self.input_queue: InputQueue = queue.Queue(INPUT_QUEUE_SIZE)
        # A fast lane for aborts, read while a step's results are processed. An abort that it loses is also in the other
        # queue, behind its ADD.
        self._aborts_queue: queue.Queue[list[str]] = queue.Queue(INPUT_QUEUE_SIZE)
        self._receiver = FrameReceiver(connection)
        self._thread = threading.Thread(target=self._run, name="core-input", daemon=True)
        self._requests = Decoder(EngineCoreRequest, arrays)
        self._calls = Decoder(UtilityCall)
        self._accepts = Decoder(AcceptTokens)
        self._rows = Decoder(ArrivedRows, arrays)
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
        while True:
            try:
                first, *body = self._receiver.receive()
            except EOFError:
                return
            match kind := RequestType(bytes(first)):
                case RequestType.ADD:
                    request = self._requests.decode(body)
                    request.arrival_ns = (
                        time.monotonic_ns()
                    )  # taken here because the request may wait in the queue for the rest of a step
                    self.input_queue.put((kind, request))
                case RequestType.ABORT:
                    request_ids = self._aborts.decode(body)
                    # An abort that arrives during a step saves the request's next step; the queue alone would bring it
                    # one step later.
                    with contextlib.suppress(queue.Full):
                        self._aborts_queue.put_nowait(request_ids)
                    self.input_queue.put((kind, request_ids))
                case RequestType.ACCEPT:
                    self.input_queue.put((kind, self._accepts.decode(body)))
                case RequestType.ROWS:
                    self.input_queue.put((kind, self._rows.decode(body)))
                case RequestType.UTILITY:
                    self.input_queue.put((kind, self._calls.decode(body)))
                case RequestType.START_DP_WAVE:
                    self.input_queue.put((kind, self._waves.decode(body)))
                case _:
                    raise AssertionError(f"clients must not send {kind}")


class OutputSocket:
    """Sends outputs from the thread that steps. Another thread would have to wait for the interpreter lock, which the
    stepping thread holds until its next step runs."""

    def __init__(self, connection: socket.socket) -> None:
        # The buffer is the bound between core and front. The system's default of some 400 KB holds 50 and more steps of
        # 64 streams.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, OUTPUT_BYTES)
        self._connection = connection
        self._sender = FrameSender(connection)

    def send(self, outputs: EngineCoreOutputs) -> None:
        """Send a message; wait while the client is too far behind. When it is gone, its core is about to end too."""
        # Handing outputs to an output thread, as vLLM does, delayed them by 0.2 ms in the median and 0.6 ms at the 90th
        # percentile (64 requests, steps of 4 ms); encoding here costs each step 7 µs.
        with contextlib.suppress(ConnectionError):
            self._sender.send(outputs)

    def send_dead(self, damage: str = "") -> None:
        """Send the last message of a core that has failed. A client that does not read does not get it. ``damage``:
        which weights are damaged; empty: that is not the reason."""
        # Not as a timeout of the socket, which would make it non-blocking for the thread that receives, too.
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", LAST_SECONDS, 0))
        with contextlib.suppress(OSError):
            self._sender.send_frames([ENGINE_CORE_DEAD, *([damage.encode()] if damage else [])])


def death_of(frames: Sequence[Frame]) -> EngineDeadError:
    """Return the error of clients whose core has sent its last message."""
    if len(frames) > 1:
        return EngineDamagedError(bytes(frames[1]).decode())
    return EngineDeadError("the engine core failed; see its log")
