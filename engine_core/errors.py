"""Errors of an engine core that its client sees."""


class EngineStartError(RuntimeError):
    """The core did not start. The message gives the reason to an operator; it is not meant for a client of the mesh."""


class EngineConfigError(EngineStartError):
    """The configuration or the checkpoint is not supported, so that another start would fail in the same way."""


class EngineDeadError(RuntimeError):
    """The core has ended or failed; it will not answer any call."""


class ExecutorFailedError(RuntimeError):
    """A worker failed or ended, so that the core cannot compute."""


class WorkerLostError(ExecutorFailedError):
    """The process of a worker ended; the executor can start another one."""


class GroupLostError(RuntimeError):
    """Another rank of the data-parallel group is lost, so that this one cannot compute either."""


class EnginePausedError(RuntimeError):
    """The engine is paused or asleep, so that a request would wait without end; the message names the call to make."""


class UtilityError(RuntimeError):
    """A utility call failed in the core; the core continues to run."""
