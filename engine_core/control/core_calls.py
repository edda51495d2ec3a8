"""What a client may ask of a core, every answer as data: the same in the core's process and in the client's own."""

from collections.abc import Callable, Iterable

from ..core import EngineCore
from ..wire.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    UtilityCall,
    UtilityOutput,
)
from .utilities import Utilities, methods_of


class CoreCalls:
    """Adds, aborts and utility calls of one core. Belongs to the thread that steps the core."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._num_requests_added = 0
        self._accepting = True
        self._utilities = Utilities(methods_of(core))

    def refuse_new(self) -> None:
        """From now on requests are answered with an error; those that a pause would keep for ever are ended."""
        self._accepting = False
        self._core.pausing.end_frozen()

    def add(self, request: EngineCoreRequest) -> EngineCoreOutputs | None:
        """Gives the request to the core; what it refuses is answered at once."""
        self._num_requests_added += 1
        try:
            if not self._accepting:
                raise ValueError("the engine is shutting down")
            self._core.add_request(request)
            return None
        except ValueError as error:
            output = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR, error=str(error))
            return self._stamp(EngineCoreOutputs(step=self._core.num_steps, outputs=[output]))

    def abort(self, request_ids: list[str]) -> EngineCoreOutputs | None:
        """Ends requests without an output, ignoring unknown ones. Returns the statistics if no step will bring them."""
        self._core.abort_requests(request_ids)
        if self._core.has_work():
            return None
        return self._stamp(EngineCoreOutputs(step=self._core.num_steps, scheduler_stats=self._core.scheduler.stats()))

    def call(self, call: UtilityCall, answer: Callable[[EngineCoreOutputs], None]) -> None:
        """Makes a utility call. ``answer`` gets what came of it, failures too: at once, or when later steps have it."""

        def send(output: UtilityOutput) -> None:
            answer(self._stamp(EngineCoreOutputs(step=self._core.num_steps, utility_output=output)))

        self._utilities.call(call, send)

    def step(self, take_aborts: Callable[[], Iterable[str]] = tuple) -> EngineCoreOutputs:
        """One step of the core."""
        return self._stamp(self._core.step(take_aborts))

    def _stamp(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        """Marks how many requests the core knew of when it made ``outputs``."""
        outputs.num_requests_added = self._num_requests_added
        return outputs
