"""Calls the declared methods of a core by name. They come over the core's private socket, never over a network."""

import logging
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from ..core import EngineCore
from ..executor.executor import CLIENT_METHODS
from ..wire.messages import UtilityOutput
from ..wire.serialization import call_with_raw, to_raw

log = logging.getLogger(__name__)


class UtilityCall(msgspec.Struct, array_like=True, gc=False):
    """Names a method and its arguments."""

    call_id: int
    method: str
    args: list[msgspec.Raw]


def methods_of(core: EngineCore) -> dict[str, Callable[..., object]]:
    """Return the methods that a client may call on this core, by name."""

    def collective_rpc(method: str, args: list[object]) -> list[object]:
        """Call a method of every worker, but none that changes its memory: the core must know of those.

        Returns the results by rank. Raises ``ValueError`` for a method that is not in ``CLIENT_METHODS``.
        """
        if method not in CLIENT_METHODS:
            raise ValueError(f"clients may not call {method!r} on workers; use {', '.join(sorted(CLIENT_METHODS))}")
        return core.executor.collective_rpc(method, *args)

    def profile(start: bool) -> None:
        core.executor.collective_rpc("profile", start)

    return {
        "reset_prefix_cache": core.reset_prefix_cache,
        "pause": core.pause,
        "resume": core.resume,
        "sleep": core.sleeping.sleep,
        "wake_up": core.sleeping.wake_up,
        "is_sleeping": core.sleeping.is_sleeping,
        "reload_weights": core.sleeping.reload_weights,
        "profile": profile,
        "collective_rpc": collective_rpc,
        "failpoints_fired": core.failpoints_fired,
        "num_leases": lambda: core.scheduler.stats().num_leases,
    }


class Utilities:
    """Calls methods by name. A method that needs later steps returns a ``Future``; every other answers at once."""

    def __init__(self, methods: dict[str, Callable[..., object]]) -> None:
        self._methods = methods

    def call(self, call: UtilityCall, answer: Callable[[UtilityOutput], None]) -> None:
        """Convert the arguments to the types that the method annotates, and call it.

        ``answer`` gets the result or the error: a failed call never ends the core.
        """
        method = self._methods.get(call.method)
        if method is None:
            answer(
                UtilityOutput(
                    call.call_id, error=f"unknown utility {call.method!r}; use one of {sorted(self._methods)}"
                )
            )
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
