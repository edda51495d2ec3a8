"""Utility calls: by name, of the methods declared here and of no others. Only on the core's private socket, never on a
network."""

import logging
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from ..core import EngineCore
from ..wire.messages import UtilityCall, UtilityOutput
from ..wire.serialization import call_with_raw, to_raw

log = logging.getLogger(__name__)


def methods_of(core: EngineCore) -> dict[str, Callable[..., object]]:
    """What a client may call on this core, by name."""
    return {
        "reset_prefix_cache": core.reset_prefix_cache,
        "pause": core.pause,
        "resume": core.resume,
        "sleep": core.sleeping.sleep,
        "wake_up": core.sleeping.wake_up,
        "is_sleeping": core.sleeping.is_sleeping,
        "reload_weights": core.sleeping.reload_weights,
        "profile": core.profile,
        "collective_rpc": core.collective_rpc,
        "failpoints_fired": core.failpoints_fired,
        "num_leases": core.num_leases,
    }


class Utilities:
    """Calls by name. A method that needs later steps returns a ``Future``; every other answers at once."""

    def __init__(self, methods: dict[str, Callable[..., object]]) -> None:
        self._methods = methods

    def call(self, call: UtilityCall, answer: Callable[[UtilityOutput], None]) -> None:
        """Converts the arguments to the types that the method annotates, and calls it. ``answer`` gets the result, or
        what went wrong: a failed call never ends the core."""
        method = self._methods.get(call.method)
        if method is None:
            answer(UtilityOutput(call.call_id, error=f"no utility {call.method!r}; there are {sorted(self._methods)}"))
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
