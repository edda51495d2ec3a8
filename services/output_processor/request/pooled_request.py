"""Runs a request that generates nothing: places it on one engine, and passes on what the engine pools."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING

from tokenloom.request import errors, wire_errors
from tokenloom.request.packed_ids import num_ids
from tokenloom.services.runtime.streams.slotted_stream import WrongFrame
from tokenloom.services.runtime.tasks import Tasks
from tokenloom.services.runtime.telemetry.logs import RequestLog
from tokenloom.v1.engine_pb2 import AddRequest, Finished, KVGrant, KVSource, PickId
from tokenloom.v1.output_processor_pb2 import RequestFinished, Submit
from tokenloom.v1.types_pb2 import EngineRole, FinishReason, Logprobs, Pooled, Timeline

from ..placement.engine_link import EngineAttempt
from ..placement.engine_search import EngineSearch, Lifetime
from ..placement.placement import FirstPick, PendingPick, Placer
from .outbox import Outbox
from .sample_output import SAMPLE_TOKENS, weights_version
from .telemetry import RequestSpan

if TYPE_CHECKING:
    from tokenloom.process.cpu_bill import CpuAccount

log = logging.getLogger(__name__)

_WIDEST = 1 << 16
"""Numbers for each token of a result that are believed of every engine: vectors may be wider than the vocabulary of a
model of bytes or proteins, and a model does not say how wide its vectors are."""
_TOKEN_BYTES = 4096
"""So many bytes of a result cost this process about as much as the text of a token."""
_ABORT, _ERROR = FinishReason.FINISH_REASON_ABORT, FinishReason.FINISH_REASON_ERROR


class PooledRequest:
    """Runs one pooling request, from its Submit to its end.

    When its engine fails, another engine begins it anew; the gateway then drops the parts that it has received. Nothing
    of the result is kept here, so the request ends with the gateway's stream. Fulfils ``AttemptOwner``.

    Attributes:
        account: Bills what it costs this process; None without ``--bill``.
    """

    def __init__(
        self,
        submit: Submit,
        outbox: Outbox,
        placer: Placer,
        tasks: Tasks,
        trace: RequestSpan | None,
        clock: Callable[[], int],
        on_end: Callable[[int, RequestFinished], object],
    ) -> None:
        """Args:
        tasks: Own the placements.
        clock: Returns nanoseconds.
        on_end: Called once, with its slot and its end.
        """
        self._submit = submit
        self._outbox = outbox
        self._placer = placer
        self._tasks = tasks
        self._trace = trace
        self._clock = clock
        self._on_end = on_end
        self._lifetime = Lifetime(submit, asyncio.get_running_loop().time())
        self._search = EngineSearch(
            placer.budget,
            self._lifetime,
            submit.num_samples or 1,
            placer.is_shared,
            partial(outbox.engine_died, submit.slot),
            placer.check,
            placer.is_open,
        )
        self._attempt: EngineAttempt | None = None
        self._placement: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timeline = Timeline()
        self._num_attempts = 1
        self._weights = b""  # which compute the result
        self._shape: Sequence[int] = ()  # of the result of the present attempt
        self._num_bytes = 0  # of it that have arrived
        self._has_ended = False
        self.account: CpuAccount | None = None
        self.slot = submit.slot

    def start(self, pick: FirstPick = None) -> None:
        """Find an engine. ``pick``: what is known of it."""
        assert not isinstance(pick, EngineAttempt), "only the coordinator places pooling requests"
        if self._lifetime.deadline is not None:
            self._timer = asyncio.get_running_loop().call_at(self._lifetime.deadline, self._expire)
        self._continue(pick)

    def work(self) -> int:
        """Return what this process has done for it, in tokens of a text: passing bytes on costs as much."""
        return SAMPLE_TOKENS + self._num_bytes // _TOKEN_BYTES

    def cancel(self) -> None:
        """End because the gateway wants no result."""
        self._end(_ABORT)

    def fail(self, error: BaseException) -> None:
        """End with an error."""
        self._end(_ERROR, error=error)

    def on_pooled(self, attempt: EngineAttempt, part: Pooled) -> None:
        shape = part.shape or self._shape
        most = num_ids(self._submit.prompt) * max(attempt.link.identity.limits.vocab_size, _WIDEST)
        if prod(shape) > most or 4 * part.offset + len(part.data) > 4 * prod(shape):
            raise WrongFrame("a part of a result is beyond its shape")
        if part.offset and 4 * part.offset != self._num_bytes:
            raise WrongFrame("a part of a result is missing or repeated")
        self._shape = shape
        self._num_bytes = 4 * part.offset + len(part.data)  # a result may begin anew
        attempt.has_output = True
        # Passed on without being kept, so the memory here does not depend on the size of results. A request that
        # another engine begins anew costs one prompt, and its first part has offset 0.
        part.slot = self.slot
        self._outbox.add_pooled(part)

    def on_finished(self, attempt: EngineAttempt, finished: Finished) -> None:
        if finished.reason not in (_ABORT, _ERROR) and self._shape and self._num_bytes != 4 * prod(self._shape):
            raise WrongFrame("a result is not complete")
        self._placer.release(attempt)
        try:
            error = wire_errors.from_proto(finished.error) if finished.reason == _ERROR else None
            if error is not None and self._search.refused(attempt, error, has_begun=False):
                self._replace()
            else:
                self._end(finished.reason, finished, error)
        except Exception as error:  # a fault of one request never ends the stream of all
            self.fail(error)

    def on_lost(self, attempt: EngineAttempt, *, is_alone: bool) -> None:
        self._placer.release(attempt)
        try:
            self._search.lost(attempt, is_alone=is_alone)
            self._replace()
        except Exception as error:  # the other requests of the engine are to learn of its loss, too
            self.fail(error)

    def on_kv_granted(self, attempt: EngineAttempt, kv: KVSource) -> None:
        """Do nothing: no other engine continues from the KV."""

    def on_moving(self, attempt: EngineAttempt, grant: KVGrant) -> None:
        raise WrongFrame("the engine hands over a pooling request")

    def on_prompt_logprobs(self, attempt: EngineAttempt, token_index: int, logprobs: Logprobs) -> None:
        raise WrongFrame("the engine sent log probabilities for a pooling request")

    def on_tokens(
        self, attempt: EngineAttempt, token_index: int, token_ids: Sequence[int], logprobs: Logprobs | None
    ) -> None:
        raise WrongFrame("the engine generated tokens for a pooling request")

    def _replace(self) -> None:
        """Begin anew on another engine, unless the request may have killed its engines."""
        self._attempt = None
        self._shape, self._num_bytes = (), 0
        self._num_attempts += 1
        self._continue()

    def _continue(self, pick: PendingPick | None = None) -> None:
        if (verdict := self._search.verdict()) is not None:
            self.fail(verdict)
        else:
            self._placement = self._tasks.spawn(self._place(pick), name=f"place {self._submit.request_id}")

    async def _place(self, pick: PendingPick | None) -> None:
        """Find an engine and send the request. A failure ends this request, never the gateway's stream."""
        started, role = self._clock(), EngineRole.ENGINE_ROLE_PREFILL
        try:
            attempt = await self._placer.place(self._submit, role, self._search, pending=pick)
            self._placement = None
            self._timeline.placement_ns += self._clock() - started
            self._send(attempt)
        except Exception as error:
            self._placement = None
            if isinstance(error, errors.EngineKiller):
                self._num_attempts -= 1  # counted when the engine was lost, and not made
            self.fail(error)

    def _send(self, attempt: EngineAttempt) -> None:
        self._attempt = attempt
        self._timeline.prefill_engine = attempt.link.identity.engine_id
        self._weights = attempt.link.serves.weights
        deadline = self._lifetime.deadline
        left = None if deadline is None else deadline - asyncio.get_running_loop().time()
        request = make_pooling_add(self._submit, pick=attempt.pick, seconds_left=left)
        try:
            attempt.link.add(request, attempt, self)
        except errors.Unavailable:
            self.on_lost(attempt, is_alone=False)  # it never ran there
        if log.isEnabledFor(logging.DEBUG):
            request_log = RequestLog(log, self._submit.request_id, self._submit.trace_headers)
            request_log.debug("placed on %s", self._timeline.prefill_engine)

    def _expire(self) -> None:
        self.fail(errors.DeadlineExceeded("The request's time ran out."))

    def _end(self, reason: FinishReason, finished: Finished | None = None, error: BaseException | None = None) -> None:
        """Free what is held on the engine, and report the end."""
        if self._has_ended:
            return
        self._has_ended = self._search.has_ended = True
        if self._timer is not None:
            self._timer.cancel()
        if self._placement is not None:
            self._placement.cancel()
        if self._attempt is not None:
            self._attempt.link.abort(self._attempt)
            self._placer.release(self._attempt)
            self._attempt = None
        end = self._describe(reason, finished, error)
        self._outbox.finish(end)
        if self._trace is not None:
            self._trace.sample_ended(end)
            self._trace.end()
        self._on_end(self.slot, end)

    def _describe(
        self, reason: FinishReason, finished: Finished | None, error: BaseException | None
    ) -> RequestFinished:
        finished = finished or Finished()
        if self.account is not None:
            self._timeline.cpu.output_processor_ns = self.account.close()
            self._timeline.cpu.engine_ns = finished.cpu_ns
        self._timeline.queued_ns, self._timeline.prefill_ns = finished.queued_ns, finished.prefill_ns
        return RequestFinished(
            slot=self.slot,
            reason=reason,
            error=None if error is None else wire_errors.to_proto(error),
            prompt_tokens=num_ids(self._submit.prompt),
            cached_tokens=finished.cached_tokens,
            attempts=self._num_attempts,
            timeline=self._timeline,
            weights_version=weights_version([self._weights]),
        )


def make_pooling_add(submit: Submit, *, pick: PickId | None, seconds_left: float | None) -> AddRequest:
    """Return the message of a pooling request; ``pick`` and ``seconds_left`` are as in :func:`.make_add`."""
    request = AddRequest(
        request_id=submit.request_id,
        pooling_params=submit.pooling_params,
        priority=submit.priority,
        pick=pick,
        trace_headers=submit.trace_headers,
        tenant=submit.tenant,
    )
    request.prompt.CopyFrom(submit.prompt)  # as an argument it would take twice the memory
    if seconds_left is not None:
        request.timeout.FromNanoseconds(max(0, int(seconds_left * 1e9)))
    return request
