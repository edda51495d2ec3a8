"""Errors of an engine core that its client sees."""


class EngineStartError(RuntimeError):
    """The core did not start. The message gives the reason to an operator; it is not meant for a client of the mesh."""


class EngineConfigError(EngineStartError):
    """The configuration or the checkpoint is not supported, so that another start would fail in the same way."""


class EngineDeadError(RuntimeError):
    """The core has ended or failed; it will not answer any call."""


class EngineDamagedError(EngineDeadError):
    """The core has ended because weights in memory have changed by themselves. Another process reads them anew."""


class NotSentError(RuntimeError):
    """A message cannot be sent to the core, and nothing of it was: only what it asks for fails."""


class ExecutorFailedError(RuntimeError):
    """A worker failed or ended, so that the core cannot compute."""


class WeightsDamagedError(ExecutorFailedError):
    """Weights in a worker's memory differ from what was loaded, so that every token may be wrong. The message names
    them."""


class WorkerLostError(ExecutorFailedError):
    """The process of a worker ended; the executor can start another one."""


class PeerLostError(ExecutorFailedError):
    """A worker of another engine, with which this one shares the experts, does not answer any more; the step that
    waited for it is lost, and the workers that are left can join anew."""


class RanksDifferError(ExecutorFailedError):
    """Some workers did what a call asks and others did not, so that their states differ until the caller repairs that.

    Attributes:
        results: What the workers returned that made the call.
        is_refused: Whether every other worker refused it as a mistake of the caller, and has not changed.
    """

    def __init__(self, text: str, results: list[object], *, is_refused: bool) -> None:
        super().__init__(text)
        self.results = results
        self.is_refused = is_refused


class GroupLostError(RuntimeError):
    """Another rank of the data-parallel group is lost, so that this one cannot compute either."""


class EnginePausedError(RuntimeError):
    """The engine is paused or asleep, so that a request would wait without end; the message names the call to make."""


class UtilityError(RuntimeError):
    """A utility call failed in the core; the core continues to run."""
