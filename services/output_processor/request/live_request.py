"""A sample of a request between its gateway's stream and its legs: who says what to whom, and that it ends exactly
once."""

from collections.abc import Callable, Sequence

from tokenloom.request import errors
from tokenloom.v1.engine_pb2 import Finished
from tokenloom.v1.output_processor_pb2 import RequestFinished
from tokenloom.v1.types_pb2 import Logprobs

from ..placement.placement import Asked, Placement
from ..stream.outbox import Key, Outbox
from ..stream.paced_outbox import PacedOutbox
from .legs import Legs
from .request_state import RequestState


class LiveRequest:
    """Fulfils ``LegsOwner``. Whatever ends it first wins; ``on_end`` is then called, once."""

    def __init__(
        self,
        key: Key,
        state: RequestState,
        outbox: Outbox | PacedOutbox,
        on_end: Callable[["LiveRequest", RequestFinished], None],
    ) -> None:
        self.state = state
        self.ended = False
        self._key = key
        self._outbox = outbox
        self._on_end = on_end
        self._legs: Legs | None = None

    def start(self, legs: Legs, asked: Asked | None = None) -> None:
        """Goes to the engines; ``asked``: for the first of them."""
        self._legs = legs
        legs.start(asked)

    def join(self, legs: Legs, placement: Placement) -> None:
        """Goes where another sample has settled."""
        self._legs = legs
        legs.join(placement)

    def replay(self) -> None:
        """Starts from the tokens of earlier attempts; they may already hold a stop string."""
        if text := self.state.replay():
            self._outbox.add(self._key, text, len(self.state.token_ids), ())
        if self.state.stop_match is not None:
            self._end(self.state.stopped())

    def on_prompt_logprobs(self, token_index: int, logprobs: Logprobs) -> None:
        """What an engine tells of the prompt."""
        try:
            told = self.state.prompt_logprobs(token_index, logprobs)
        except Exception as error:  # one request's fault never ends the stream of all
            self.fail(error)
            return
        if told is not None:
            self._outbox.tell(self._key, told)

    def on_tokens(self, token_index: int, token_ids: Sequence[int], logprobs: Logprobs | None = None) -> None:
        """New tokens of an engine."""
        if self.state.stop_match is not None:
            return
        try:
            text, match = self.state.accept(token_index, token_ids)
        except Exception as error:  # one request's fault never ends the stream of all
            self.fail(error)
            return
        if match is not None:
            token_ids = token_ids[: match.num_tokens - token_index]
            if self._legs is not None:
                self._legs.stop_at(match.num_tokens)
        if logprobs is not None:
            self._outbox.tell(self._key, self.state.logprobs(token_index, token_ids, logprobs))
        self._outbox.add(self._key, text, token_index, token_ids)

    def on_finished(self, finished: Finished) -> None:
        """The engine's last word."""
        text, message = self.state.end(finished)
        if text:
            self._outbox.add(self._key, text, len(self.state.token_ids), ())
        self._end(message)

    def on_retry(self) -> None:
        """An engine died, and another takes over."""
        self.state.num_attempts += 1
        self._outbox.engine_died(self._key[0])

    def on_lost(self) -> None:
        """The engine died. Output that a stop string has completed is complete all the same."""
        if self.state.stop_match is not None:
            self._end(self.state.stopped())
            return
        self._outbox.engine_died(self._key[0])
        self.fail(errors.Unavailable("the engine that ran this request is gone; try again"))

    def cancel(self) -> None:
        """The gateway wants no more of it."""
        self._end(self.state.aborted())

    def fail(self, error: BaseException) -> None:
        """It ends with an error."""
        self._end(self.state.failed(error))

    def _end(self, message: RequestFinished) -> None:
        if self.ended:
            return
        self.ended = True
        if self._legs is not None:
            self._legs.close()
        self._outbox.finish(message)
        self._on_end(self, message)
