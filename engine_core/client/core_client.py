"""The client of an engine core for code without an event loop; the core runs in the caller's thread."""

import threading
from collections import deque
from collections.abc import Sequence

from ..core import EngineCore
from ..core_calls import CoreCalls
from ..data.config import EngineConfig
from ..data.errors import EnginePausedError, UtilityError
from ..data.messages import EngineCoreOutputs, EngineCoreRequest, UtilityCall
from ..executor.executor import Executor
from ..wire.frames import to_raw


class InprocClient:
    """Runs the core in the caller's thread: :meth:`get_output` computes a step."""

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self._core = EngineCore(config, executor)
        self._news = threading.Event()
        self._core.on_update(self._news.set)
        self._calls = CoreCalls(self._core)
        # Outputs not read yet: refusals of bad requests, and steps that a utility call had to wait for.
        self._early: deque[EngineCoreOutputs] = deque()
        self.ready = self._core.ready

    def add_request(self, request: EngineCoreRequest) -> None:
        """Add a request; a refusal comes as its output."""
        if (refusal := self._calls.add(request)) is not None:
            self._early.append(refusal)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests without an output; unknown ids are ignored."""
        self._calls.abort(list(request_ids))
        gone = set(request_ids)
        for outputs in self._early:
            outputs.outputs = [output for output in outputs.outputs if output.request_id not in gone]

    def check_awake(self) -> None:
        """Raise ``EnginePausedError`` if a new request would not run because the engine is paused or asleep."""
        if sentence := self._core.sleeping.calls_to_wake():
            raise EnginePausedError(sentence)
        if self._core.pausing.is_paused:
            raise EnginePausedError("the engine is paused; call resume first")

    def get_output(self) -> EngineCoreOutputs:
        """Run a step and return what it produced. Call it only while requests are unfinished.

        Raises ``EnginePausedError`` if none of them can advance because the engine is paused or asleep.
        """
        if self._early:
            return self._early.popleft()
        while self._core.is_compiling() and not self._core.has_work():
            self._news.wait()
            self._news.clear()
        outputs = self._calls.step()
        if not outputs.outputs and not self._core.has_work():
            self.check_awake()
        return outputs

    def call_utility(self, method: str, *args: object) -> object:
        """Call one of the core's utilities. Raises ``UtilityError`` when it fails."""
        answers: list[EngineCoreOutputs] = []
        self._calls.call(UtilityCall(0, method, [to_raw(arg) for arg in args]), answers.append)
        while not answers:
            if not self._core.has_work():
                raise UtilityError(f"{method} cannot finish: no request is left that a step could advance")
            self._early.append(self._calls.step())
        output = answers[0].utility_output
        assert output is not None
        return output.value()

    def close(self) -> None:
        """End the core. Idempotent."""
        self._core.shutdown()
