"""Runs workers in actors of a Ray cluster, on one machine or several: for engines that are wider than a machine.

Ray carries the calls; what they hold is msgpack, as elsewhere.
"""

import math
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from ..data.config import EngineConfig
from ..data.errors import ExecutorFailedError, WeightsDamagedError, WorkerLostError
from ..data.handshake import WarmUp
from ..data.kv_groups import KVCacheConfig
from ..data.model_info import ModelInfo
from ..data.scheduler_output import GrammarOutput, ModelRunnerOutput, PendingOutput, SchedulerOutput, await_output
from ..kv_cache.pool_memory import PoolMemory
from ..kv_transfer.kv_copier import NUM_THREADS
from ..kv_transfer.kv_transport import KVPool
from ..kv_transfer.pool_parts import PartMessage, PartTransport, WorkerPart
from ..wire.frames import Decoder, Frame, encode, from_raw, to_raw
from .executor import PoolSpec, call_worker
from .ranks import (
    RankPool,
    RankPools,
    joined_results,
    make_rank_pool,
    merged_info,
    most_in_flight,
    parts_pool,
    rank_config,
)
from .ray_cluster import WorkerLiveness, connect, gpus_of_worker, node_address, open_lifeline, reserve
from .worker import Worker

MakePartTransport = Callable[[EngineConfig, str], PartTransport]
"""Makes the transport of a worker that serves its part of a pool at an address of its machine."""
_KV_CALLS = {"kv": NUM_THREADS + 1}
"""The group of calls that run next to steps: as many as the core's threads that copy, and one that ends theirs."""


def serves_parts(config: EngineConfig) -> bool:
    """Return whether each worker on Ray keeps a KV pool of its own and serves it, so that it may be on any machine:
    other engines read over the network, and nothing else needs the pool in the memory of the core's machine."""
    kv = config.kv
    return kv.transports == ("socket",) and bool(kv.socket_listen) and not kv.tier


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
    """Host and port of the actor's listener, as in :mod:`.ray_cluster`."""


