"""Ends requests, with or without a step."""

from collections.abc import Collection

from ..data.messages import EngineCoreOutput, ErrorKind
from ..data.request import Request, RequestStatus, mark_finished
from ..kv_cache.kv_manager import KVManager
from ..structured_output.manager import StructuredOutputManager
from .adapters import Adapters
from .live_requests import LiveRequests
from .remote_kv import RemoteKV
from .stats_recorder import StatsRecorder
from .steps_in_flight import StepsInFlight


class EndedRequests:
    """Gives back what a request held when it ends, and keeps what its client and the worker must still learn."""

    def __init__(
        self,
        live: LiveRequests,
        kv: KVManager,
        remote: RemoteKV | None,
        grammars: StructuredOutputManager | None,
        in_flight: StepsInFlight | None,
        recorder: StatsRecorder,
        adapters: Adapters | None = None,
    ) -> None:
        """``live`` and ``adapters``: those of the scheduler, from which ended requests are removed."""
        self._adapters = adapters
        self._live = live
        self._kv = kv
        self._remote = remote
        self._grammars = grammars
        self._in_flight = in_flight
        self._recorder = recorder
        self.outputs: list[EngineCoreOutput] = []
        """Outputs that no result of a step will bring, until :meth:`take_outputs`."""
        self.req_ids: list[str] = []
        """Ended requests that the worker must forget: the next step names them."""

    def end(self, request: Request, status: RequestStatus) -> None:
        """End a request; the caller removes it from ``running`` or ``waiting``."""
        if request.is_known_to_worker:
            self.req_ids.append(request.request_id)
        request.set_status(status)
        # A step in flight still samples a token for this id, and a new request may take the id at once: the token is
        # not its.
        if self._in_flight is not None:
            self._in_flight.request_ended(request.request_id)
        # A reader may still copy these blocks, or a load fill them; then the transfer frees them when it ends.
        if self._remote is None or not self._remote.request_finished(request):
            self._kv.free(request.kv, request.kv.session)
        if request.request_id in self._live.by_id:  # otherwise it is refused
            self._live.remove(request)
            if request.adapter and self._adapters is not None:
                self._adapters.ended(request)
        if self._grammars is not None and request.is_constrained:
            self._grammars.forget(request.request_id)

    def end_early(self, request: Request, status: RequestStatus, error: str = "", field: str = "") -> None:
        """End a request without a step; it is in no queue. ``field`` is the field of the request at fault, if any."""
        output = EngineCoreOutput(request.request_id, [], request.num_output_tokens, error=error, error_field=field)
        self.end(request, status)
        mark_finished(output, request, status)
        self.outputs.append(output)

    def end_useless(self, request: Request, error: str) -> None:
        """Fail a request that this engine cannot compute; it is in no queue. Its blocks are not found any more."""
        self._kv.forget(request.kv)
        self.end_early(request, RequestStatus.FINISHED_ERROR, error)
        self.outputs[-1].error_kind = ErrorKind.INTERNAL

    def end_at_limit(self, request: Request, error: str, kind: ErrorKind) -> None:
        """Refuse a request because of a limit that is not its own; it is in no queue."""
        self.end_early(request, RequestStatus.FINISHED_ERROR, error)
        self.outputs[-1].error_kind = kind

    def drop_outputs(self, request_ids: Collection[str]) -> None:
        """Forget the outputs of requests whose clients do not want them any more."""
        self.outputs = [output for output in self.outputs if output.request_id not in request_ids]
        self._recorder.forget(request_ids)

    def take_outputs(self) -> list[EngineCoreOutput]:
        """Return the outputs since the last call."""
        outputs, self.outputs = self.outputs, []
        self._recorder.attach_events(outputs)
        return outputs
