"""Runs a worker in an actor of a Ray cluster. Ray carries the calls; what they hold is msgpack, as elsewhere."""

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from ..data.config import EngineConfig
from ..data.kv_cache_config import KVCacheConfig
from ..data.pending_output import await_output
from ..data.scheduler_output import GrammarOutput, SchedulerOutput
from ..kv_cache.pool_memory import PoolMemory
from ..wire.serialization import Decoder, Frame, encode
from .executor import call_worker
from .lifelines import open_lifeline
from .rank_pools import make_rank_pool
from .worker import Worker


class SampleMessage(msgspec.Struct, array_like=True, gc=False):
    """Ends the latest step of a worker."""

    grammar: GrammarOutput | None


class RayPlace(NamedTuple):
    """Says where an actor is."""

    node: str
    """Id of its node in the Ray cluster."""
    rendezvous: str
    """``HOST:PORT`` with a port of the node that was free a moment ago."""
    lifeline: tuple[str, int]
    """Host and port of the actor's listener, as in :mod:`.lifelines`."""


class RayWorker:
    """Is the actor: Ray runs its calls one after the other, in the order in which the executor makes them."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._failure: Exception | None = None  # of the step executed last
        self._draws = False
        self._steps = Decoder[SchedulerOutput](SchedulerOutput)
        self._samples = Decoder[SampleMessage](SampleMessage)
        self._lifeline: socket.socket | None = None

    def place(self) -> RayPlace:
        """Return where the actor is. Called once."""
        import ray

        util: Any = ray.util  # without types
        host = util.get_node_ip_address()
        self._lifeline = open_lifeline(host)
        # torch's store wants a port before it exists. Another process may take it in between; then the start fails.
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        node = ray.get_runtime_context().get_node_id()
        return RayPlace(node, f"{host}:{port}", (host, self._lifeline.getsockname()[1]))

    def start(self, make_worker: Callable[[EngineConfig], Worker], config: bytes) -> None:
        """Make the worker. Raises ``ValueError`` for a configuration that does not work."""
        decoded = msgspec.msgpack.decode(config, type=EngineConfig)
        self._draws = decoded.parallel.rank == decoded.parallel.output_rank
        self._worker = make_worker(decoded)

    def execute(self, frames: Sequence[Frame]) -> None:
        """Run the forward pass of a step. An error is that of the :meth:`sample` which follows."""
        self._failure = None
        try:
            self._require().execute_model(self._steps.decode(frames))
        except Exception as error:
            self._failure = error

    def sample(self, frames: Sequence[Frame]) -> list[bytes]:
        """End the step. Returns the frames of its ``ModelRunnerOutput``; none from ranks that draw no tokens."""
        if self._failure is not None:
            raise self._failure
        output = await_output(self._require().sample_tokens(self._samples.decode(frames).grammar))
        return [bytes(frame) for frame in encode(output)] if self._draws else []

    def call(self, method: str, args: Sequence[bytes]) -> bytes:
        """Call a method of ``WORKER_METHODS``, with arguments and a result in msgpack."""
        return bytes(call_worker(self._require(), method, [msgspec.Raw(arg) for arg in args]))

    def make_pool(self, path: str, offset: int, nbytes: int, kv_cache: bytes) -> bytes:
        """Make the KV pool in a part of the memory behind ``path``, which the executor's process has made on this
        machine. Takes a ``KVCacheConfig`` and returns a ``RankPool``, both in msgpack."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = PoolMemory.of_part(fd, offset, nbytes)
        finally:
            os.close(fd)
        config = msgspec.msgpack.decode(kv_cache, type=KVCacheConfig)
        return msgspec.msgpack.encode(make_rank_pool(self._require(), config, memory))

    def _require(self) -> Worker:
        assert self._worker is not None, "start comes first"
        return self._worker
