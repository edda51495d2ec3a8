"""Applies the results of steps to their requests, and ends requests, with or without a step."""

from collections.abc import Collection, Mapping

from ..data.messages import EngineCoreOutput, ErrorKind, Logprobs
from ..data.request import Request, RequestStatus, finish_status, mark_finished
from ..data.scheduler_output import ModelRunnerOutput, SchedulerOutput
from ..kv_cache.kv_manager import KVManager
from ..structured_output.manager import FAILED, FIELD, StructuredOutputManager
from .adapters import Adapters
from .drafts import Drafts
from .live_requests import LiveRequests
from .pooled_requests import PooledRequests
from .remote_kv import RemoteKV
from .stats_recorder import StatsRecorder
from .steps_in_flight import StepsInFlight

# vLLM samples token 0, or noise, when masks leave no token: a token that the request had forbidden.
_NO_CHOICE = (
    "allowed_token_ids: none of them may come next, after what bad_words, logit_bias, min_tokens and "
    "structured_outputs forbid"
)
_NO_PLUGGED_CHOICE = "extra_args: no token may come next, after what their plugins and the other fields forbid"
_NO_RULED_CHOICE = "transcript: no token may come next, after what its rules and those of other fields forbid"
# Finite embeddings of 1e20 or damaged weights make NaN, and vLLM answers token 0. Here the request fails alone, and its
# blocks are not cached: a retry that hit them would fail as well.
_NO_FINITE_LOGIT = (
    "the model computed no finite logit for this request, so no token can be chosen; "
    "check prompt_embeds for extreme values, and the weights"
)
_NO_PLUGGED_LOGIT = (
    "no logit of this request is finite, so no token can be chosen: a plugin that its extra_args ask for has failed, "
    "as the engine's log then says, or the model computed none"
)


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


