"""The client without an event loop, of a core in a process of its own, with what tests of that process need."""

import select
from collections.abc import Sequence

from tokenloom.engine_core.client import core_client
from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.data.messages import EngineCoreOutputs
from tokenloom.services.engine.core.workers import CORE_COMMAND


class SyncMPClient(core_client.SyncMPClient):
    """Ends its core at once: no caller waits for an answer any more."""

    def __init__(self, config: EngineConfig, command: Sequence[str] = CORE_COMMAND) -> None:
        super().__init__(config, command, grace=0)

    def fileno(self) -> int:
        """The descriptor that becomes readable when outputs come."""
        return self._connection.fileno()

    def take_ready(self) -> list[EngineCoreOutputs]:
        """The outputs that have come, and answers, without waiting. Raises ``EngineDeadError``."""
        ready = list(self._early)
        self._early.clear()
        while self._receiver.has_messages or select.select([self._connection], [], [], 0)[0]:
            ready.append(self._receive())
        return ready

    def check_process(self) -> None:
        """Raise ``EngineDeadError`` if the process has ended."""
        if self._process.exit_status() is not None:
            raise self._ended()
