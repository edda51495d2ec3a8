"""Keeps a stream to one output processor: connects, says hello, and connects again after its end."""

import asyncio
import logging
import math
from collections.abc import Callable

import grpc.aio

from tokenloom.request import errors
from tokenloom.services.runtime.peers import hello
from tokenloom.services.runtime.peers.silence import was_silent
from tokenloom.services.runtime.tasks import first_of
from tokenloom.v1 import output_processor_pb2 as pb
from tokenloom.v1 import output_processor_pb2_grpc, types_pb2

from .process_stream import Call, ProcessStream, StreamNotNeeded, StreamOwner, next_frame
from .request_ids import UNKNOWN_MARK, mark_of

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
        call = stub.Process()
        stream = ProcessStream(self._owner)
        greeted = False
        try:
            stream.leaving = await self._greet(call, stream)
            # After the hello only: until then an output processor of another model may be at this address.
            greeted, self.stream = True, stream
            if self.changed_at > -math.inf:
                self.changed_at = asyncio.get_running_loop().time()
            log.info("connected to output processor %s", self.address)
            self._owner.on_open()
            await first_of(stream.write(call), stream.watch(self._is_needed), stream.read(call))
        except (grpc.aio.AioRpcError, errors.TokenloomError, asyncio.InvalidStateError, TimeoutError) as error:
            level = logging.WARNING if greeted and not isinstance(error, StreamNotNeeded) else logging.DEBUG
            reason = error.code().name if isinstance(error, grpc.aio.AioRpcError) else error
            log.log(level, "output processor %s: %s", self.address, reason)
            stream.was_silent = was_silent(error)
        except Exception:  # of a message that cannot be: it ends this stream and not the gateway
            log.exception("the stream to output processor %s ended", self.address)
        finally:
            call.cancel()  # otherwise the call and its requests would stay alive on the other side
            self.stream = None
            if greeted:
                self.changed_at = asyncio.get_running_loop().time()
            # Detached before they are placed again: a late frame of the old stream must not reach a collector that
            # already gets the output from the new one.
            self._owner.on_lost(stream, stream.end())
        self._backoff = MIN_BACKOFF if greeted else min(self._backoff * 2, MAX_BACKOFF)
        await asyncio.sleep(self._backoff)

    async def _greet(self, call: Call, stream: ProcessStream) -> bool:
        """Exchange hellos; return whether the output processor drains."""
        async with asyncio.timeout(hello.HELLO_SECONDS):
            await call.write(pb.ProcessInput(hello=self._ours))
            frame = await next_frame(call)
        hello.check_hello(frame.hello, fingerprint=self._ours.fingerprint)
        self.mark = mark_of(frame.hello.peer_id)
        stream.incarnation = self.address, frame.hello.epoch
        return frame.leaving
