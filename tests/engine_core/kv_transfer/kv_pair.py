"""Engines whose KV moves between them, with a front in memory: nothing runs but what the test runs."""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tests.engine_core.executor.late import EXECUTORS
from tests.engine_core.helpers import VOCAB_SIZE, make_config, make_request
from tests.engine_core.kv_cache.grouped_hash_worker import GroupedHashWorker
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import EngineConfig, KVConfig, StructuredOutputConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.kv_messages import (
    KVAcquire,
    KVAnswer,
    KVCall,
    KVProgress,
    KVRelease,
    KVRemoteProgress,
    KVRenew,
    KVTarget,
    KVVerdict,
    KVVerify,
)
from tokenloom.engine_core.data.messages import AcceptTokens, EngineCoreOutput, FinishReason
from tokenloom.engine_core.fake_workers.hash_row import STATE_BYTES
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker
from tokenloom.engine_core.kv_transfer.block_loads import LoadOrder
from tokenloom.engine_core.kv_transfer.core_kv import CoreKV
from tokenloom.engine_core.kv_transfer.failpoints import Failpoints
from tokenloom.engine_core.kv_transfer.kv_service import KVService
from tokenloom.engine_core.kv_transfer.kv_transport import BlockIds, KVPool, checked_pairs, copy_blocks
from tokenloom.engine_core.kv_transfer.leases import prompt_digest
from tokenloom.engine_core.kv_transfer.pull_connector import PullConnector


class MemoryTransport:
    """Pools of one process."""

    name = "memory"
    serves_on_demand = False
    guards_bytes = True

    def __init__(self, pools: dict[bytes, KVPool]) -> None:
        """``pools``: by endpoint; shared by all who can read each other."""
        self._pools = pools
        self.num_reads = 0
        self.num_blocks = 0

    def serve(self, pool: KVPool) -> bytes | None:
        endpoint = b"%d" % len(self._pools)
        self._pools[endpoint] = pool
        return endpoint

    def attend(self, seconds: float) -> None:
        pass

    def open(self, endpoint: bytes, layout: str) -> "MemoryReader":
        return MemoryReader(self, self._pools[endpoint])

    def close(self) -> None:
        pass


class MemoryReader:
    """Reads a pool of this process."""

    def __init__(self, transport: MemoryTransport, source: KVPool) -> None:
        self._transport = transport
        self._source = source

    def read(self, source_block_ids: BlockIds, target_block_ids: BlockIds, pool: KVPool) -> None:
        self._transport.num_reads += 1
        self._transport.num_blocks += len(source_block_ids)
        theirs = self._source
        for pairs in checked_pairs(source_block_ids, theirs.num_blocks, target_block_ids, pool, theirs.num_slots):
            there, here = theirs.planes_of(is_state=pairs.is_state), pool.planes_of(is_state=pairs.is_state)
            copy_blocks(there, pairs.source, here, pairs.target)

    def close(self) -> None:
        pass


