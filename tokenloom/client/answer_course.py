"""Decides, without doing any I/O, which call brings the next part of an answer after one has failed, and when."""

import random
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tokenloom.request import errors
from tokenloom.v1 import inference_pb2, types_pb2

IDEMPOTENCY_KEY = "idempotency-key"
"""Metadata: a repeated call with the same key joins the request that the first one began."""
_MAX_WAIT = 10.0
_JITTER = 0.2


class Retries:
    """Holds the retry policy of one client. A call is retried only if the mesh asks for it (RetryInfo: full, down or
    shutting down), and only before the caller has received a part of the answer. Continuing an answer whose connection
    was cut is no retry: it gives the mesh no work.

    A budget for all calls keeps an overloaded mesh from receiving every request several times: each failure of the mesh
    costs one, each success restores a tenth, and below half of the budget failures are final. A failed connection costs
    nothing: many streams that lose one gateway together must not use up each other's retries.
    """

    def __init__(self, max_retries: int = 4, budget: float = 10.0) -> None:
        """``max_retries``: limit for one call; 0: none. ``budget``: twice the number of failures in a row, of
        all calls, that are retried."""
        self._max_retries = max_retries
        self._budget = budget
        self._left = budget
        self._lock = threading.Lock()  # a blocking client may be shared by threads

    @property
    def are_allowed(self) -> bool:
        """Whether a call may be made again at all."""
        return self._max_retries > 0

    def succeeded(self) -> None:
        with self._lock:
            self._left = min(self._left + 0.1, self._budget)

    def wait(
        self, error: errors.TokenloomError, failures: int, seconds_left: float, *, reached_mesh: bool = True
    ) -> float | None:
        """Return the seconds until the next try, at least as many as the mesh requested; None: ``error`` is final.

        ``failures``: earlier failures of this call. ``seconds_left``: time until its deadline. ``reached_mesh``: False
        where the connection failed, which costs none of the budget: the mesh had no work with the call.
        """
        if error.retry_after is None:
            return None
        with self._lock:
            # Eight streams that lost one gateway together spent half of the budget on second attempts to connect, and
            # the last three of them failed while the gateway restarted.
            if reached_mesh:
                self._left = max(self._left - 1, 0.0)
            if failures >= self._max_retries or (reached_mesh and self._left < self._budget / 2):
                return None
        # Clients that were refused at the same time must not retry at the same time.
        wait = min(error.retry_after * 2**failures, max(_MAX_WAIT, error.retry_after))
        wait *= 1 + random.uniform(0, _JITTER)
        return wait if wait < seconds_left else None


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
