"""Keeps a stream to one output processor: connects, says hello, and connects again after its end."""

import asyncio
import logging
import math
from collections.abc import Callable

from tokenloom.services.runtime.peers.hello import check_hello
from tokenloom.services.runtime.streams.client_stream import describe, was_silent
from tokenloom.v1 import output_processor_pb2 as pb
from tokenloom.v1 import output_processor_pb2_grpc, types_pb2

from ..records.request_ids import UNKNOWN_MARK, mark_of
from .process_stream import ProcessStream, StreamNotNeeded, StreamOwner

log = logging.getLogger(__name__)

MIN_BACKOFF, MAX_BACKOFF = 0.1, 0.2
"""Seconds between two attempts to connect: a restarted output processor is used at once."""


class OutputLink:
    """Connects to one output processor, again and again.

    Attributes:
        stream: The live stream, once both sides have said hello; otherwise None.
        mark: What stands for the output processor in ids of requests, once it has said hello.
        changed_at: When it was lost, or returned, last; -inf if it was never lost.
    """

    def __init__(
        self,
        address: str,
        ours: types_pb2.Hello,
        owner: StreamOwner,
        is_needed: Callable[[], bool] = lambda: True,
    ) -> None:
        """Args:
        ours: What this gateway says hello with.
        owner: Learns what happens to the streams.
        is_needed: Returns whether a stream stays open without requests.
        """
        self.address = address
        self.mark = UNKNOWN_MARK
        self.changed_at = -math.inf
        self._owner = owner
        self.stream: ProcessStream | None = None
        self._ours = ours
        self._is_needed = is_needed
        self._backoff = MIN_BACKOFF

    async def connect(self, stub: "output_processor_pb2_grpc.OutputProcessorAsyncStub") -> None:
        """Keep one incarnation of the stream to its end, then back off."""
        stream = ProcessStream(self._owner, self._is_needed)
        try:
            message = pb.ProcessInput(hello=self._ours)
            error = await stream.serve(stub.Process(), message, lambda frame: self._greet(stream, frame))
            was_used = self.stream is stream
            level = logging.WARNING if was_used and not isinstance(error, StreamNotNeeded) else logging.DEBUG
            log.log(level, "output processor %s: %s", self.address, describe(error))
            stream.was_silent = was_silent(error)
        finally:
            if was_used := self.stream is stream:
                self.stream = None
                self.changed_at = asyncio.get_running_loop().time()
            # Detached before they are placed again: a late frame of the old stream must not reach a collector that
            # already gets the output from the new one.
            self._owner.on_lost(stream, stream.end())
        self._backoff = MIN_BACKOFF if was_used else min(self._backoff * 2, MAX_BACKOFF)
        await asyncio.sleep(self._backoff)

    def _greet(self, stream: ProcessStream, frame: pb.ProcessFrame) -> None:
        """Begin to use a stream whose output processor has said hello. Raises ``FailedPrecondition``."""
        # After the hello only: until then an output processor of another model may be at this address.
        check_hello(frame.hello, fingerprint=self._ours.fingerprint)
        self.mark = mark_of(frame.hello.peer_id)
        stream.leaving, stream.incarnation = frame.leaving, (self.address, frame.hello.epoch)
        self.stream = stream
        if self.changed_at > -math.inf:
            self.changed_at = asyncio.get_running_loop().time()
        log.info("connected to output processor %s", self.address)
        self._owner.on_open()
