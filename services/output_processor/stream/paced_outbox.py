"""Output that its client wants in larger pieces (``stream_interval``)."""

from collections.abc import Sequence

from tokenloom.v1.output_processor_pb2 import RequestFinished, SlotTextLogprobs

from .outbox import Key, Outbox


class PacedOutbox:
    """The outbox of one sample: passes on its first token, then every ``interval`` tokens, and the rest at its end."""

    def __init__(self, outbox: Outbox, interval: int) -> None:
        self._outbox = outbox
        self._interval = interval
        self._due = 1  # output tokens that make the next piece
        self._held: list[tuple[Key, str, int, Sequence[int]]] = []  # bounded by the interval and the output itself
        self._told: list[tuple[Key, SlotTextLogprobs]] = []

    def add(self, key: Key, text: str, token_index: int, token_ids: Sequence[int]) -> None:
        """As of an outbox."""
        self._held.append((key, text, token_index, token_ids))
        num_tokens = token_index + len(token_ids)
        if num_tokens >= self._due:
            self._due = num_tokens + self._interval
            self._pass_on()

    def tell(self, key: Key, logprobs: SlotTextLogprobs) -> None:
        """As of an outbox."""
        self._told.append((key, logprobs))

    def finish(self, finished: RequestFinished) -> None:
        """As of an outbox."""
        self._pass_on()
        self._outbox.finish(finished)

    def engine_died(self, slot: int) -> None:
        """As of an outbox."""
        self._outbox.engine_died(slot)

    def _pass_on(self) -> None:
        held, self._held = self._held, []
        told, self._told = self._told, []
        for row in held:
            self._outbox.add(*row)
        for key, logprobs in told:
            self._outbox.tell(key, logprobs)
