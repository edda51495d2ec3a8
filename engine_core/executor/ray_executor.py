"""Runs workers in actors of a Ray cluster, on one machine or several: for engines that are wider than a machine."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..config import EngineConfig
from ..errors import ExecutorFailedError, WorkerLostError
from ..kv_cache.kv_cache_config import KVCacheConfig
from ..kv_transfer.kv_transport import KVPool
from ..pending_output import PendingOutput
from ..wire.handshake import WarmUp
from ..wire.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from ..wire.serialization import Decoder, encode, from_raw, to_raw
from ..worker import ModelInfo, Worker
from .executor import PoolSpec
from .merged_info import merged_info
from .rank_config import most_in_flight, rank_config
from .ray_worker import RayWorker, SampleMessage

_PLACEMENT_SECONDS = 60.0
"""How long the cluster may take to make room for the workers."""


class RayOutput:
    """Promises the output of a step."""

    def __init__(self, executor: "RayExecutor", answers: list[Any]) -> None:
        self._executor, self._answers = executor, answers

    def result(self) -> ModelRunnerOutput:
        return self._executor.output_of(self._answers)


class RayExecutor:
    """Implements ``Executor``. Every rank gets every message, in the same order.

    A worker that ends is not replaced: the engine ends with it, and its requests go on in another one.
    """

    def __init__(self, config: EngineConfig, make_worker: Callable[[EngineConfig], Worker]) -> None:
        """Start an actor for each worker. ``make_worker``: a function that every node can import.

        Raises ``ValueError`` without Ray or a cluster, ``ExecutorFailedError`` if the cluster has no room.
        """
        self._ray = _connect(config)
        self.max_concurrent_batches = most_in_flight(config)
        self._output_rank = config.parallel.output_rank
        self._outputs = Decoder[ModelRunnerOutput](ModelRunnerOutput)
        self._failure = ""
        self._is_closing = False
        self._on_failure: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._group: Any = None
        self.actors: list[Any] = []
        try:
            self._start(config, make_worker)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, config: EngineConfig, make_worker: Callable[[EngineConfig], Worker]) -> None:
        gpus = _gpus_of_worker(self._ray, config)
        self._group = self._ray.util.placement_group([{"CPU": 1, "GPU": gpus}] * config.parallel.world_size)
        if not self._group.wait(_PLACEMENT_SECONDS):
            resources = self._ray.available_resources()
            found = {name: resources.get(name, 0) for name in ("CPU", "GPU")}
            raise ExecutorFailedError(
                f"the Ray cluster has no room for {config.parallel.world_size} workers with a CPU"
                f"{' and a GPU' if gpus else ''} each: free are {found}"
            )
        self.actors = [self._make_actor(place, gpus) for place in range(config.parallel.world_size)]
        places = self._ray.get([actor.address.remote() for actor in self.actors])
        on_node = Counter(node for node, _ in places)
        rendezvous = places[0][1]
        configs = [rank_config(config, rank, rendezvous, on_node[node]) for rank, (node, _) in enumerate(places)]
        self._get(
            [
                actor.start.remote(make_worker, msgspec.msgpack.encode(each))
                for actor, each in zip(self.actors, configs, strict=True)
            ]
        )
        lives = [actor.live.options(concurrency_group="watch").remote() for actor in self.actors]
        threading.Thread(target=self._watch, args=(lives,), name="worker-monitor", daemon=True).start()

    def _make_actor(self, place: int, gpus: int) -> Any:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=place
        )
        actor = self._ray.remote(concurrency_groups={"watch": 1})(RayWorker)
        return actor.options(num_cpus=1, num_gpus=gpus, scheduling_strategy=strategy).remote()

    def load_model(self) -> ModelInfo:
        models = msgspec.convert(self.collective_rpc("load_model"), list[ModelInfo])
        return merged_info(models, self._output_rank)

    def determine_available_memory(self) -> int:
        return min(msgspec.convert(self.collective_rpc("determine_available_memory"), list[int]))

    def initialize_kv_cache(self, kv_cache: KVCacheConfig, pool: PoolSpec | None = None) -> WarmUp:
        warm_ups = msgspec.convert(self.collective_rpc("initialize_kv_cache", kv_cache), list[WarmUp])
        return max(warm_ups, key=lambda warm_up: warm_up.seconds)

    def kv_pool(self) -> KVPool:
        raise AssertionError("the configuration of an engine on Ray moves no KV")

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._send("execute", scheduler_output)

    def sample_tokens(self, grammar: GrammarOutput | None) -> PendingOutput:
        return RayOutput(self, self._send("sample", SampleMessage(grammar)))

    def collective_rpc(self, method: str, *args: object) -> list[object]:
        self._check_alive()
        raw = [bytes(to_raw(arg)) for arg in args]
        answers = self._get([actor.call.remote(method, raw) for actor in self.actors])
        return [from_raw(msgspec.Raw(answer)) for answer in answers]

    def check_health(self, timeout: float) -> None:
        self._check_alive()
        try:
            self._get([actor.call.remote("check_health", []) for actor in self.actors], timeout)
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
        self._is_closing = True
        for actor in self.actors:
            self._ray.kill(actor)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        self._failure = self._failure or "the executor was shut down"

    def output_of(self, answers: list[Any]) -> ModelRunnerOutput:
        """Wait for the answers of all ranks to a step: a rank that fails leaves the others waiting."""
        pending = list(answers)
        while answers[self._output_rank] in pending:
            ended, pending = self._ray.wait(pending)
            self._get(ended)
        return self._outputs.decode(self._get([answers[self._output_rank]])[0])

    def _send(self, method: str, message: object) -> list[Any]:
        self._check_alive()
        frames = [bytes(frame) for frame in encode(message)]
        return [getattr(actor, method).remote(frames) for actor in self.actors]

    def _get(self, answers: Sequence[Any], timeout: float | None = None) -> list[Any]:
        """Return the answers. Raises ``ValueError`` for a mistake of the caller, ``WorkerLostError`` if an actor has
        ended, ``ExecutorFailedError`` for any other error, and if there is no answer after ``timeout`` seconds."""
        errors = self._ray.exceptions
        try:
            found: list[Any] = self._ray.get(list(answers), timeout=timeout)
        except errors.RayTaskError as error:
            if isinstance(error.cause, (ValueError, TypeError)):
                raise ValueError(str(error.cause)) from None
            raise ExecutorFailedError(f"a worker: {type(error.cause).__name__}: {error.cause}") from error
        except errors.GetTimeoutError:
            raise ExecutorFailedError(f"no answer within {timeout:g} s from a worker") from None
        except errors.RayError as error:
            raise WorkerLostError(f"a worker on Ray ended: {error}") from error
        return found

    def _watch(self, lives: list[Any]) -> None:
        ended, _ = self._ray.wait(lives)
        with self._lock:
            if not self._is_closing:
                self._failure = f"worker {lives.index(ended[0])} on Ray ended"
                self._on_failure()

    def _check_alive(self) -> None:
        if self._failure:
            raise WorkerLostError(self._failure)


def _connect(config: EngineConfig) -> Any:
    """Join the Ray cluster and return the library."""
    for name, value in {"kv_transports": config.kv.transports, "kv_offload_path": config.kv.offload_path}.items():
        if value:
            raise ValueError(f"{name}: KV of workers on Ray does not move; use distributed_executor_backend mp")
    try:
        import ray
        import ray.util.scheduling_strategies
    except ModuleNotFoundError:
        raise ValueError(
            'distributed_executor_backend ray needs Ray; install it with: pip install "tokenloom[ray]"'
        ) from None
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError as error:
            raise ValueError(
                "distributed_executor_backend: there is no Ray cluster; start one with `ray start --head`, and join "
                f"other machines with `ray start --address HOST:6379` ({error})"
            ) from None
    return ray


def _gpus_of_worker(ray: Any, config: EngineConfig) -> int:
    if config.worker.device == "auto":
        return int(ray.cluster_resources().get("GPU", 0) >= config.parallel.world_size)
    return int(config.worker.device == "cuda")
