"""An engine inside an asyncio program. One thread owns the engine and makes all calls of it; each request has a
collector, which keeps what its reader has not taken yet."""

import asyncio
import contextlib
import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tokenizers import Tokenizer

from tokenloom.engine_core.data.errors import EngineDeadError, EnginePausedError
from tokenloom.services.engine.records.stat_log import StatLogger

from .engine_args import EngineArgs
from .llm_engine import LLMEngine, RequestNews
from .lora_request import LoRARequest
from .outputs import (
    EngineOutput,
    OutputCollector,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    RequestOutput,
    RequestOutputKind,
)
from .prompts import Message, Prompt, TokenizedPrompt
from .sampling_params import SamplingParams

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

_PAUSED_SECONDS = 1.0
"""While the engine is paused, its thread looks at such intervals whether a core with requests still lives."""
_CLOSE_SECONDS = 10.0
"""How long a call may keep the thread from ending before a core in a process of its own is killed."""
CLOSED = "the engine was closed"


class AsyncLLM:
    """Continues prompts for the tasks of an asyncio program, with vLLM's methods.

    The engine has a thread of this process, and by default its core a process of its own, so that the event loop stays
    free; with ``engine_process=False`` the thread computes. Any number of tasks may call any method at a time, also of
    several event loops. Wrong arguments raise ``ValueError``. When the core dies, everything that waits raises
    ``EngineDeadError``, and so do later calls. An object without references closes itself.
    """

    def __init__(self, args: EngineArgs, *, stat_loggers: Sequence[StatLogger] = ()) -> None:
        """Load the model; this blocks, so a program calls it before its event loop serves others.

        Raises as :class:`.LLMEngine`.
        """
        args = args.by_default(engine_process=True)
        self._thread = _EngineThread(lambda: LLMEngine(args, stat_loggers=stat_loggers))
        weakref.finalize(self, self._thread.stop)  # at the interpreter's exit too
        self._numbers = itertools.count()  # not a generator, which fails if several event loops ask it at a time
        self._live: set[str] = set()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, *, stat_loggers: Sequence[StatLogger] = ()) -> "AsyncLLM":
        """Return an engine of these arguments, as vLLM's method of this name does."""
        return cls(engine_args, stat_loggers=stat_loggers)

    async def generate(
        self,
        prompt: Prompt | TokenizedPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue a prompt, and yield what its samples have produced since the output before.

        ``output_kind`` of the parameters decides what an output holds; the last one is ``finished``. Closing the
        generator, or cancelling the task that waits for it, aborts the request.

        Raises ``ValueError`` if the request is at fault, ``RuntimeError`` if the engine failed it, ``EngineDeadError``
        and ``EnginePausedError``.

        Args:
            prompt: As of ``LLM.generate``, or what :meth:`chat_prompt` returned.
            sampling_params: None: the model's own.
            request_id: Names the outputs, and the request for :meth:`abort`; no live request may have it. None: any.
            lora_request: Needs ``enable_lora=True``.
            priority: Lower values run first. Needs ``scheduling_policy="priority"``.
        """
        kind = RequestOutputKind.CUMULATIVE if sampling_params is None else sampling_params.output_kind
        collector = OutputCollector(are_pieces=kind is RequestOutputKind.DELTA)
        name = self._name(request_id)

        def add(engine: LLMEngine) -> None:
            engine.add_request(name, prompt, sampling_params, lora_request=lora_request, priority=priority)

        async with contextlib.aclosing(self._outputs(name, collector, add)) as outputs:
            async for output in outputs:
                yield cast("RequestOutput", output)

    async def encode(
        self, prompt: Prompt, pooling_params: PoolingParams, request_id: str | None = None
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Pool a prompt, and yield the only output. ``pooling_params`` name the task. Raises as :meth:`generate`."""
        collector = OutputCollector(are_pieces=False)
        name = self._name(request_id)

        def add(engine: LLMEngine) -> None:
            engine.add_request(name, prompt, pooling_params)

        async with contextlib.aclosing(self._outputs(name, collector, add)) as outputs:
            async for output in outputs:
                yield cast("PoolingRequestOutput[PoolingOutput]", output)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests: their generators yield a last output with the finish reason ``abort``. Ids of none are
        ignored."""
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        await self._call(lambda engine: self._thread.abort(engine, names))

    async def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> TokenizedPrompt:
        """Return the prompt of a conversation, for :meth:`generate`; the arguments are those of ``LLM.chat``."""
        return await self._call(
            lambda engine: engine.chat_prompt(
                messages,
                chat_template=chat_template,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                mm_processor_kwargs=mm_processor_kwargs,
            )
        )

    async def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer."""
        return await self._call(LLMEngine.get_tokenizer)

    async def get_default_sampling_params(self) -> SamplingParams:
        """Return the defaults of the checkpoint's ``generation_config.json``, and ours for other parameters."""
        return await self._call(LLMEngine.get_default_sampling_params)

    async def do_log_stats(self) -> None:
        """End the interval of the statistics now; without a logger do nothing."""
        await self._call(LLMEngine.do_log_stats)

    async def check_health(self) -> None:
        """Raise ``UtilityError`` if a worker fails or does not answer in time, ``EngineDeadError``."""
        await self._call(LLMEngine.check_health)

    async def reset_prefix_cache(self) -> bool:
        """Drop the KV blocks of earlier prompts. Returns whether it succeeded."""
        return await self._call(LLMEngine.reset_prefix_cache)

    async def reset_mm_cache(self) -> None:
        """Forget the rows of images and sounds that were computed here."""
        await self._call(LLMEngine.reset_mm_cache)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause and release memory, as ``LLM.sleep``. With the mode ``wait`` the outputs of running requests come when
        these have ended."""
        await self._call(lambda engine: engine.sleep(level, mode))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Restore what :meth:`sleep` released, as ``LLM.wake_up``."""
        await self._call(lambda engine: engine.wake_up(tags))

    async def is_sleeping(self) -> bool:
        """Return whether the engine sleeps."""
        return await self._call(LLMEngine.is_sleeping)

    async def reload_weights(self, path: str | Path | None = None) -> None:
        """Load the weights of another checkpoint, as ``LLM.reload_weights``."""
        await self._call(lambda engine: engine.reload_weights(path))

    async def update_weights(self, tensors: "Mapping[str, Tensor]", *, mode: str | None = None) -> int:
        """Load weights that a trainer has in its memory, as :meth:`.LLMEngine.update_weights`. The tensors must not
        change meanwhile. With the mode ``wait`` the outputs of running requests come when these have ended."""
        return await self._call(lambda engine: engine.update_weights(tensors, mode=mode))

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Run no request until :meth:`resume_generation`, as :meth:`.LLMEngine.pause_generation`."""
        await self._call(lambda engine: engine.pause_generation(mode, clear_cache=clear_cache))

    async def resume_generation(self) -> None:
        """Let requests run again."""
        await self._call(LLMEngine.resume_generation)

    async def is_paused(self) -> bool:
        """Return whether the engine is paused, or sleeps."""
        return await self._call(LLMEngine.is_paused)

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Start recording what the workers compute, as ``LLM.start_profile``."""
        await self._call(lambda engine: engine.start_profile(profile_prefix))

    async def stop_profile(self) -> None:
        """Write the profile to ``profiler_dir``. Raises ``UtilityError`` if none is being recorded."""
        await self._call(LLMEngine.stop_profile)

    async def collective_rpc(self, method: str, args: Sequence[object] = ()) -> list[object]:
        """Call a method on every worker, as ``LLM.collective_rpc``; return the results by rank."""
        return await self._call(lambda engine: engine.collective_rpc(method, args))

    def close(self) -> None:
        """End all requests with ``EngineDeadError``, and release the model; wait for the thread and the core's process
        to end. Idempotent. ``async with`` does the same without blocking the event loop."""
        self._thread.stop()

    def shutdown(self) -> None:
        """Do as :meth:`close`, under vLLM's name."""
        self.close()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    def _name(self, request_id: str | None) -> str:
        if request_id is None:
            names = (f"async-{number}" for number in self._numbers)
            return next(name for name in names if name not in self._live)
        if not isinstance(request_id, str):
            raise ValueError(f"request_id must be a string, not {request_id!r}")
        if request_id in self._live:
            raise ValueError(f"request_id {request_id!r} is that of a request that has not ended; choose another one")
        return request_id

    async def _outputs(
        self, name: str, collector: OutputCollector, add: Callable[[LLMEngine], None]
    ) -> AsyncGenerator[EngineOutput, None]:
        self._live.add(name)
        is_over = False
        try:
            await self._call(lambda engine: self._thread.add(engine, name, collector, add))
            while not is_over:
                output = await collector.get()
                is_over = output.finished
                yield output
        finally:
            self._live.discard(name)
            if not is_over:
                # Behind its add, and before that of a later request with its name: calls run in their order. Not
                # awaited: a generator that is being closed may not wait for a step.
                self._thread.post(lambda engine: self._thread.drop(engine, name, collector))

    async def _call(self, call: Callable[[LLMEngine], T]) -> T:
        """Make a call on the engine's thread. Raises what it raises."""
        return await asyncio.wrap_future(self._thread.post(call))


class _EngineThread:
    """Owns an engine: makes it, makes the calls that others post, steps it while it has requests, and closes it."""

    def __init__(self, make: Callable[[], LLMEngine]) -> None:
        """Start the thread, and wait until ``make`` has returned. Raises what it raises."""
        self._changed = threading.Condition()
        self._calls: deque[tuple[Callable[[LLMEngine], Any], Future[Any]]] = deque()  # bounded by those who wait
        self._is_stopped = False
        self._collectors: dict[str, OutputCollector] = {}  # only the thread itself reads it
        self._engine: LLMEngine | None = None
        self._wake: Callable[[], None] = _do_nothing
        started: Future[None] = Future()
        # Everything on one thread, the load of the model too: what is bound to a thread, as torch's modes and a
        # process that ends with its parent's thread, then works as in `LLM`.
        self._thread = threading.Thread(target=self._run, args=(make, started), name="tokenloom-engine", daemon=True)
        self._thread.start()
        try:
            started.result()
        except BaseException:  # of the load, or an interrupt while it goes on
            self.stop()
            raise

    def post(self, call: Callable[[LLMEngine], T]) -> "Future[T]":
        """Let the thread make a call, after those before it. The future fails with ``EngineDeadError`` once the engine
        is closed."""
        future: Future[T] = Future()
        with self._changed:
            # A fork of the program lacks the thread that would make the call.
            if self._is_stopped or not self._thread.is_alive():
                future.set_exception(EngineDeadError(CLOSED))
                return future
            self._calls.append((call, future))
            self._changed.notify()
        self._wake()
        return future

    def stop(self) -> None:
        """End the thread, and wait until it has closed the engine. Idempotent."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
        self._wake()
        if threading.current_thread() is self._thread:  # the last reference was dropped here
            return
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive() and (engine := self._engine) is not None:
            log.warning("a call keeps the engine busy; its core is killed")
            engine.client.kill()
        self._thread.join()

    def add(self, engine: LLMEngine, name: str, collector: OutputCollector, add: Callable[[LLMEngine], None]) -> None:
        """Add a request, whose outputs go to ``collector`` from now on."""
        add(engine)
        self._collectors[name] = collector

    def abort(self, engine: LLMEngine, names: Sequence[str]) -> None:
        """End requests; their readers get what they have."""
        self._deliver(engine.end(names))

    def drop(self, engine: LLMEngine, name: str, collector: OutputCollector) -> None:
        """End a request whose generator is closed."""
        if self._collectors.get(name) is collector:
            del self._collectors[name]
            engine.end([name])

    def _run(self, make: Callable[[], LLMEngine], started: "Future[None]") -> None:
        try:
            engine = make()
        except BaseException as error:
            started.set_exception(error)
            return
        try:
            self._wake = engine.client.waker()
            self._engine = engine
            started.set_result(None)
            self._serve(engine)
        except BaseException:  # a bug; no caller may wait for ever
            log.exception("the thread of an engine failed")
        finally:
            with self._changed:
                self._is_stopped = True
                left, self._calls = self._calls, deque()
            self._fail_all(CLOSED)
            for _, future in left:
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineDeadError(CLOSED))
            engine.close()

    def _serve(self, engine: LLMEngine) -> None:
        is_paused = False
        while self._make_calls(engine, is_paused=is_paused):
            is_paused = False
            try:
                self._deliver(engine.advance())
                engine.log_if_due()  # the last steps of an interval that ended without requests
            except EnginePausedError:
                is_paused = True
            except EngineDeadError as error:
                self._fail_all(str(error))
                engine.end()
            except Exception:
                # Its requests have ended with what went wrong, which the next step brings.
                log.exception("a step of the engine failed")

    def _make_calls(self, engine: LLMEngine, *, is_paused: bool) -> bool:
        """Make the calls that wait; wait for one if the engine has nothing to do. Returns False when stopped."""
        with self._changed:
            while not self._calls and not self._is_stopped:
                if engine.has_unfinished_requests():
                    if is_paused:
                        self._changed.wait(_PAUSED_SECONDS)
                    break
                if not self._changed.wait(engine.seconds_to_log()):
                    break
            if self._is_stopped:
                return False
            calls, self._calls = self._calls, deque()
        for call, future in calls:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call(engine))
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, Exception):
                    raise
        return True

    def _deliver(self, news: Iterable[RequestNews]) -> None:
        """Give outputs to their collectors, and wake the readers of each event loop with one call."""
        woken: dict[asyncio.AbstractEventLoop, list[OutputCollector]] = {}
        for each in news:
            if (collector := self._collectors.get(each.request_id)) is None:
                continue
            if each.output.finished:
                del self._collectors[each.request_id]
            has_failed = each.error is not None
            if collector.put(None if has_failed else each.output, each.error):
                woken.setdefault(collector.loop, []).append(collector)
        for loop, collectors in woken.items():
            _wake_in(loop, collectors)

    def _fail_all(self, reason: str) -> None:
        collectors, self._collectors = self._collectors, {}
        for collector in collectors.values():
            collector.put(None, EngineDeadError(reason))  # one for each: they are raised in several tasks
            _wake_in(collector.loop, [collector])


def _wake_in(loop: asyncio.AbstractEventLoop, collectors: Sequence[OutputCollector]) -> None:
    def wake() -> None:
        for collector in collectors:
            collector.wake()

    with contextlib.suppress(RuntimeError):  # the loop was closed with its requests
        loop.call_soon_threadsafe(wake)


def _do_nothing() -> None:
    """Wake nobody: the engine is being made."""
