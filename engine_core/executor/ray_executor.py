"""Runs workers in actors of a Ray cluster, on one machine or several: for engines that are wider than a machine.

Ray carries the calls; what they hold is msgpack, as elsewhere.
"""

import math
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from ..data.config import EngineConfig
from ..data.errors import ExecutorFailedError, WorkerLostError
from ..data.handshake import WarmUp
from ..data.kv_groups import KVCacheConfig
from ..data.model_info import ModelInfo
from ..data.scheduler_output import GrammarOutput, ModelRunnerOutput, PendingOutput, SchedulerOutput, await_output
from ..kv_cache.pool_memory import PoolMemory
from ..kv_transfer.kv_transport import KVPool
from ..wire.frames import Decoder, Frame, encode, from_raw, to_raw
from .executor import PoolSpec, call_worker
from .ranks import RankPool, RankPools, joined_results, make_rank_pool, merged_info, most_in_flight, rank_config
from .worker import Worker
from .worker_liveness import WorkerLiveness, open_lifeline

_PLACEMENT_SECONDS = 60.0
"""How long the cluster may take to make room for the workers."""
_SHARE_OF_NODE = 0.001
"""Of the resource that names a node: a bundle that asks for a share of it is placed there."""


def connect(option: str = "distributed_executor_backend") -> Any:
    """Join the Ray cluster and return the library. ``option``: which one asks for it, for errors.

    Raises ``ValueError`` without Ray or a cluster.
    """
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        import ray
        import ray.util.scheduling_strategies
    except ModuleNotFoundError:
        raise ValueError(f'{option} ray needs Ray; install it with: pip install "tokenloom[ray]"') from None
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError as error:
            raise ValueError(
                f"{option}: there is no Ray cluster; start one with `ray start --head`, and join "
                f"other machines with `ray start --address HOST:6379` ({error})"
            ) from None
    # Ray's own handler ends the process in the middle of its requests.
    if on_terminate is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_terminate)
    return ray


def node_address() -> str:
    """Return the address of this actor's node, at which the other nodes reach it."""
    import ray

    util: Any = ray.util  # without types
    address: str = util.get_node_ip_address()
    return address


def reserve(ray: Any, count: int, gpus: int, *, on_this_machine: bool = False, what: str = "workers") -> Any:
    """Return a placement group with a bundle for each of ``count`` workers, as soon as the cluster has made room.

    ``what``: names in errors what gets a bundle. Raises ``ExecutorFailedError`` if the cluster has no room.
    """
    bundle: dict[str, float] = {"CPU": 1, "GPU": gpus}
    if on_this_machine:
        # Ray has no rule "on this node" for placement groups, but each node owns a resource of its name, of which a
        # thousandth is enough.
        bundle[f"node:{ray.util.get_node_ip_address()}"] = _SHARE_OF_NODE
    group = ray.util.placement_group([bundle] * count)
    if group.wait(_PLACEMENT_SECONDS):
        return group
    resources = ray.available_resources()
    ray.util.remove_placement_group(group)
    free = {name: resources.get(name, 0) for name in ("CPU", "GPU")}
    where = " on the machine of the engine, where all must be because KV moves" if on_this_machine else ""
    with_gpus = f" and {gpus} GPUs" if gpus > 1 else " and a GPU" if gpus else ""
    raise ExecutorFailedError(
        f"the Ray cluster has no room for {count} {what} with a CPU{with_gpus} each{where}; "
        f"free in the cluster are {free}"
    )


def gpus_of_worker(config: EngineConfig, cluster: Mapping[str, float]) -> int:
    """Return how many GPUs each worker gets.

    Args:
        config: Of the engine.
        cluster: What the nodes that have joined the Ray cluster have, by kind.

    Raises ``ValueError`` if the device is to be chosen, and none of these nodes has a GPU: one that has may join later,
    and the machine of the engine's core need not have what the workers have.
    """
    worker = config.worker
    if worker.worker != "model":
        return 0
    if worker.device == "auto" and not cluster.get("GPU"):
        raise ValueError(
            "device: no node that has joined the Ray cluster has a GPU, and others may join later; say which workers "
            "to wait for: cpu or cuda, instead of auto"
        )
    return int(worker.device != "cpu")


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
    """Host and port of the actor's listener, as in :mod:`.worker_liveness`."""


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

        host = node_address()
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

    Where KV moves, all workers are on the machine of this process, which makes the memory of their pools, as
    :class:`.ranks.RankPools` says: transports read and write it here.

    A worker that ends is not replaced: the engine ends with it, and its requests go on in another one.

    Attributes:
        nodes: Ids of the nodes on which the workers are, by rank.
    """

    def __init__(self, config: EngineConfig, make_worker: Callable[[EngineConfig], Worker]) -> None:
        """Start an actor for each worker. ``make_worker``: a function that every node can import.

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
        moves_kv = bool(config.kv.transports or config.kv.offload_path)
        self._num_copies = config.parallel.prefill_context_parallel_size
        self._pools = RankPools(config.parallel.world_size, self._num_copies) if moves_kv else None
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
        assert self._pools is not None, "the configuration at start moves KV"
        # Ray's own daemon starts the workers, so they inherit no descriptor from here; a path in /proc reaches the
        # memory.
        size, path = self._pools.allocate(pool.nbytes), f"/proc/{os.getpid()}/fd/{self._pools.fd}"
        raw = bytes(to_raw(kv_cache))
        answers = [actor.make_pool.remote(path, rank * size, size, raw) for rank, actor in enumerate(self.actors)]
        parts = [msgspec.msgpack.decode(answer, type=RankPool) for answer in self._get(answers)]
        self._pool = self._pools.merge(parts)
        return parts

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
        return self._outputs.decode(self._collect(answers, answers if self._pools else [output])[output])

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
