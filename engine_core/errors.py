"""What can go wrong between an engine core and its client."""


class EngineStartError(RuntimeError):
    """The core did not come up; the message says why and is meant for an operator, not for a client of the mesh."""


class EngineConfigError(EngineStartError):
    """The configuration or the checkpoint asks for what cannot be had: another start would end the same way."""


class EngineDeadError(RuntimeError):
    """The core is gone or gave up: nothing that was asked of it will be answered any more."""


class ExecutorFailedError(RuntimeError):
    """A worker failed or is gone: the core cannot compute any more."""


class UtilityError(RuntimeError):
    """A utility call failed in the core; the core goes on."""
