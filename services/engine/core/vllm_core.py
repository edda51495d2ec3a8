"""Stands for an engine core where a running ``vllm serve`` computes: sends it token ids, and takes token ids back."""

import asyncio
import itertools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

from msgspec.structs import replace

from tokenloom.engine_core.control.pausing import PauseMode
from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.data.errors import EngineConfigError, EngineDeadError, EngineStartError, UtilityError
from tokenloom.engine_core.data.handshake import CoreReady
from tokenloom.engine_core.data.kv_messages import KVCall, KVEvent
from tokenloom.engine_core.data.messages import (
    AcceptTokens,
    ArrivedRows,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    ErrorKind,
    FinishReason,
    PrefillStats,
    SchedulerStats,
)
from tokenloom.engine_core.data.request import Request, finish_status, mark_finished
from tokenloom.engine_core.fake_workers.hash_worker import read_sizes

from ..records.engine_settings import EngineSettings
from .vllm_server import (
    Choice,
    ServerFacts,
    ServerLostError,
    ServerRefusedError,
    VLLMServer,
    advice,
    generate_body,
    lacking,
    read_key,
    to_logprobs,
)

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""Between two looks for a server that does not answer yet."""
SILENT_SECONDS = 5.0
"""After so long without a token for any request, the server is asked whether it is well."""
_BLOCK_SIZE = 16
"""Of a server that does not state its own."""
_FINISHED = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "repetition": FinishReason.REPETITION,
}


@dataclass(slots=True, eq=False)
class _Live:
    """Describes a request that waits here or runs at the server."""

    request: EngineCoreRequest
    arrival_ns: int
    token_ids: list[int] = field(default_factory=list)
    """Its output so far, tokens of earlier attempts included."""
    began_ns: int = 0
    has_token: bool = False
    is_over: bool = False
    """Whether its end was passed on, or it was aborted."""

    @property
    def num_tokens(self) -> int:
        return self.request.num_prompt_tokens + len(self.token_ids)


class VLLMCore:
    """Fulfils ``AsyncCoreClient`` by a server. At most ``max_num_seqs`` requests run there; the others wait here, in
    their order. Loads are those of these requests: other clients of the server are not counted."""

    def __init__(
        self, server: VLLMServer, config: EngineConfig, vocab_size: int, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """``config``: only the checkpoint, the marks of its reasoning, ``max_num_seqs`` and ``max_model_len`` count.
        ``clock``: nanoseconds."""
        self._server = server
        self._config = config
        self._vocab_size = vocab_size
        self._clock = clock
        self._max_model_len = 0
        self._num_blocks = self._block_size = 0
        self._facts: ServerFacts | None = None
        # Bounded by the front, which refuses requests beyond max_waiting.
        self._held: OrderedDict[str, _Live] = OrderedDict()
        self._running: dict[str, tuple[_Live, asyncio.Task[None]]] = {}
        self._held_tokens = self._running_tokens = 0
        self._pause: PauseMode | None = None
        self._quiet = asyncio.Event()  # set while nothing runs at the server, and when a pause ends
        self._outputs: deque[EngineCoreOutput] = deque()  # read by the front without a pause
        self._changed = asyncio.Event()
        self._dead: EngineDeadError | None = None
        self._looking = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._heard_ns = 0
        self._stats = SchedulerStats()
        self._num_added = self._step = 0
        self._in_step: set[str] = set()  # requests with a token in the present step

    async def start(self) -> CoreReady:
        """Wait until the server is up. Raises ``EngineConfigError`` for one of another model or without token ids."""
        for attempt in itertools.count():
            if await self._server.is_well():
                break
            if not attempt:
                log.info("waiting for vLLM, which does not answer yet")
            await asyncio.sleep(RETRY_SECONDS)
        try:
            facts = await self._server.facts()
            await self._server.check_generates()
        except ServerRefusedError as refused:
            # What it says while it begins to serve, or has too much to do, is no fault of the options.
            kind = EngineStartError if refused.status >= 500 or refused.status == 429 else EngineConfigError
            raise kind(f"remote_vllm: {advice(refused)}") from None
        except ServerLostError as error:
            raise EngineStartError(f"remote_vllm: {error}") from None
        self._check_model(facts)
        self._facts = facts
        self._max_model_len = min(facts.max_model_len, self._config.max_model_len or facts.max_model_len)
        self._block_size = facts.block_size or _BLOCK_SIZE
        full = self._config.scheduler.max_num_seqs * self._max_model_len
        self._num_blocks = facts.num_blocks or -(-full // self._block_size)
        self._quiet.set()
        self._watching = asyncio.create_task(self._watch(), name="vllm-watch")
        log.info("vLLM %s computes %s", facts.version, facts.root or facts.model)
        return CoreReady(
            num_kv_blocks=self._num_blocks,
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            block_size=self._block_size,
            kv_layout="vllm",
            numerics=f"vllm/{facts.version}",
        )

    async def add_request(self, request: EngineCoreRequest) -> None:
        if self._dead is not None:
            raise self._dead
        self._num_added += 1
        request.prompt_token_ids, request.packed_prompt = request.listed_prompt(), b""
        live = _Live(request, self._clock(), list(request.accepted_token_ids))
        if missing := self._lacking(request):
            self._refuse(live, missing)
            return
        if request.accepted_token_ids:
            known = Request(request, self._max_model_len, live.arrival_ns)
            if status := finish_status(known):
                output = EngineCoreOutput(request.request_id, [], len(live.token_ids))
                mark_finished(output, known, status)
                self._put(output)
                return
        self._hold(live)
        self._begin()

    async def abort_requests(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._take_held(request_id)
            if (running := self._running.get(request_id)) is not None:
                running[0].is_over = True
                running[1].cancel()
        self._changed.set()

    async def accept_tokens(self, message: AcceptTokens) -> None:
        """Do nothing: no request that awaits tokens is taken."""

    async def send_rows(self, message: ArrivedRows) -> None:
        """Do nothing: no rows are asked for."""

    async def start_wave(self, wave: int) -> None:
        """Do nothing: there is no data-parallel group."""

    async def get_output(self) -> EngineCoreOutputs:
        while self._dead is None:
            if self._changed.is_set():
                self._changed.clear()
                outputs = list(self._outputs)
                self._outputs.clear()
                self._observe()
                stats = replace(self._stats)
                return EngineCoreOutputs(self._step, outputs, stats, num_requests_added=self._num_added)
            await self._changed.wait()
        raise self._dead

    async def call_utility(self, method: str, *args: object) -> object:
        if self._dead is not None:
            raise self._dead
        match method, args:
            case "check_health", _:
                await self._check_health()
            case "fall_backs", _:
                return []
            case "is_sleeping", _:
                return False
            case "pause", (str(mode), bool(clear_cache)):
                await self._pause_in(PauseMode(mode), clear_cache=clear_cache)
            case "resume", _:
                self._resume()
            case "wake_up", _:
                self._resume()
                return True
            case _:
                raise UtilityError(f"{method}: vLLM computes for this engine; ask vLLM's own server for it")
        return None

    async def kv_send(self, call: KVCall) -> None:
        raise AssertionError("no KV moves to or from vLLM")

    async def kv_receive(self) -> KVEvent:
        raise AssertionError("no KV moves to or from vLLM")

    async def close(self) -> None:
        self._fail(EngineDeadError("the client was closed"))
        tasks = [task for _, task in self._running.values()]
        if self._watching is not None:
            tasks.append(self._watching)
            self._watching.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self) -> None:
        """Send requests that wait, as long as there is room for them."""
        while self._held and self._pause is None and self._dead is None:
            if len(self._running) >= self._config.scheduler.max_num_seqs:
                break
            live = self._take_held(next(iter(self._held)))
            assert live is not None
            live.began_ns = self._clock()
            if not self._running:
                self._heard_ns = live.began_ns
            task = asyncio.create_task(self._run(live), name=f"vllm {live.request.request_id}")
            # Not in a `finally` of the task: one that is cancelled before its first turn never enters it.
            task.add_done_callback(partial(self._stopped, live))
            self._running[live.request.request_id] = live, task
            self._running_tokens += live.num_tokens
            self._quiet.clear()
        self._changed.set()

    def _stopped(self, live: _Live, task: asyncio.Task[None]) -> None:
        del self._running[live.request.request_id]
        self._running_tokens -= live.num_tokens
        if task.cancelled() and not live.is_over and self._dead is None:
            self._keep(live)
        if not self._running:
            self._quiet.set()
        self._begin()

    def _hold(self, live: _Live) -> None:
        self._held[live.request.request_id] = live
        self._held_tokens += live.num_tokens

    def _take_held(self, request_id: str) -> _Live | None:
        if (live := self._held.pop(request_id, None)) is not None:
            self._held_tokens -= live.num_tokens
        return live

    async def _run(self, live: _Live) -> None:
        assert self._facts is not None
        try:
            body = generate_body(live.request, live.token_ids, self._facts.model, self._max_model_len)
            async with aclosing(self._server.generate(body)) as choices:
                async for choice in choices:
                    if self._take(live, choice):
                        return
            raise ServerLostError("its answer ended before the request did")
        except ServerRefusedError as refused:
            if refused.status in (400, 413, 422):
                self._refuse(live, f"it answered: {refused}")
            elif refused.status in (401, 403, 404):
                self._fail(EngineDeadError(f"vLLM is not what it was: {refused}"))
            else:
                await self._lost(live, str(refused))
        except ServerLostError as error:
            await self._lost(live, str(error))
        except Exception:
            log.exception("request %s failed", live.request.request_id)
            self._end_with(live, "the engine could not compute the request", ErrorKind.INTERNAL)

    def _take(self, live: _Live, choice: Choice) -> bool:
        """Pass on new tokens, and return whether they are the last. Raises ``ServerLostError`` for what cannot be."""
        params, token_ids = live.request.sampling_params, list(choice.token_ids or ())
        if any(token_id >= self._vocab_size for token_id in token_ids):
            raise ServerLostError(f"it sent a token that is not below {self._vocab_size}")
        if len(live.token_ids) + len(token_ids) > params.max_tokens:
            raise ServerLostError(f"it sent more than {params.max_tokens} tokens")
        output = EngineCoreOutput(live.request.request_id, token_ids, len(live.token_ids))
        if params.logprobs is not None and token_ids:
            content = choice.logprobs.content if choice.logprobs is not None else None
            if content is None or len(content) != len(token_ids):
                raise ServerLostError("it sent tokens without their log probabilities")
            output.new_logprobs = to_logprobs(content, params.logprobs, self._vocab_size)
        if choice.finish_reason is not None:
            if (reason := _FINISHED.get(choice.finish_reason)) is None:
                raise ServerLostError(f"it ended the request by {choice.finish_reason!r:.40}")
            output.finish_reason = reason
            live.is_over = True
            if reason is FinishReason.STOP and token_ids and token_ids[-1] in (params.stop_token_ids or ()):
                output.stop_token_id = token_ids[-1]
        if token_ids:
            self._count(live, output)
        if token_ids or output.finish_reason is not None:
            self._put(output)
        return output.finish_reason is not None

    def _count(self, live: _Live, output: EngineCoreOutput) -> None:
        now, stats, request_id = self._clock(), self._stats, live.request.request_id
        self._heard_ns = now
        num_prompt = live.num_tokens
        live.token_ids += output.new_token_ids
        self._running_tokens += len(output.new_token_ids)
        stats.num_computed_tokens += len(output.new_token_ids)
        # A step of the server gives each request a token: one that has its next begins another step.
        if not self._in_step or request_id in self._in_step:
            self._step += 1
            self._in_step.clear()
        self._in_step.add(request_id)
        if not live.has_token:
            live.has_token = True
            stats.num_prefilled_requests += 1
            stats.num_prefilled_tokens += num_prompt
            stats.num_computed_tokens += num_prompt
            output.prefill_stats = PrefillStats(
                live.request.num_prompt_tokens, 0, live.began_ns - live.arrival_ns, now - live.began_ns
            )

    def _observe(self) -> None:
        """Bring the loads in the statistics up to date."""
        stats = self._stats
        stats.num_waiting, stats.num_running = len(self._held), len(self._running)
        stats.num_waiting_tokens = self._held_tokens
        used = self._running_tokens // self._block_size + len(self._running)
        stats.num_free_blocks = max(self._num_blocks - used, 0)
        stats.kv_usage = min(used / self._num_blocks, 1.0)

    def _lacking(self, request: EngineCoreRequest) -> str:
        return lacking(request, may_reason=self._config.reasoning.marks is not None)

    def _refuse(self, live: _Live, missing: str) -> None:
        self._end_with(live, f"this engine computes by vLLM, which does not do here: {missing}", ErrorKind.LACKS)

    def _end_with(self, live: _Live, error: str = "", kind: ErrorKind = ErrorKind.UNAVAILABLE) -> None:
        """End a request with an error; empty: as aborted."""
        if live.is_over:
            return
        live.is_over = True
        output = EngineCoreOutput(live.request.request_id, [], len(live.token_ids), error=error, error_kind=kind)
        output.finish_reason = FinishReason.ERROR if error else FinishReason.ABORT
        self._put(output)

    def _put(self, output: EngineCoreOutput) -> None:
        self._outputs.append(output)
        self._changed.set()

    async def _lost(self, live: _Live, reason: str) -> None:
        """End a request that the server failed, unless the server itself is lost: then the front ends all."""
        await self._look(reason)
        if self._dead is None:
            log.warning("vLLM failed a request: %s", reason)
            self._end_with(live, "the engine failed this request; retry it", ErrorKind.LEAVING)

    async def _look(self, reason: str) -> None:
        """Ask the server whether it is well; one that is not counts as dead."""
        async with self._looking:
            if self._dead is None and not await self._server.is_well():
                self._fail(EngineDeadError(f"vLLM is lost: {reason}"))

    async def _watch(self) -> NoReturn:
        """Look at the server whenever it has sent no token for long: one that is frozen closes no connection."""
        while True:
            await asyncio.sleep(RETRY_SECONDS)
            if self._running and self._clock() - self._heard_ns > SILENT_SECONDS * 1e9:
                await self._look("it has fallen silent")
                self._heard_ns = self._clock()

    def _fail(self, error: EngineDeadError) -> None:
        self._dead = self._dead or error
        for _, task in self._running.values():
            if task is not asyncio.current_task():
                task.cancel()
        self._changed.set()

    async def _check_health(self) -> None:
        """Raise ``UtilityError`` if the server is not well. One that says something else of itself than at the start is
        another one in its place: it counts as dead."""
        try:
            facts = await self._server.facts()
            if not await self._server.is_well():
                raise UtilityError("vLLM says that its engine failed")
        except (ServerLostError, ServerRefusedError) as error:
            raise UtilityError(f"vLLM: {error}") from None
        if self._facts is not None and not facts.is_of(self._facts):
            self._fail(EngineDeadError(f"another vLLM answers: {facts} instead of {self._facts}"))

    def _check_model(self, facts: ServerFacts) -> None:
        """Raise ``EngineConfigError`` if the server has loaded another directory of this machine than ours."""
        ours, theirs = Path(self._config.worker.model), Path(facts.root)
        try:
            is_other = theirs.is_absolute() and theirs.is_dir() and ours.is_dir() and not theirs.samefile(ours)
        except OSError as error:  # such as of a directory that is closed to this user
            log.warning("whether vLLM serves the weights of --model is not known: %s", error)
            return
        if is_other:
            raise EngineConfigError(f"remote_vllm: vLLM serves {theirs}, and --model is {ours}: name the same for both")

    async def _pause_in(self, mode: PauseMode, *, clear_cache: bool) -> None:
        self._pause = mode
        running = list(self._running.values())
        if mode is PauseMode.ABORT:
            for live in (*self._held.values(), *(live for live, _ in running)):
                self._end_with(live)
            self._held.clear()
            self._held_tokens = 0
        if mode is not PauseMode.WAIT:
            for _, task in reversed(running):  # the first one comes to the front last
                task.cancel()
        await self._quiet.wait()
        if self._pause is None:
            raise UtilityError("the engine was resumed before all requests had finished")
        if clear_cache:
            raise UtilityError("the engine is paused, but vLLM's prefix cache cannot be cleared from here")

    def _keep(self, live: _Live) -> None:
        """Let a request whose connection a pause has closed wait here, before the others, with the tokens that it
        has."""
        if live.has_token and self._lacking(replace(live.request, accepted_token_ids=live.token_ids)):
            self._end_with(live, "the engine was paused; retry the request", ErrorKind.LEAVING)
            return
        self._hold(live)
        self._held.move_to_end(live.request.request_id, last=False)

    def _resume(self) -> None:
        self._pause = None
        self._quiet.set()
        if self._running:
            self._quiet.clear()
        self._begin()


def remote_core(settings: EngineSettings, checkpoint: str) -> VLLMCore:
    """Return the core that the settings name, for the checkpoint in this directory. Raises ``ValueError``."""
    file = settings.remote_vllm_key_file
    server = VLLMServer(settings.remote_vllm, "" if file is None else read_key(file))
    config = settings.engine_config(checkpoint)
    return VLLMCore(server, config, read_sizes(Path(checkpoint)).vocab_size)