class StepResults:
    """Appends the tokens that a step sampled, and ends the requests that they complete."""

    def __init__(
        self,
        live: LiveRequests,
        in_flight: StepsInFlight | None,
        ended: EndedRequests,
        recorder: StatsRecorder,
        drafts: Drafts | None,
        pooled: PooledRequests,
    ) -> None:
        """``live``: the scheduler's."""
        self._live = live
        self._requests = live.by_id
        self._waiting = live.waiting
        self._in_flight = in_flight
        self._ended = ended
        self._recorder = recorder
        self._drafts = drafts
        self._pooled = pooled

    def apply(self, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Process the result of a step. Returns one output for each request with new tokens, the first outputs of
        requests before others: what is behind takes the outputs in this order."""
        assert len(result.req_ids) == len(scheduled.num_scheduled_tokens), "the worker left requests out"
        num_computed = scheduled.total_num_scheduled_tokens
        if self._in_flight is not None:
            # First of all: what follows must not see tokens of requests that ended, or were replaced under the same id,
            # meanwhile.
            result = self._in_flight.end(scheduled, result, self._requests)
        if self._drafts is not None:
            # Before tokens are appended: it compares with the number of tokens that the step began with.
            num_computed -= self._drafts.verify(scheduled, result)
        self._recorder.stepped(num_computed)
        prompt_logprobs = self._collect_prompt_logprobs(scheduled, result) if result.prompt_logprobs else {}
        routed = self._routed_requests(result) if result.routed_experts else []
        has_details = bool(result.logprobs or prompt_logprobs or result.num_nans_in_logits or result.logits_stats)
        outputs: list[EngineCoreOutput] = []
        begun: list[EngineCoreOutput] = []
        any_finished = False
        for request_id, token_ids in zip(result.req_ids, result.sampled_token_ids, strict=True):
            if not token_ids or (request := self._requests.get(request_id)) is None:
                continue  # its prompt is incomplete, or it was aborted while the step executed
            # The short way serves nearly every row of a decode step; finding out that it cannot costs six comparisons.
            if (output := _go_on(request, token_ids)) is None:
                output = self._accept_tokens(request, token_ids)
                if output.prefill_stats is not None:
                    begun.append(output)
                else:
                    outputs.append(output)
            else:
                outputs.append(output)
            if has_details:
                if (logprobs := result.logprobs.get(request_id)) is not None:
                    output.new_logprobs = logprobs.first(len(output.new_token_ids))
                output.new_prompt_logprobs = prompt_logprobs.get(request_id)
                output.num_nans_in_logits = result.num_nans_in_logits.get(request_id, 0)
                output.logits_stats = result.logits_stats.get(request_id)
            any_finished |= output.finish_reason is not None
        if begun:
            outputs[:0] = begun
        if result.pooled:
            outputs += self._end_pooled(result)
            any_finished = True
        if any_finished:
            self._live.drop_ended()
        if routed:
            _attach_routed(routed, result, outputs)
        for request_id in result.without_choice:
            self._end_without_choice(request_id)
        for request_id in result.without_finite_logit:
            self._fail_computed(request_id)
        self._recorder.attach_events(outputs)
        return outputs

    def end_constrained(self, ended: Mapping[str, str], field: str = FIELD) -> None:
        """End requests whose text is complete without a stop token (""), or that fail with an error."""
        for request_id, error in ended.items():
            if (request := self._requests.get(request_id)) is None:
                continue  # aborted while the step executed
            self._live.take_out(request)
            status = RequestStatus.FINISHED_ERROR if error else RequestStatus.FINISHED_STOPPED
            self._ended.end_early(request, status, error, field if error not in ("", FAILED) else "")

    def _end_without_choice(self, request_id: str) -> None:
        """End a request that may draw no token, with an error of the field at fault."""
        if (request := self._requests.get(request_id)) is None:
            return  # aborted while the step executed
        params = request.sampling_params
        if params.transcript is not None and not params.allowed_token_ids:
            self.end_constrained({request_id: _NO_RULED_CHOICE}, "transcript")
        elif params.extra_args and not params.allowed_token_ids:
            self.end_constrained({request_id: _NO_PLUGGED_CHOICE}, "extra_args")
        else:
            self.end_constrained({request_id: _NO_CHOICE}, "allowed_token_ids")

    def _fail_computed(self, request_id: str) -> None:
        """End a request whose logits are useless. No other request may find its blocks: the KV may be useless too."""
        if (request := self._requests.get(request_id)) is not None:  # otherwise it was aborted while the step executed
            self._live.take_out(request)
            reason = _NO_PLUGGED_LOGIT if request.sampling_params.extra_args else _NO_FINITE_LOGIT
            self._ended.end_useless(request, reason)

    def _end_pooled(self, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """End the requests whose prompts are pooled. Returns their outputs."""
        outputs = []
        for request_id, pooled in result.pooled.items():
            if (request := self._requests.get(request_id)) is None:
                continue  # aborted while the step executed
            output = self._pooled.output(request, pooled)
            status = RequestStatus.FINISHED_ERROR if output.error else RequestStatus.FINISHED_STOPPED
            mark_finished(output, request, status)
            if request.status is RequestStatus.PREEMPTED:  # while the step was in flight
                self._waiting.remove(request)
            self._ended.end(request, status)
            output.prefill_stats = self._recorder.prefill_stats(request)
            outputs.append(output)
        return outputs

    def _collect_prompt_logprobs(self, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> dict[str, Logprobs]:
        """Hand each request its part of the step. Returns the prompts that are complete, by request id."""
        starts = scheduled.num_computed_tokens()
        complete: dict[str, Logprobs] = {}
        for req_id, part in result.prompt_logprobs.items():
            if (request := self._requests.get(req_id)) is not None and (
                whole := request.take_prompt_logprobs(starts[req_id], scheduled.num_scheduled_tokens[req_id], part)
            ) is not None:
                complete[req_id] = whole
        return complete

    def _routed_requests(self, result: ModelRunnerOutput) -> list[Request]:
        """Return the live requests of the step that ask for their experts."""
        found = map(self._requests.get, result.routed_experts)
        return [request for request in found if request is not None]

    def _accept_tokens(self, request: Request, token_ids: list[int]) -> EngineCoreOutput:
        output = EngineCoreOutput(request.request_id, token_ids, request.num_tokens - request.num_prompt_tokens)
        all_token_ids = request.all_token_ids
        for count, token_id in enumerate(token_ids, 1):
            all_token_ids.append(token_id)  # as `append_token` does, without its call
            request.num_tokens += 1
            if status := finish_status(request):
                output.new_token_ids = token_ids[:count]
                mark_finished(output, request, status)
                break
        if count > 1 and self._drafts is not None:
            # Only now is the hash of a block known that a draft filled: a wrong draft would have given the block a
            # wrong name.
            self._drafts.accepted(request)
        if request.status is RequestStatus.PREEMPTED:  # while the step was in flight
            self._waiting.num_tokens += len(output.new_token_ids)
            if status is not None:
                self._waiting.remove(request)
        if status is not None:
            self._ended.end(request, status)
        if not request.first_output_sent:
            request.first_output_sent = True
            output.prefill_stats = self._recorder.prefill_stats(request)
            output.kv_wait_ns = request.kv.wait_ns
        return output


def _go_on(request: Request, token_ids: list[int]) -> EngineCoreOutput | None:
    """Append a token as :meth:`StepResults._accept_tokens` does, in less time; None: more than that may happen.

    This runs for nearly every request of every step, so nothing is called that a comparison can replace.
    """
    num_tokens = request.num_tokens
    if (
        len(token_ids) > 1
        or num_tokens + 1 >= request.max_num_tokens
        or token_ids[0] in request.stop_token_ids
        or request.status is not RequestStatus.RUNNING
        or not request.first_output_sent
        or request.repetition_detection is not None
    ):
        return None
    request.all_token_ids.append(token_ids[0])
    request.num_tokens = num_tokens + 1
    return EngineCoreOutput(request.request_id, token_ids, num_tokens - request.num_prompt_tokens)


def _attach_routed(routed: list[Request], result: ModelRunnerOutput, outputs: list[EngineCoreOutput]) -> None:
    """Add the experts of the step to their requests, and send them with the outputs.

    Called after the tokens were accepted: the experts of tokens that did not become part of the output are dropped.
    """
    output_of = {output.request_id: output for output in outputs}
    for request in routed:
        assert request.routed_rows is not None
        request.routed_rows.add(result.routed_experts[request.request_id], request.num_tokens - 1)
        if (output := output_of.get(request.request_id)) is not None:
            output.routed_experts = request.take_routed_experts()
