"""Answers what a client may ask of a core, in the core's own process and in the client's.

Utility calls name one of the methods declared here. They come over the core's private socket, never over a network.
"""

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from tokenloom.process.fall_backs import OF_PROCESS

from .core import EngineCore
from .data.errors import ExecutorFailedError, RanksDifferError
from .data.messages import (
    AcceptTokens,
    ArrivedRows,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    ErrorKind,
    FinishReason,
    UtilityCall,
    UtilityOutput,
)
from .executor.executor import CLIENT_METHODS, Executor
from .scheduling.adapters import Adapters
from .wire.frames import call_with_raw, to_raw

log = logging.getLogger(__name__)


class CoreCalls:
    """Makes the adds, accepts, aborts and utility calls of one core. Belongs to the thread that steps the core."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._accepting = True
        self.utilities = Utilities(methods_of(core))
        self.step = core.step

    def refuse_new(self) -> None:
        """Answer requests with an error from now on, and end those that a pause would keep forever."""
        self._accepting = False
        self._core.pausing.end_frozen()

    def add(self, request: EngineCoreRequest) -> EngineCoreOutputs | None:
        """Add the request to the core. Returns the answer to a request that the core refuses."""
        self._core.num_requests_added += 1
        if not self._accepting:
            return self._refuse(request.request_id, "the engine is shutting down", ErrorKind.LEAVING)
        try:
            self._core.add_request(request)
            return None
        except ValueError as error:
            return self._refuse(request.request_id, str(error), ErrorKind.UNAVAILABLE)
        except Exception:  # a bug, or what a library or the system refuses: the other requests go on
            log.exception("request %s cannot be added", request.request_id)
            self._core.abort_requests([request.request_id])  # it may have been added in part
            return self._refuse(request.request_id, "the engine could not take the request", ErrorKind.INTERNAL)

    def accept(self, message: AcceptTokens) -> EngineCoreOutputs | None:
        """Give a request the first tokens that it was added ahead of. Returns its end if that fails."""
        try:
            self._core.scheduler.accept_tokens(message)
            return None
        except Exception:  # a bug: the other requests go on
            log.exception("request %s cannot take its first tokens", message.request_id)
            self._core.abort_requests([message.request_id])
            error = "the engine could not take the request's first tokens"
            return self._refuse(message.request_id, error, ErrorKind.INTERNAL)

    def take_rows(self, message: ArrivedRows) -> EngineCoreOutputs | None:
        """Give requests the rows of an image. Returns their ends if that fails."""
        try:
            self._core.scheduler.take_rows(message)
            return None
        except Exception:  # a bug of the client or the core: the other requests go on
            log.exception("rows of an image cannot be taken")
            media = self._core.scheduler.media
            request_ids = media.holders(message.key) if media is not None else []
            self._core.abort_requests(request_ids)
            error = "the engine could not take the rows of an image"
            return self._refuse_all(request_ids, error, ErrorKind.INTERNAL)

    def abort(self, request_ids: list[str]) -> EngineCoreOutputs | None:
        """End requests without an output, ignoring unknown ones. Returns the statistics if no step will bring them."""
        self._core.abort_requests(request_ids)
        if self._core.has_work():
            return None
        return self.stamp(EngineCoreOutputs(scheduler_stats=self._core.stats()))

    def call(self, call: UtilityCall, answer: Callable[[EngineCoreOutputs], None]) -> None:
        """Make a utility call. ``answer`` gets its result or error: at once, or after later steps."""

        def send(output: UtilityOutput) -> None:
            answer(self.stamp(EngineCoreOutputs(utility_output=output)))

        self.utilities.call(call, send)

    def _refuse(self, request_id: str, error: str, kind: ErrorKind) -> EngineCoreOutputs:
        return self._refuse_all([request_id], error, kind)

    def _refuse_all(self, request_ids: list[str], error: str, kind: ErrorKind) -> EngineCoreOutputs:
        outputs = [
            EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, error=error, error_kind=kind)
            for request_id in request_ids
        ]
        return self.stamp(EngineCoreOutputs(outputs=outputs))

    def stamp(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        """Add what every message to the client holds."""
        outputs.step = self._core.num_steps
        outputs.num_requests_added = self._core.num_requests_added
        return outputs


def _adapter_methods(adapters: Adapters | None) -> dict[str, Callable[..., object]]:
    if adapters is None:
        return {}
    return {
        "load_lora": adapters.load,
        "unload_lora": adapters.unload,
        "pin_lora": adapters.pin,
        "list_loras": adapters.answer,
    }


def _profile(executor: Executor, *args: object) -> list[object]:
    """Start or stop recording on all workers. If only some can, none records afterwards."""
    try:
        return executor.collective_rpc("profile", *args)
    except RanksDifferError:
        with contextlib.suppress(ExecutorFailedError, ValueError):  # workers that record nothing refuse
            executor.collective_rpc("profile", False)
        raise


def methods_of(core: EngineCore) -> dict[str, Callable[..., object]]:
    """Return the methods that a client may call on this core, by name."""

    def collective_rpc(method: str, args: list[object]) -> list[object]:
        """Call a method of every worker, but none that changes its memory: the core must know of those.

        Returns the results by rank. Raises ``ValueError`` for a method that is not in ``CLIENT_METHODS``.
        """
        if method not in CLIENT_METHODS:
            raise ValueError(f"clients may not call {method!r} on workers; use {', '.join(sorted(CLIENT_METHODS))}")
        if method == "profile":
            return _profile(core.executor, *args)
        return core.executor.collective_rpc(method, *args)

    def profile(start: bool, prefix: str = "") -> None:
        _profile(core.executor, start, prefix)

    def lend_request(request_id: str, lease_id: bytes, num_bound: int) -> str:
        """Let another engine go on with a running request. Returns why it stays; empty: it is lent."""
        if request_id in core.sessions.live:
            return "its session stays on this engine"
        return core.scheduler.lend_request(request_id, lease_id, num_bound)

    def requests_to_lend(count: int, free_tokens: int, before_preemption: bool) -> list[str]:
        """Return the ids of up to ``count`` running requests that are best lent to an engine with so many tokens."""
        stay = core.sessions.live
        return core.scheduler.requests_to_lend(count, free_tokens, stay, before_preemption=before_preemption)

    return {
        **_adapter_methods(core.adapters),
        "reset_prefix_cache": core.reset_prefix_cache,
        "reset_encoder_cache": core.scheduler.reset_rows,
        "pause": core.pause,
        "resume": core.resume,
        "sleep": core.sleeping.sleep,
        "wake_up": core.sleeping.wake_up,
        "is_sleeping": core.sleeping.is_sleeping,
        "calls_to_run": core.calls_to_run,
        "has_work": core.has_work,
        "check_weights": core.sleeping.check_weights,
        "reload_weights": core.sleeping.reload_weights,
        "share_kv": core.scheduler.share_kv,
        "lend_request": lend_request,
        "keep_request": core.scheduler.keep_request,
        "requests_to_lend": requests_to_lend,
        "profile": profile,
        "collective_rpc": collective_rpc,
        "check_health": core.check_health,
        "fall_backs": OF_PROCESS.own,
        "failpoints_fired": core.failpoints_fired,
        "num_leases": lambda: core.scheduler.stats().num_leases,
    }


class Utilities:
    """Calls methods by name. A method that needs later steps returns a ``Future``; every other answers at once."""

    def __init__(self, methods: dict[str, Callable[..., object]]) -> None:
        self._methods = methods

    def add(self, name: str, method: Callable[..., object]) -> None:
        """Let clients call another method."""
        self._methods[name] = method

    def call(self, call: UtilityCall, answer: Callable[[UtilityOutput], None]) -> None:
        """Convert the arguments to the types that the method annotates, and call it.

        ``answer`` gets the result or the error: a failed call never ends the core.
        """
        method = self._methods.get(call.method)
        if method is None:
            names = ", ".join(sorted(self._methods))
            answer(UtilityOutput(call.call_id, error=f"unknown utility {call.method!r}; use one of {names}"))
            return
        try:
            result = call_with_raw(method, call.args)
        except Exception as error:
            answer(_failure(call, error))
            return
        if isinstance(result, Future):
            result.add_done_callback(lambda future: answer(_outcome(call, future)))
        else:
            answer(UtilityOutput(call.call_id, to_raw(result)))


def _outcome(call: UtilityCall, future: "Future[object]") -> UtilityOutput:
    try:
        return UtilityOutput(call.call_id, to_raw(future.result()))
    except Exception as error:
        return _failure(call, error)


def _failure(call: UtilityCall, error: Exception) -> UtilityOutput:
    if not isinstance(error, (TypeError, ValueError, msgspec.MsgspecError)):  # not the caller's mistake
        log.exception("utility %s failed", call.method, exc_info=error)
    return UtilityOutput(call.call_id, error=f"{call.method}: {error}")
