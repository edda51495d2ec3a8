"""Promises the output of a step: workers return it while the device still computes, and executors pass it on."""

from typing import Protocol

from .scheduler_output import ModelRunnerOutput


class PendingOutput(Protocol):
    """Promises the output of a step (a ``concurrent.futures.Future`` is one)."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the output, and return the same one at every call. Raises the error of either half of the step."""


class FinishedOutput:
    """Holds the output of a step that has already ended."""

    __slots__ = ("_output",)

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def result(self) -> ModelRunnerOutput:
        return self._output


def as_pending(output: ModelRunnerOutput | PendingOutput) -> PendingOutput:
    """Return what a worker's ``sample_tokens`` returned as a promise."""
    return FinishedOutput(output) if isinstance(output, ModelRunnerOutput) else output


def await_output(output: ModelRunnerOutput | PendingOutput) -> ModelRunnerOutput:
    """Return the output of a step, once it is there."""
    return output if isinstance(output, ModelRunnerOutput) else output.result()
