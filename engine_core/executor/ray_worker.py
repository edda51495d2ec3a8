"""Runs a worker in an actor of a Ray cluster. Ray carries the calls; what they hold is msgpack, as elsewhere."""

import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..config import EngineConfig
from ..pending_output import await_output
from ..wire.scheduler_output import GrammarOutput, SchedulerOutput
from ..wire.serialization import Decoder, Frame, encode
from ..worker import Worker
from .executor import call_worker


class SampleMessage(msgspec.Struct, array_like=True, gc=False):
    """Ends the latest step of a worker."""

    grammar: GrammarOutput | None


class RayWorker:
    """Is the actor: Ray runs its calls one after the other, in the order in which the executor makes them."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._failure: Exception | None = None  # of the step executed last
        self._draws = False
        self._steps = Decoder[SchedulerOutput](SchedulerOutput)
        self._samples = Decoder[SampleMessage](SampleMessage)

    def address(self) -> tuple[str, str]:
        """Return the id of the actor's node, and ``HOST:PORT`` with a port of this node that is free now."""
        import ray

        util: Any = ray.util  # without types
        host = util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        return ray.get_runtime_context().get_node_id(), f"{host}:{port}"

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

    def live(self) -> None:
        """Wait until the actor ends."""
        threading.Event().wait()

    def _require(self) -> Worker:
        assert self._worker is not None, "start comes first"
        return self._worker