class RayWorker:
    """Is the actor: Ray runs its calls one after the other, in the order in which the executor makes them."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._failure: Exception | None = None  # of the step executed last
        self._draws = False
        self._steps = Decoder[SchedulerOutput](SchedulerOutput)
        self._samples = Decoder[SampleMessage](SampleMessage)
        self._lifeline: socket.socket | None = None
        self._part: WorkerPart | None = None

    def place(self) -> RayPlace:
        """Return where the actor is. Called once."""
        import ray

        host = node_address()
        self._lifeline = open_lifeline(host)
        # torch's store wants a port before it exists, and listens at all addresses. Another process may take it in
        # between; then the start fails.
        with socket.socket() as probe:
            probe.bind(("", 0))
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
        """End the step. Returns the frames of its ``ModelRunnerOutput``; none from ranks that sample no tokens."""
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

    def make_part(self, make_transport: MakePartTransport, config: bytes, nbytes: int, kv_cache: bytes) -> bytes:
        """Make the KV pool in memory of this machine, and serve it to other engines. Takes an ``EngineConfig`` and a
        ``KVCacheConfig``, and returns a ``RankPool``, in msgpack."""
        worker = self._require()
        decoded = msgspec.msgpack.decode(kv_cache, type=KVCacheConfig)
        made = make_rank_pool(worker, decoded, PoolMemory.allocate(nbytes, shared=False))
        transport = make_transport(msgspec.msgpack.decode(config, type=EngineConfig), node_address())
        self._part = WorkerPart(worker.kv_pool(), transport)
        return msgspec.msgpack.encode(replace(made, endpoint=self._part.serve()))

    def move_kv(self, message: bytes) -> bytes:
        """Answer a ``PartMessage`` with a ``PartAnswer``, both in msgpack. Runs next to steps."""
        assert self._part is not None, "make_part comes first"
        return msgspec.msgpack.encode(self._part.answer(msgspec.msgpack.decode(message, type=PartMessage)))

    def _require(self) -> Worker:
        assert self._worker is not None, "start comes first"
        return self._worker


_POLL_SECONDS = 0.2
"""How often to check, while an answer is awaited, that all workers are there."""


class RayOutput:
    """Promises the output of a step."""

    def __init__(self, executor: "RayExecutor", answers: list[Any]) -> None:
        self._executor, self._answers = executor, answers

    def result(self) -> ModelRunnerOutput:
        return self._executor.output_of(self._answers)


class RayExecutor:
    """Implements ``Executor``. Every rank gets every message, in the same order.

    Where KV moves over sockets, each worker serves its part of the pool, as :class:`.ranks.RankParts` says. Where it
    moves in another way, all workers are on the machine of this process, which makes the memory of their pools, as
    :class:`.ranks.RankPools` says: transports read and write it here.

    A worker that ends is not replaced: the engine ends with it, and its requests go on in another one.

    Attributes:
        nodes: Ids of the nodes on which the workers are, by rank.
    """

    def __init__(
        self,
        config: EngineConfig,
        make_worker: Callable[[EngineConfig], Worker],
        make_transport: MakePartTransport | None = None,
    ) -> None:
        """Start an actor for each worker. ``make_worker`` and ``make_transport``: functions that every node can import;
        without the second no worker serves its part.

        Raises ``ValueError`` without Ray or a cluster, ``ExecutorFailedError`` if the cluster has no room.
        """
        self._ray = connect()
        self.max_concurrent_batches = most_in_flight(config)
        self._output_rank = config.parallel.output_rank
        self._outputs = Decoder[ModelRunnerOutput](ModelRunnerOutput)
        self._failure = ""
        self._is_closing = False
        self._on_failure: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._group: Any = None
        self._liveness: WorkerLiveness | None = None
        self._moves_kv = bool(config.kv.transports or config.kv.tier)
        self._make_transport = make_transport if serves_parts(config) else None
        self._config = config
        self._num_copies = config.parallel.prefill_context_parallel_size
        is_shared = self._moves_kv and self._make_transport is None
        self._pools = RankPools(config.parallel.world_size, self._num_copies) if is_shared else None
        self._pool: KVPool | None = None
        self.nodes: list[str] = []
        self.actors: list[Any] = []
        try:
            self._start(config, make_worker)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, config: EngineConfig, make_worker: Callable[[EngineConfig], Worker]) -> None:
        gpus = gpus_of_worker(config, self._ray.cluster_resources())
        if gpus:  # a worker that finds none shall not compute on its processors instead
            config = replace(config, worker=replace(config.worker, device="cuda"))
        self._group = reserve(self._ray, config.parallel.world_size, gpus, on_this_machine=self._pools is not None)
        self.actors = [self._make_actor(place, gpus) for place in range(config.parallel.world_size)]
        places: list[RayPlace] = self._ray.get([actor.place.remote() for actor in self.actors])
        # Before the workers start: loading takes minutes, in which a lost machine should end the start.
        self._liveness = WorkerLiveness([place.lifeline for place in places], self._lose)
        self.nodes = [place.node for place in places]
        on_node = Counter(self.nodes)
        rendezvous = places[0].rendezvous
        configs = [rank_config(config, rank, rendezvous, on_node[node]) for rank, node in enumerate(self.nodes)]
        self._get(
            [
                actor.start.remote(make_worker, msgspec.msgpack.encode(each))
                for actor, each in zip(self.actors, configs, strict=True)
            ]
        )

    def _make_actor(self, place: int, gpus: int) -> Any:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=place
        )
        actor = self._ray.remote(RayWorker)
        if self._make_transport is not None:
            actor = self._ray.remote(concurrency_groups=_KV_CALLS)(RayWorker)
        return actor.options(num_cpus=1, num_gpus=gpus, scheduling_strategy=strategy).remote()

    def load_model(self) -> ModelInfo:
        models = msgspec.convert(self._prepare("load_model"), list[ModelInfo])
        return merged_info(models, self._output_rank, self._num_copies)

    def determine_available_memory(self) -> int:
        return min(msgspec.convert(self._prepare("determine_available_memory"), list[int]))

    def initialize_kv_cache(self, kv_cache: KVCacheConfig, pool: PoolSpec | None = None) -> WarmUp:
        if pool is None:
            warm_ups = msgspec.convert(self._prepare("initialize_kv_cache", kv_cache), list[WarmUp])
        else:
            warm_ups = [part.warm_up for part in self._make_pools(kv_cache, pool)]
        return max(warm_ups, key=lambda warm_up: warm_up.seconds)

    def _make_pools(self, kv_cache: KVCacheConfig, pool: PoolSpec) -> list[RankPool]:
        if self._make_transport is not None:
            return self._make_parts(kv_cache, pool, self._make_transport)
        assert self._pools is not None, "the configuration at start moves KV"
        # Ray's own daemon starts the workers, so they inherit no descriptor from here; a path in /proc reaches the
        # memory.
        size, path = self._pools.allocate(pool.nbytes), f"/proc/{os.getpid()}/fd/{self._pools.fd}"
        raw = bytes(to_raw(kv_cache))
        answers = [actor.make_pool.remote(path, rank * size, size, raw) for rank, actor in enumerate(self.actors)]
        parts = [msgspec.msgpack.decode(answer, type=RankPool) for answer in self._get(answers)]
        self._pool = self._pools.merge(parts)
        return parts

    def _make_parts(self, kv_cache: KVCacheConfig, pool: PoolSpec, make_transport: MakePartTransport) -> list[RankPool]:
        config, raw = msgspec.msgpack.encode(self._config), bytes(to_raw(kv_cache))
        answers = [actor.make_part.remote(make_transport, config, pool.nbytes, raw) for actor in self.actors]
        parts = [msgspec.msgpack.decode(answer, type=RankPool) for answer in self._get(answers)]
        self._pool = parts_pool(self._move_kv, parts, pool.nbytes, self._num_copies)
        return parts

    def _move_kv(self, messages: Sequence[bytes]) -> Callable[[], list[bytes]]:
        """Send a message to each of the first workers, as :data:`.ranks.Send` says. Called by any thread."""
        self._check_alive()
        (group,) = _KV_CALLS
        answers = [
            actor.move_kv.options(concurrency_group=group).remote(message)
            for actor, message in zip(self.actors, messages, strict=False)
        ]
        return lambda: self._get(answers)

    def kv_pool(self) -> KVPool:
        assert self._pool is not None, "initialize_kv_cache comes first, with a PoolSpec"
        return self._pool

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._send("execute", scheduler_output)

    def sample_tokens(self, grammar: GrammarOutput | None) -> PendingOutput:
        return RayOutput(self, self._send("sample", SampleMessage(grammar)))

    def collective_rpc(self, method: str, *args: object) -> list[object]:
        return joined_results([self._answer_of(each) for each in self._call(method, args)])

    def _prepare(self, method: str, *args: object) -> list[object]:
        """Call a method that workers make once, as they start: any error ends them, so the first one is raised."""
        return [from_raw(msgspec.Raw(answer)) for answer in self._get(self._call(method, args))]

    def _call(self, method: str, args: Sequence[object]) -> list[Any]:
        self._check_alive()
        raw = [bytes(to_raw(arg)) for arg in args]
        return [actor.call.remote(method, raw) for actor in self.actors]

    def _answer_of(self, answer: Any) -> object | Exception:
        """Wait for one rank's result, or its error."""
        try:
            return from_raw(msgspec.Raw(self._get([answer])[0]))
        except (ValueError, ExecutorFailedError) as error:
            return error

    def check_health(self, timeout: float) -> None:
        try:
            self._get(self._call("check_health", ()), timeout)
        except ValueError as error:
            raise ExecutorFailedError(f"a worker failed: {error}") from error

    def on_failure(self, callback: Callable[[], None]) -> None:
        with self._lock:
            self._on_failure = callback
            if self._failure:
                callback()

    def replace_workers(self) -> None:
        """Raise ``ExecutorFailedError``: the engine ends with its first worker that ends."""
        raise ExecutorFailedError("workers on Ray are not replaced")

    def shutdown(self) -> None:
        if self._is_closing:
            return
        with self._lock:
            self._is_closing = True
        if self._liveness is not None:
            self._liveness.close()
        for actor in self.actors:
            self._ray.kill(actor)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        if self._pools is not None:
            self._pools.close()
        self._failure = self._failure or "the executor was shut down"

    def output_of(self, answers: list[Any]) -> ModelRunnerOutput:
        """Wait for the output of a step, and for errors of all ranks: one that fails leaves the others waiting. Where
        KV moves, wait for all ranks: no transfer may touch a block while any of them computes with it."""
        output = answers[self._output_rank]
        return self._outputs.decode(self._collect(answers, answers if self._moves_kv else [output])[output])

    def _send(self, method: str, message: object) -> list[Any]:
        self._check_alive()
        frames = [bytes(frame) for frame in encode(message)]
        return [getattr(actor, method).remote(frames) for actor in self.actors]

    def _get(self, answers: Sequence[Any], timeout: float = math.inf) -> list[Any]:
        """Return the answers. Raises what :meth:`_collect` raises."""
        found = self._collect(answers, answers, timeout)
        return [found[answer] for answer in answers]

    def _collect(self, answers: Sequence[Any], awaited: Sequence[Any], timeout: float = math.inf) -> dict[Any, Any]:
        """Return the answers that have come until all that are ``awaited`` are among them.

        Raises the first error among all answers: ``ValueError`` for a mistake of the caller, ``WorkerLostError`` if a
        worker is lost, ``ExecutorFailedError`` for any other error, and after ``timeout`` seconds.
        """
        found: dict[Any, Any] = {}
        pending, ends_at = list(answers), time.monotonic() + timeout
        while not all(answer in found for answer in awaited):
            self._check_alive()  # Ray itself takes a minute to notice a machine that is silent
            if time.monotonic() >= ends_at:
                raise ExecutorFailedError(f"no answer within {timeout:g} s from a worker")
            ended, pending = self._ray.wait(pending, timeout=min(_POLL_SECONDS, max(0.0, ends_at - time.monotonic())))
            found |= {answer: self._fetch(answer) for answer in ended}
        return found

    def _fetch(self, answer: Any) -> Any:
        """Return an answer that has come, or raise its error as :meth:`_collect`."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(answer)
        except errors.RayTaskError as error:
            if isinstance(error.cause, (ValueError, TypeError)):
                raise ValueError(str(error.cause)) from None
            if isinstance(error.cause, WeightsDamagedError):
                raise WeightsDamagedError(f"a worker: {error.cause}") from error
            raise ExecutorFailedError(f"a worker: {type(error.cause).__name__}: {error.cause}") from error
        except errors.RayError as error:
            raise WorkerLostError(f"a worker on Ray ended: {error}") from error

    def _lose(self, rank: int) -> None:
        with self._lock:
            if not self._is_closing:
                self._failure = f"worker {rank} on Ray ended, or its machine is lost"
                self._on_failure()

    def _check_alive(self) -> None:
        if self._failure:
            raise WorkerLostError(self._failure)
