"""The attempts of one stream, by slot. Without I/O: every Add gets exactly one Finished, whatever comes first."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from tokenloom.engine_core.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, PrefillStats
from tokenloom.v1 import engine_pb2, types_pb2

from ..runtime import errors
from .core_request import to_core_request
from .frame_builder import FrameBuilder

_REASONS = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: types_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: types_pb2.FINISH_REASON_ERROR,
    FinishReason.REPETITION: types_pb2.FINISH_REASON_REPETITION,
}


@dataclass(slots=True, eq=False)
class Attempt:
    """One live attempt at a request.

    Attributes:
        slot: Its name on the stream.
        key: Its name in the core.
        request_id: The mesh's, for logs only.
        num_output_tokens: So far, accepted ones of earlier attempts included.
        arrival: Of the Add, monotonic seconds; so are ``first_token_at`` and ``last_token_at``.
    """

    attempts: "Attempts"
    slot: int
    key: str
    request_id: str
    num_prompt_tokens: int
    num_accepted_tokens: int
    num_output_tokens: int
    arrival: float
    prefill_stats: PrefillStats | None = None
    first_token_at: float = 0.0
    last_token_at: float = 0.0
    finish_reason: FinishReason | None = None


class Attempts:
    """Live attempts of one stream; what they produce goes to a frame builder.

    Methods that end an attempt return it, for the core to abort, or None if the slot was not live.
    """

    def __init__(
        self,
        stream_id: int,
        limits: types_pb2.ModelLimits,
        builder: FrameBuilder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream_id = stream_id
        self._limits = limits
        self._builder = builder
        self._clock = clock
        self._last_slot = 0
        self._live: dict[int, Attempt] = {}

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def live(self) -> list[Attempt]:
        return list(self._live.values())

    def is_live(self, slot: int) -> bool:
        return slot in self._live

    def open(self, add: engine_pb2.AddRequest) -> tuple[Attempt, EngineCoreRequest]:
        """Validates an Add and makes it live. Raises what is wrong with it; the caller answers with :meth:`refuse`."""
        key = f"{self._stream_id}.{add.slot}"
        request = to_core_request(add, key, self._limits)
        attempt = Attempt(
            attempts=self,
            slot=add.slot,
            key=key,
            request_id=add.request_id,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_accepted_tokens=len(request.accepted_token_ids),
            num_output_tokens=len(request.accepted_token_ids),
            arrival=self._clock(),
        )
        self._live[add.slot] = attempt
        return attempt, request

    def check_slot(self, slot: int) -> None:
        """Slots only grow. ``InvalidArgument`` ends the stream: which attempt an answer belongs to would be open."""
        if slot <= self._last_slot:
            raise errors.InvalidArgument(f"slot {slot} after slot {self._last_slot}: slots only grow", "slot")
        self._last_slot = slot

    def refuse(self, add: engine_pb2.AddRequest, error: BaseException) -> None:
        """Answers an Add that never became live."""
        self._builder.finish(
            engine_pb2.Finished(
                slot=add.slot,
                reason=types_pb2.FINISH_REASON_ERROR,
                num_output_tokens=len(add.accepted_token_ids),
                error=errors.to_proto(error),
            )
        )

    def take_output(self, attempt: Attempt, output: EngineCoreOutput) -> None:
        """What a step produced for a live attempt."""
        if output.new_token_ids:
            self._builder.add_tokens(attempt.slot, output.token_index, output.new_token_ids)
            attempt.num_output_tokens = output.token_index + len(output.new_token_ids)
        if output.prefill_stats is not None:
            attempt.prefill_stats = output.prefill_stats
        if output.finish_reason is FinishReason.ERROR:
            self.fail(attempt.slot, errors.Unavailable(output.error or "the engine failed this request"))
        elif output.finish_reason is not None:
            self._finish(attempt, output.finish_reason, stop_token_id=output.stop_token_id)

    def stop_at(self, slot: int, num_tokens: int) -> Attempt | None:
        """A stop string was found: the attempt ends with ``num_tokens`` tokens, or all there are if that is less. Also
        when it ended meanwhile but the peer cannot know yet."""
        self._builder.cut(slot, num_tokens)
        attempt = self._live.get(slot)
        if attempt is None:
            return None
        attempt.num_output_tokens = min(num_tokens, attempt.num_output_tokens)
        return self._finish(attempt, FinishReason.STOP)

    def abort(self, slot: int) -> Attempt | None:
        """The peer wants no more."""
        attempt = self._live.get(slot)
        return attempt and self._finish(attempt, FinishReason.ABORT)

    def fail(self, slot: int, error: errors.TokenloomError) -> Attempt | None:
        """The attempt cannot go on: its time ran out, the core died, the engine leaves."""
        attempt = self._live.get(slot)
        return attempt and self._finish(attempt, FinishReason.ERROR, error=error)

    def drop_all(self) -> list[Attempt]:
        """The stream is gone: forgets every attempt without an answer."""
        attempts = self.live
        for attempt in attempts:
            attempt.finish_reason = FinishReason.ABORT
        self._live.clear()
        return attempts

    def _finish(
        self,
        attempt: Attempt,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        error: errors.TokenloomError | None = None,
    ) -> Attempt:
        del self._live[attempt.slot]
        attempt.finish_reason = reason
        stats = attempt.prefill_stats
        self._builder.finish(
            engine_pb2.Finished(
                slot=attempt.slot,
                reason=_REASONS[reason],
                num_output_tokens=attempt.num_output_tokens,
                stop_token_id=stop_token_id,
                cached_tokens=stats.num_cached_tokens if stats else 0,
                error=errors.to_proto(error) if error else None,
                queued_ns=stats.queued_ns if stats else self._waited_ns(attempt),
                prefill_ns=stats.prefill_ns if stats else 0,
            )
        )
        return attempt

    def _waited_ns(self, attempt: Attempt) -> int:
        return round((self._clock() - attempt.arrival) * 1e9)
