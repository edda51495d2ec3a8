"""Collects output for one gateway between two frames: columns, with the deltas of a slot merged. No I/O."""

from collections import deque
from collections.abc import Callable, Sequence

from tokenloom.v1.output_processor_pb2 import ProcessFrame, RequestFinished, SampleWeights, SlotTextLogprobs
from tokenloom.v1.types_pb2 import Pooled

POOLED_BYTES = 4 << 20
"""Results that share a frame, at most; a part of a result that is larger has a frame of its own."""

Key = tuple[int, int]
"""A slot, and the index of one of its samples."""


class Outbox:
    """Collects output until ``take``. It holds at most what the live requests produce while the gateway grants no
    credit, which the session allows for five seconds.
    """

    def __init__(self, on_output: Callable[[], None]) -> None:
        """``on_output``: called when output was added; for text and tokens only once until they are taken."""
        self._on_output = on_output
        self._rows: dict[Key, tuple[str, int, Sequence[int]]] = {}
        self._logprobs: list[SlotTextLogprobs] = []
        self._pooled: deque[Pooled] = deque()
        self._finished: list[RequestFinished] = []
        self._engine_deaths: list[int] = []
        self._weights: list[SampleWeights] = []
        self._found: list[int] = []

    def __bool__(self) -> bool:
        is_filled = self._rows or self._finished or self._engine_deaths or self._logprobs or self._pooled or self._found
        return bool(is_filled)

    def add(self, key: Key, text: str, token_index: int, token_ids: Sequence[int]) -> None:
        """Add new text and tokens of a sample; they follow what was added before."""
        rows = self._rows
        # The writer is woken for the first row only: what an engine's frame brings after it is in the same frame of
        # ours.
        if not rows:
            self._on_output()
        elif (row := rows.get(key)) is not None:
            # Rows of one output merge while the gateway grants no credit, so the memory is bounded by the outputs
            # themselves.
            text, token_index, token_ids = row[0] + text, row[1], [*row[2], *token_ids]
        rows[key] = (text, token_index, token_ids)

    def add_weights(self, key: Key, weights: Sequence[bytes], numerics: str, *, is_mixed: bool) -> None:
        """Say which weights have computed a sample so far and compute its next tokens, and with which numerics: in the
        frame of these. ``is_mixed``: several numerics have computed it."""
        slot, sample_index = key
        self._weights.append(
            SampleWeights(
                slot=slot, sample_index=sample_index, weights=weights, numerics=numerics, mixed_numerics=is_mixed
            )
        )

    def add_logprobs(self, key: Key, logprobs: SlotTextLogprobs) -> None:
        """Add log probabilities of a sample's newest tokens, or of its prompt."""
        logprobs.slot, logprobs.sample_index = key
        self._logprobs.append(logprobs)
        self._on_output()

    def add_pooled(self, part: Pooled) -> None:
        """Add the result of a pooling request, or the next part of it."""
        self._pooled.append(part)
        self._on_output()

    def finish(self, finished: RequestFinished) -> None:
        """Add the end of a sample; nothing may be added for it after that."""
        self._finished.append(finished)
        self._on_output()

    def engine_died(self, slot: int) -> None:
        """Report that the engine of this slot died while it ran nothing else."""
        self._engine_deaths.append(slot)
        self._on_output()

    def found(self, slot: int) -> None:
        """Report that a request was found to be resumed, of which there is no token yet."""
        self._found.append(slot)
        self._on_output()

    def take(self) -> ProcessFrame:
        """Return what was collected as one frame; results that would make it too large are left for the next one."""
        rows = self._rows
        slots, samples = zip(*rows, strict=True) if rows else ((), ())
        texts, indices, ids = zip(*rows.values(), strict=True) if rows else ((), (), ())
        counts = [len(column) for column in ids]
        frame = ProcessFrame(
            slot=slots,
            text=texts,
            token_index=indices,
            num_tokens=() if counts.count(1) == len(counts) else counts,
            token_ids=[token_id for column in ids for token_id in column],
            finished=self._finished,
            logprobs=self._logprobs,
            engine_death_slots=self._engine_deaths,
            sample_index=samples if any(samples) else (),
            weights=self._weights,
        )
        self._rows, self._logprobs, self._finished, self._engine_deaths, self._weights = {}, [], [], [], []
        if self._pooled:
            self._take_pooled(frame)
        if self._found:
            frame.found_slots.extend(self._found)
            self._found = []
        return frame

    def _take_pooled(self, frame: ProcessFrame) -> None:
        """Move results into the frame, and the ends of requests whose results do not fit out of it."""
        size = 0
        while self._pooled and (not size or size + len(self._pooled[0].data) <= POOLED_BYTES):
            size += len(self._pooled[0].data)
            frame.pooled.append(self._pooled.popleft())
        if left := {part.slot for part in self._pooled}:
            ends = list(frame.finished)
            # An end must not overtake the rest of its result: the gateway drops a slot at its end.
            self._finished = [end for end in ends if end.slot in left]
            del frame.finished[:]
            frame.finished.extend(end for end in ends if end.slot not in left)


class _Nowhere(Outbox):
    """Drops output whose gateway was lost; the samples keep it."""

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def add(self, key: Key, text: str, token_index: int, token_ids: Sequence[int]) -> None:
        """Drop it."""

    def add_weights(self, key: Key, weights: Sequence[bytes], numerics: str, *, is_mixed: bool) -> None:
        """Drop them."""

    def add_logprobs(self, key: Key, logprobs: SlotTextLogprobs) -> None:
        """Drop them."""

    def finish(self, finished: RequestFinished) -> None:
        """Drop it."""

    def engine_died(self, slot: int) -> None:
        """Drop it."""


NOWHERE = _Nowhere()


class PacedOutbox:
    """Holds back the output of one sample whose client wants larger pieces (``stream_interval``): passes on its first
    token, then every ``interval`` tokens, and the rest at its end."""

    def __init__(self, outbox: Outbox, interval: int, num_given: int = 0) -> None:
        """``num_given``: tokens that the client has already."""
        self._outbox = outbox
        self._interval = interval
        self._due = num_given + interval if num_given else 1  # output tokens that make the next piece
        self._rows: list[tuple[Key, str, int, Sequence[int]]] = []  # bounded by the interval and the output itself
        self._logprobs: list[tuple[Key, SlotTextLogprobs]] = []

    def add(self, key: Key, text: str, token_index: int, token_ids: Sequence[int]) -> None:
        """Add as to an outbox."""
        self._rows.append((key, text, token_index, token_ids))
        num_tokens = token_index + len(token_ids)
        if num_tokens >= self._due:
            self._due = num_tokens + self._interval
            self._pass_on()

    def add_logprobs(self, key: Key, logprobs: SlotTextLogprobs) -> None:
        """Add as to an outbox."""
        self._logprobs.append((key, logprobs))

    def finish(self, finished: RequestFinished) -> None:
        """Pass on all that was held back, and the end."""
        self._pass_on()
        self._outbox.finish(finished)

    def _pass_on(self) -> None:
        for row in self._rows:
            self._outbox.add(*row)
        for key, logprobs in self._logprobs:
            self._outbox.add_logprobs(key, logprobs)
        self._rows, self._logprobs = [], []
