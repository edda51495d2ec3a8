"""Sends and receives messages over a ZMQ socket with few copies and few new buffers."""

from collections import deque

import zmq

from .array_arena import Loan
from .serialization import Frame, encode

_COPY_BYTES = 64 << 10
"""Smaller frames are copied into ZMQ's memory, which is cheaper than tracking a send without a copy (as in pyzmq)."""
_MAX_IDLE = 4
"""Limit of buffers kept for reuse. More exist while a peer lags behind; they are dropped afterwards."""


class FrameSender:
    """Sends messages from one thread. A buffer is reused only after ZMQ has sent it."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._idle: list[bytearray] = []
        self._sending: deque[tuple[zmq.MessageTracker, bytearray]] = deque()  # in order; bounded by the socket's pipe

    @property
    def num_sending(self) -> int:
        """The number of buffers that ZMQ may still read."""
        return len(self._sending)

    def send(self, message: object, *head: bytes, loan: Loan | None = None) -> None:
        """Send the frames ``head`` and then ``message``. The caller must not write to the arrays of the message
        afterwards, except to those that ``loan`` took."""
        body = self._take_buffer()
        frames = [*head, *encode(message, loan, body)]
        if len(frames) == len(head) + 1 and len(body) < _COPY_BYTES:
            self._socket.send_multipart(frames)
            self._give_back(body)
            return
        last = len(frames) - 1
        trackers = [self._send_frame(frame, 0 if index == last else zmq.SNDMORE) for index, frame in enumerate(frames)]
        # Each frame has its own tracker: small frames are copied, and so done, before the large ones.
        self._sending.append((zmq.MessageTracker(*filter(None, trackers)), body))

    def _send_frame(self, frame: Frame, flags: int) -> zmq.MessageTracker | None:
        if len(frame) < _COPY_BYTES:
            self._socket.send(frame, flags)
            return None
        return self._socket.send(frame, flags, copy=False, track=True)

    def _take_buffer(self) -> bytearray:
        while self._sending and self._sending[0][0].done:
            self._give_back(self._sending.popleft()[1])
        return self._idle.pop() if self._idle else bytearray()

    def _give_back(self, body: bytearray) -> None:
        if len(self._idle) < _MAX_IDLE:
            self._idle.append(body)


def receive_frames(socket: zmq.Socket[bytes], num_small: int) -> list[Frame]:
    """Receive one message. Its first ``num_small`` frames are copied, which is cheaper for small ones; the others, the
    memory of arrays, stay where ZMQ received them."""
    frames: list[Frame] = [socket.recv()]
    while socket.rcvmore:
        frames.append(socket.recv() if len(frames) < num_small else socket.recv(copy=False).buffer)
    return frames
