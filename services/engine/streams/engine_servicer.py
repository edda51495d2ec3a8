"""Serves ``Engine``: one ``Connect`` stream per peer."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from random import Random

from tokenloom.request.errors import TokenloomError
from tokenloom.services.runtime.streams.slotted_stream import receive_hello
from tokenloom.v1 import engine_pb2, engine_pb2_grpc

from ..core.core_link import CoreLink
from ..kv.kv_front import KVFront
from ..records.identity import Identity
from ..records.load import LoadTracker
from .connect_stream import ConnectStream, Context

_MOST_REASON = 500
"""Characters of a peer's reason, which logs and the coordinator show."""


class EngineServicer(engine_pb2_grpc.EngineServicer):
    """Owns the streams of all peers.

    Attributes:
        quarantine: Set once, to why a peer believes that the engine computes wrong tokens.
    """

    def __init__(
        self,
        identity: Identity,
        core: CoreLink,
        load: LoadTracker,
        kv: KVFront | None,
        random: Random,
        *,
        frame_interval: float,
    ) -> None:
        """``kv``: None if the engine moves no KV. ``random`` draws leases and seeds. ``frame_interval``: as in
        :class:`FramePace`."""
        self._identity = identity
        self._core = core
        self._load = load
        self._kv = kv
        self._random = random
        self._frame_interval = frame_interval
        self.quarantine: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._stream_ids = itertools.count(1)
        self._streams: dict[ConnectStream, asyncio.Event] = {}  # each event is set when the stream has ended

    async def Connect(  # type: ignore[override]  # a coroutine that writes to the context, not a generator
        self, request_iterator: AsyncIterator[engine_pb2.EngineInput], context: Context
    ) -> None:
        """Serve one stream; engine.proto has the contract."""
        hello = self._identity.hello()
        first = await receive_hello(request_iterator, hello)
        stream = ConnectStream(
            next(self._stream_ids),
            first.hello,
            self._identity.limits,
            self._core,
            self._load,
            self._random,
            self._kv,
            frame_interval=self._frame_interval,
        )
        stream.on_quarantine = self._quarantined
        ended = self._streams[stream] = asyncio.Event()
        try:
            await stream.run(first, request_iterator, context, hello)
        finally:
            del self._streams[stream]
            ended.set()

    def _quarantined(self, said: engine_pb2.Quarantine) -> None:
        identity = self._identity
        # A message that was damaged, or is of a peer that sends anything, must not end an engine.
        if identity.can_be_quarantined and said.engine_epoch == identity.epoch and not self.quarantine.done():
            self.quarantine.set_result(said.reason[:_MOST_REASON])

    def fail_live(self, error: TokenloomError) -> None:
        """End every live request with ``error``."""
        for stream in self._streams:
            stream.fail_live(error)

    async def idle(self) -> None:
        """Wait until every request is answered and the answers were sent."""
        while busy := [stream for stream in self._streams if not stream.is_idle]:
            await busy[0].wait_idle()

    async def close(self, error: TokenloomError, grace: float) -> None:
        """Fail all live requests and end all streams with ``error``; wait at most ``grace`` seconds for their ends."""
        ends = list(self._streams.values())
        for stream in self._streams:
            stream.close(error)
        try:
            async with asyncio.timeout(grace):
                for ended in ends:
                    await ended.wait()
        except TimeoutError:
            pass  # the peer does not read: its stream breaks when the server stops
