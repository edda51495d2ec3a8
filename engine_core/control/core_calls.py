"""Answers what a client may ask of a core, in the core's own process and in the client's."""

from collections.abc import Callable

from ..core import EngineCore
from ..wire.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason, UtilityOutput
from .utilities import Utilities, UtilityCall, methods_of


class CoreCalls:
    """Makes the adds, aborts and utility calls of one core. Belongs to the thread that steps the core."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._accepting = True
        self._utilities = Utilities(methods_of(core))
        self.step = core.step

    def refuse_new(self) -> None:
        """Answer requests with an error from now on, and end those that a pause would keep forever."""
        self._accepting = False
        self._core.pausing.end_frozen()

    def add(self, request: EngineCoreRequest) -> EngineCoreOutputs | None:
        """Add the request to the core. Returns the answer to a request that the core refuses."""
        self._core.num_requests_added += 1
        try:
            if not self._accepting:
                raise ValueError("the engine is shutting down")
            self._core.add_request(request)
            return None
        except ValueError as error:
            output = EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR, error=str(error))
            return self._stamp(EngineCoreOutputs(outputs=[output]))

    def abort(self, request_ids: list[str]) -> EngineCoreOutputs | None:
        """End requests without an output, ignoring unknown ones. Returns the statistics if no step will bring them."""
        self._core.abort_requests(request_ids)
        if self._core.has_work():
            return None
        return self._stamp(EngineCoreOutputs(scheduler_stats=self._core.scheduler.stats()))

    def call(self, call: UtilityCall, answer: Callable[[EngineCoreOutputs], None]) -> None:
        """Make a utility call. ``answer`` gets its result or error: at once, or after later steps."""

        def send(output: UtilityOutput) -> None:
            answer(self._stamp(EngineCoreOutputs(utility_output=output)))

        self._utilities.call(call, send)

    def _stamp(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        outputs.step = self._core.num_steps
        outputs.num_requests_added = self._core.num_requests_added
        return outputs