class ManualExecutor(Executor):
    """Runs what was submitted when the test says so."""

    def __init__(self) -> None:
        self.tasks: list[Callable[[], Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.tasks.append(lambda: fn(*args, **kwargs))
        return Future()

    def run_one(self) -> bool:
        if not self.tasks:
            return False
        self.tasks.pop(0)()
        return True


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """A core with a KV service, and the front's own state for it."""

    def __init__(
        self,
        index: int,
        pools: dict[bytes, KVPool],
        clock: Clock,
        *,
        kv: KVConfig,
        executor: str,
        copies_at_once: bool,
        windows: Sequence[int | None] = (),
        state_chunk: int = 0,
        state_bytes: int = STATE_BYTES,
        num_slots: int = 0,
        worker_of: Callable[[EngineConfig], HashWorker] | None = None,
        structured_output: StructuredOutputConfig | None = None,
        **settings: Any,
    ) -> None:
        """``executor``: one of ``EXECUTORS``; all but the first overlap steps. ``worker_of``: what makes the worker,
        instead of what the settings after it say. ``structured_output``: of grammars, if requests have any.

        ``copies_at_once``: what a load can copy when it starts is copied before anything else happens. ``windows``:
        those of the groups of layers, if there are several. ``state_chunk``, ``state_bytes``: of the layer that keeps
        a state, if there is one; ``num_slots``: 0 for as many as the engine chooses.
        """
        config = make_config(**settings, async_scheduling=executor != "uniproc")
        config = msgspec.structs.replace(config, kv=kv, structured_output=structured_output)
        if num_slots:
            cache = msgspec.structs.replace(config.cache, state_memory_bytes=num_slots * state_bytes)
            config = msgspec.structs.replace(config, cache=cache)
        self.name = f"engine-{index}"
        self.config = config
        self.transport = MemoryTransport(pools)
        self.copies = ManualExecutor()
        self.failpoints = Failpoints(kv.failpoints, seed=index)
        self.service = KVService(kv, [self.transport], self.failpoints, executor=self.copies, clock=clock)
        if copies_at_once:
            self.service.start_load = self._copy_at_once  # type: ignore[method-assign]
        connector = PullConnector(self.service, config.cache.block_size, self.failpoints)
        worker = HashWorker(
            config, vocab_size=VOCAB_SIZE, max_model_len=256, state_chunk=state_chunk, state_bytes=state_bytes
        )
        if windows:
            worker = GroupedHashWorker(config, windows)
        if worker_of is not None:
            worker = worker_of(config)
        self.core = EngineCore(config, EXECUTORS[executor](worker), CoreKV(connector, self.failpoints, self.service))

    @property
    def stats(self) -> Any:
        return self.core.scheduler.stats()

    def _copy_at_once(self, order: LoadOrder) -> None:
        KVService.start_load(self.service, order)
        self.service.run()
        while self.copies.run_one():
            pass


@dataclass
class PairRequest:
    """One request in its two legs."""

    name: str
    prompt: list[int]
    max_tokens: int
    prefill: Engine
    decode: Engine
    is_early: bool
    """The decode leg is placed when the lease is granted, not when the prefill is done."""
    salt: bytes = b""
    params: CoreSamplingParams | None = None
    """None: only ``max_tokens`` is asked for."""
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str = ""
    is_aborted: bool = False
    decode_added: bool = False
    target: KVTarget | None = None
    num_verifies: int = 0

    @property
    def decode_name(self) -> str:
        return f"{self.name}/decode"

    @property
    def is_done(self) -> bool:
        return self.is_aborted or self.finish_reason not in (None, FinishReason.PREFILLED)


class Pair:
    """Engines, their front, and a mesh around them."""

    def __init__(
        self,
        num_engines: int = 2,
        *,
        kvs: Sequence[KVConfig] | None = None,
        executor: str = "uniproc",
        copies_at_once: bool = False,
        **settings: Any,
    ) -> None:
        self.clock = Clock()
        pools: dict[bytes, KVPool] = {}
        kvs = kvs or [KVConfig(transports=("memory",))] * num_engines
        self.engines = [
            Engine(index, pools, self.clock, kv=kv, executor=executor, copies_at_once=copies_at_once, **settings)
            for index, kv in enumerate(kvs)
        ]
        self.requests: dict[str, PairRequest] = {}
        self._call_ids = itertools.count(1)
        self._calls: dict[int, Callable[[KVAnswer], None]] = {}

    @property
    def prefill(self) -> Engine:
        return self.engines[0]

    @property
    def decode(self) -> Engine:
        return self.engines[1]

    # The mesh

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        max_tokens: int = 5,
        *,
        early: bool = False,
        swap: bool = False,
        salt: bytes = b"",
        stop: tuple[int, ...] = (),
        params: CoreSamplingParams | None = None,
    ) -> PairRequest:
        """Begins the prefill leg. ``swap``: on the second engine. ``params``: what is asked for in all."""
        prefill, decode = self.engines[::-1] if swap else self.engines
        request = PairRequest(name, list(prompt), max_tokens, prefill, decode, early, salt, params)
        self.requests[name] = request
        message = make_request(name, prompt, max_tokens, salt=salt, stop=stop)
        message.lease_id = name.encode()
        message.sampling_params = params or message.sampling_params
        prefill.core.add_request(message)
        return request

    def abort(self, request: PairRequest) -> None:
        """The client is gone: both sides are told."""
        request.is_aborted = True
        request.prefill.core.abort_requests([request.name])
        if request.decode_added:
            request.decode.core.abort_requests([request.decode_name])

    def step(self, engine: Engine) -> bool:
        """One step if there is work; what it produced goes where it belongs."""
        if not engine.core.has_work():
            return False
        for output in engine.core.step().outputs:
            name, _, leg = output.request_id.partition("/")
            request = self.requests[name]
            if request.is_aborted:
                continue
            if leg:
                self._decoded(request, output)
            else:
                self._prefilled(request, output)
        return True

    def pump(self, engine: Engine) -> None:
        """The engine's KV thread works; its front does what it is asked."""
        engine.service.run()
        for event in engine.service.take_events():
            if isinstance(event, KVAnswer):
                if (answer := self._calls.pop(event.call_id, None)) is not None:
                    answer(event)
            else:
                self._verify(event)

    def shutdown(self) -> None:
        for engine in self.engines:
            engine.core.shutdown()

    def renew(self, request: PairRequest) -> None:
        if request.target is not None:
            acquisition_id = request.target.acquisition_id
            self._call(request.prefill, lambda number: KVRenew(number, acquisition_id), lambda answer: None)

    def turn(self) -> bool:
        """Everything once; whether anything happened."""
        busy = False
        for engine in self.engines:
            busy |= self.step(engine)
            busy |= engine.copies.run_one()
            self.pump(engine)
        return busy

    def settle(self, max_turns: int = 5000) -> None:
        """Runs until every request is done and nobody has work, letting time pass where only that helps."""
        idle = 0
        for _ in range(max_turns):
            idle = 0 if self.turn() else idle + 1
            if idle > 3:
                if self.is_idle:
                    return
                self.clock.now += 5.0
        raise AssertionError(f"not done: {[request for request in self.requests.values() if not request.is_done]}")

    @property
    def is_idle(self) -> bool:
        """Nothing is live, leased or loading."""
        return all(
            not engine.core.has_work()
            and not engine.core.scheduler.requests
            and not engine.stats.num_leases
            and not len(engine.service._loads)
            for engine in self.engines
        )

    # The front

    def _prefilled(self, request: PairRequest, output: EngineCoreOutput) -> None:
        if output.kv_granted_tokens and request.is_early:
            self._acquire(request, awaits_tokens=True)
        request.tokens += output.new_token_ids
        request.finish_reason = output.finish_reason
        request.error = output.error
        if output.finish_reason is FinishReason.PREFILLED:
            if request.decode_added:
                request.decode.core.scheduler.accept_tokens(AcceptTokens(request.decode_name, list(request.tokens)))
            else:
                self._acquire(request, awaits_tokens=False)
        elif output.finish_reason is not None and request.decode_added:
            request.decode.core.abort_requests([request.decode_name])

    def _decoded(self, request: PairRequest, output: EngineCoreOutput) -> None:
        assert output.token_index == len(request.tokens) or not output.new_token_ids, "a token is missing or double"
        request.tokens += output.new_token_ids
        request.finish_reason = output.finish_reason
        request.error = output.error

    def _acquire(self, request: PairRequest, *, awaits_tokens: bool) -> None:
        """The front blocks here, as if it were quick."""
        digest = prompt_digest(request.prompt, request.salt)
        layout = request.decode.core.ready.kv_layout
        answers: list[KVAnswer] = []
        self._call(
            request.prefill,
            lambda number: KVAcquire(number, request.name.encode(), layout, digest, ["memory"]),
            answers.append,
        )
        self.pump(request.prefill)
        (answer,) = answers
        request.target = answer.target
        message = make_request(request.decode_name, request.prompt, request.max_tokens, salt=request.salt)
        message.sampling_params = request.params or message.sampling_params
        message.accepted_token_ids = [] if awaits_tokens else list(request.tokens)
        message.remote_kv = answer.target
        message.awaits_tokens = awaits_tokens
        request.decode_added = True
        request.decode.core.add_request(message)
        if awaits_tokens and answer.target is not None:
            self._follow(request, answer.target, 0)

    def _follow(self, request: PairRequest, target: KVTarget, seen: int) -> None:
        def answered(answer: KVAnswer) -> None:
            if answer.failure:
                self._tell(request, KVVerdict(request.decode_name, valid=False, reason=answer.failure))
                return
            self._tell(request, KVRemoteProgress(request.decode_name, answer.tokens_ready))
            if answer.tokens_ready < answer.num_tokens:
                self._follow(request, target, answer.tokens_ready)

        self._call(request.prefill, lambda number: KVProgress(number, target.acquisition_id, seen), answered)

    def _verify(self, event: KVVerify) -> None:
        request = self.requests[event.request_id.partition("/")[0]]
        request.num_verifies += 1
        target = request.target
        assert target is not None

        def released(answer: KVAnswer) -> None:
            verdict = KVVerdict(event.request_id, answer.valid, answer.failure, answer.checksums)
            self._tell(request, verdict)

        self._call(
            request.prefill, lambda number: KVRelease(number, target.acquisition_id, target.generations), released
        )

    def _tell(self, request: PairRequest, message: KVRemoteProgress | KVVerdict) -> None:
        request.decode.service.receive(message)

    def _call(self, engine: Engine, make: Callable[[int], KVCall], answered: Callable[[KVAnswer], None]) -> None:
        number = next(self._call_ids)
        self._calls[number] = answered
        engine.service.receive(make(number))
