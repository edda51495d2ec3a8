"""The end of a request that the engine core refuses or fails."""

from tokenloom.engine_core.data.messages import EngineCoreOutput, FinishReason


class CoreRefusal(Exception):
    """The core has ended a request with an error, which is the request's own."""

    def __init__(self, error: ValueError | RuntimeError) -> None:
        """``error``: ``ValueError`` if the request was at fault, ``RuntimeError`` if the core failed it."""
        super().__init__(str(error))
        self.error = error


def check(step: EngineCoreOutput) -> None:
    """Raise `CoreRefusal` if a step's result ends its request with an error."""
    if step.error_field:
        raise CoreRefusal(ValueError(step.error))
    if step.error or step.finish_reason is FinishReason.ERROR:
        raise CoreRefusal(RuntimeError(f"request {step.request_id} failed: {step.error}"))
