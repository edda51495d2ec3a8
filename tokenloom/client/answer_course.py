"""Decides, without doing any I/O, which call brings the next part of an answer after one has failed."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from tokenloom.request import errors
from tokenloom.v1 import inference_pb2, types_pb2

from .retries import Retries

IDEMPOTENCY_KEY = "idempotency-key"
"""Metadata: a repeated call with the same key joins the request that the first one began."""


@dataclass(frozen=True)
class NextCall:
    """What to call."""

    request: inference_pb2.GenerateRequest | inference_pb2.InferenceResumeRequest
    """Its type says which method: ``Generate`` or ``Resume``."""
    metadata: tuple[tuple[str, str], ...]


class AnswerCourse:
    """Follows one answer over as many calls as it takes.

    A cut connection costs nothing: while the mesh keeps the request, the answer is resumed where it broke off, and a
    call that brought nothing is repeated with the same key. Errors of the mesh are retried as :class:`Retries` says.

    Attributes:
        is_first: Whether the response that was taken last is the first of the answer; true again after a restart.
    """

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        retries: Retries,
        deadline: float,
        clock: Callable[[], float],
        *,
        may_restart: bool,
    ) -> None:
        """Args:
        deadline: In the time of ``clock``, seconds.
        may_restart: Whether an answer of which a part has arrived may begin anew. A stream has delivered that part.
        """
        self.is_first = False
        self._request = request
        self._retries = retries
        self._deadline = deadline
        self._clock = clock
        self._may_restart = may_restart
        self._may_resume = not request.HasField("beam_search")
        self._failures = 0
        """Failures in a row, without a response between them."""
        self._cause: errors.TokenloomError | None = None
        """Why the answer is resumed."""
        self._request_id = ""
        self._is_over = False
        """Whether the mesh has ended the answer, or was asked to."""
        self._restart()

    @property
    def seconds_left(self) -> float:
        return self._deadline - self._clock()

    def next_call(self) -> NextCall:
        """Return what to call now."""
        self._call_brought_part = False
        if not self._request_id:
            return NextCall(self._request, ((IDEMPOTENCY_KEY, self._key),) if self._may_resume else ())
        resume = inference_pb2.InferenceResumeRequest(
            request=self._request, request_id=self._request_id, positions=self._positions.values()
        )
        return NextCall(resume, ())

    def take(self, response: inference_pb2.GenerateResponse) -> None:
        """Note how far the answer has come."""
        self.is_first = not self._request_id
        self._request_id = response.request_id
        self._failures = 0
        self._call_brought_part = True
        index = response.index
        position = self._positions.get(index)
        if position is None:
            position = self._positions[index] = inference_pb2.OutputPosition(index=index)
        # The client holds the position: only it knows which part arrived last, and gateways then share no state.
        position.num_tokens = response.token_index + len(response.token_ids)
        position.text_length = response.text_length
        position.finished = response.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED
        position.num_prompt_logprobs += len(response.prompt_logprobs.sampled)

    def end(self) -> None:
        """Note that the answer is complete."""
        self._is_over = True
        self._retries.succeeded()

    def cancellation(self) -> inference_pb2.InferenceCancelRequest | None:
        """Return what ends the request at the mesh when the caller leaves; None if it has ended or ends with its
        call."""
        if self._is_over or not self._may_resume:
            return None
        self._is_over = True
        if self._request_id:
            return inference_pb2.InferenceCancelRequest(request_id=self._request_id)
        return inference_pb2.InferenceCancelRequest(idempotency_key=self._key)

    def failed(self, error: errors.TokenloomError, *, was_cut: bool) -> float:
        """Return after how many seconds :meth:`next_call` may be made. Raises the final error.

        ``was_cut``: the connection ended the call, not the mesh.
        """
        self._is_over = not was_cut
        wait = self._wait_after(error, was_cut=was_cut)
        self._is_over = False
        return wait

    def _wait_after(self, error: errors.TokenloomError, *, was_cut: bool) -> float:
        if was_cut and error.retry_after is None:
            error = errors.Unavailable("The connection to the gateway was lost; retry.")
        failures, self._failures = self._failures, self._failures + 1
        # Nothing else resumes this answer: an earlier call of this client, delayed on its way, has taken it.
        is_taken = isinstance(error, errors.Aborted)
        is_leaving = was_cut or is_taken or error.reason == errors.GatewayLeaving.reason
        if self._request_id:
            error = self._choose_road(error, is_leaving=is_leaving)
        elif not was_cut and not is_taken:
            self._restart()  # the request of this key has ended
        # The first attempt after a cut connection costs nothing, because the request still runs. When a gateway dies
        # with a thousand streams of one client, a budget of ten retries would lose nearly all of them.
        if is_leaving and not failures and self._retries.are_allowed and self.seconds_left > 0:
            return 0.0
        wait = self._retries.wait(error, failures, self.seconds_left, reached_mesh=not was_cut)
        if wait is None:
            raise error
        return wait

    def _choose_road(self, error: errors.TokenloomError, *, is_leaving: bool) -> errors.TokenloomError:
        """Resume an answer that has begun, or begin it anew. Return what :class:`Retries` decides about.

        Raises the error where neither is possible.
        """
        is_old = self._cause is not None and isinstance(error, errors.Unimplemented)  # a gateway of an earlier release
        if is_old and self._cause is not None:
            error = self._cause
        is_lost = is_old or error.reason == errors.RequestLost.reason
        if self._may_resume and not is_lost and (is_leaving or not self._call_brought_part):
            self._cause = self._cause or error
            return error
        if not self._may_restart:
            raise error
        self._restart()
        return errors.Unavailable(error.message, retry_after=0.0) if is_lost else error

    def _restart(self) -> None:
        """Forget what has arrived."""
        self._key = secrets.token_hex(16)
        self._request_id = ""
        self._cause = None
        self._call_brought_part = False
        self._positions: dict[int, inference_pb2.OutputPosition] = {}
