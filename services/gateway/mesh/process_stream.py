"""Connects to an output processor: its stream sends requests, and hands the frames' output to their collectors."""

import asyncio
import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Protocol

from tokenloom.request import errors, logprob_columns, packed_ids, wire_errors
from tokenloom.services.runtime.liveness import LivenessTimer
from tokenloom.services.runtime.peers.hello import JOURNAL_COPIES, PACKED_IDS, check_hello
from tokenloom.services.runtime.streams.slotted_stream import (
    MAX_WRONG_FRAMES,
    ClientStream,
    WrongFrame,
    describe,
    was_silent,
)
from tokenloom.v1 import output_processor_pb2 as pb
from tokenloom.v1 import output_processor_pb2_grpc, types_pb2
from tokenloom.v1.output_processor_pb2 import ProcessFrame

from ..records.request_ids import MARK_DIGITS, RANDOM_DIGITS
from .pending_request import Incarnation, Origin, PendingRequest, journal_bytes


class FrameRows:
    """Holds a frame's columns, which fit together.

    Attributes:
        token_ids: The tokens of all rows, one after the other.
    """

    def __init__(self, frame: ProcessFrame, vocab_size: int) -> None:
        """Raises ``WrongFrame`` when the columns do not fit together, and for tokens that the model does not have."""
        self.token_ids = list(frame.token_ids)
        self._slots, self._texts, self._token_indices = frame.slot, frame.text, frame.token_index
        self._samples = frame.sample_index or [0] * len(self._slots)
        self._counts = frame.num_tokens or [1] * len(self._slots)
        columns = (self._slots, self._samples, self._texts, self._token_indices, self._counts)
        if len(set(map(len, columns))) != 1 or sum(self._counts) != len(self.token_ids):
            raise WrongFrame("a frame's columns differ in length")
        if self.token_ids and max(self.token_ids) >= vocab_size:
            raise WrongFrame(f"token {max(self.token_ids)} is not below {vocab_size}")

    def __bool__(self) -> bool:
        return bool(self._slots)

    def __iter__(self) -> Iterator[tuple[int, int, str, int, int]]:
        """Return slot, sample, text, position of the first token in the whole output, and number of tokens."""
        return zip(self._slots, self._samples, self._texts, self._token_indices, self._counts, strict=True)


IDLE_SECONDS = 60.0
"""The stream to an output processor that this gateway does not work with any more ends so long after its last request:
a request that is sought may come back to it."""


ROWS_PER_TURN = 32
"""So many tokens are written before the event loop reads requests and the answers of other parts: each write takes 8 to
16 µs, so a frame of 256 rows takes up to 4 ms."""


class StreamNotNeeded(errors.Unavailable):
    """The stream had no request for long, and the gateway works with other output processors."""

    reason = errors.Unavailable.reason


class StreamOwner(Protocol):
    """Places requests on streams, and receives those that have to move to another one.

    Attributes:
        vocab_size: Of the model; no token of an answer is above it.
    """

    vocab_size: int

    def on_open(self) -> None:
        """Called when requests may be sent on a stream."""

    def on_unknown(self, stream: "ProcessStream", request: PendingRequest, *, is_copied: bool) -> None:
        """Called when an output processor does not have a request that is to be resumed; another one may.
        ``is_copied``: the gateway that has it lives."""

    def on_moved(self, stream: "ProcessStream", request: PendingRequest, error: errors.TokenloomError) -> None:
        """Called when the output processor does not run a request, or the rest of it; another one may."""

    def on_media_lost(self, request: PendingRequest, error: errors.TokenloomError) -> None:
        """Called when an engine did not get the rows of a request's images, because their files are lost."""

    def on_lost(self, stream: "ProcessStream", requests: list[PendingRequest]) -> None:
        """Called when a stream has ended, with the requests that were live on it. No output of it follows."""

    def on_wrong(self, stream: "ProcessStream", request: PendingRequest) -> None:
        """Called when the output processor sent an invalid message for a request; another one may continue it."""

    def on_left(self, link: "OutputLink") -> None:
        """Called when an output processor gets no requests any more that another one can run, or gets them again."""


class ProcessStream(ClientStream[pb.ProcessInput, pb.ProcessFrame, PendingRequest]):
    """Holds one incarnation of a stream; it is not reused after it has ended.

    Attributes:
        leaving: Whether the output processor drains, so that it gets no new requests.
        incarnation: The output processor's, once it has said hello.
        was_silent: Whether the stream has ended because the output processor was silent, so that it may still work.
        was_wrong: Whether it has ended because of a frame that no output processor may send.
        num_wrong: What came that no output processor may send: once it costs the request alone that it is of.
        takes_packed_ids: Whether the output processor reads packed prompts, once it has said hello.
        keeps_copies: Whether it keeps copies of requests that others run.
        has_ended: Whether the stream is gone.
    """

    def __init__(self, owner: StreamOwner, is_needed: Callable[[], bool] = lambda: True) -> None:
        """``is_needed``: returns whether the stream stays open without requests."""
        super().__init__(pb.ProcessInput)
        self._owner = owner
        self._is_needed = is_needed
        self._unused = LivenessTimer()
        self.has_ended = False
        self.leaving = self.was_silent = self.was_wrong = self.takes_packed_ids = self.keeps_copies = False
        self.num_wrong = 0
        self.incarnation: Incarnation = ("", 0)

    def submit(self, request: PendingRequest, *, again: bool = False) -> int:
        """Send a request and return its slot. ``again``: it continues what arrived from another stream, or waited."""
        assert not self.has_ended
        slot = self._take_slot(request)
        submit = request.again(slot, now=asyncio.get_running_loop().time()) if again else request.first(slot)
        if not self.takes_packed_ids and submit.prompt.packed_token_ids:
            packed_ids.unpack(submit.prompt)
        self._message_after(request.num_bytes + journal_bytes(submit.journals)).submit.append(submit)
        request.withdraw, request.runner = partial(self.cancel, slot), self
        return slot

    def seek(self, request: PendingRequest) -> int:
        """Ask for a request that the output processor may have, and return its slot."""
        assert not self.has_ended
        slot = self._take_slot(request)
        self._message_after(ends_only=True).resume.append(request.resume(slot))
        request.withdraw, request.runner = partial(self.cancel, slot), self
        return slot

    def cancel(self, slot: int) -> None:
        """End a request if it is live; no more output reaches its collector."""
        if self.slots.pop(slot, None) is not None and not self.has_ended:
            self._message().cancel_slots.append(slot)

    def withdraw(self, request_id: str, tenant: str) -> None:
        """End a request that has no slot here, if the output processor has it."""
        if not self.has_ended:
            self._message().withdraw.add(request_id=request_id, tenant=tenant)

    def moved(self, request: PendingRequest) -> None:
        """End a request that this gateway had lost here, and that another output processor runs."""
        tenant, request_id = request.key
        self._message().moved.add(request_id=request_id, tenant=tenant)

    def copies(self, num_bytes: int = 0) -> pb.JournalCopies:
        """Return the copies of the next message, with room for so much of another one."""
        return self._message_after(num_bytes).journal_copies

    @property
    def owes_copies(self) -> bool:
        """Whether what came of copied requests waits to be sent."""
        return any(message.journal_copies.outputs for message in self._outbox)

    def end(self) -> list[PendingRequest]:
        """Detach all requests and return them: the stream is gone, and its late frames reach no collector."""
        self.has_ended = True
        return self.detach()

    def _look(self) -> None:
        if self._unused.look(owes=not self.slots) >= IDLE_SECONDS and not self._is_needed():
            raise StreamNotNeeded("the stream is not needed any more")

    def receive(self, frame: pb.ProcessFrame) -> Iterator[None]:
        """Hand a frame's columns to their collectors, and grant credit for it. Yields after the first tokens of
        answers, which are at the beginning of a frame, before what follows in this frame or in the next one, and after
        every :data:`ROWS_PER_TURN`.

        Raises ``WrongFrame`` for columns that do not fit together, for tokens that the model does not have, and for
        output that a request cannot have.
        """
        # The heads of new answers are written before a whole frame is dealt: 0.3 instead of 1.2 ms pass from the
        # frame's arrival to the head, and the client does not have 63 other events to read first.
        self.leaving = self.leaving or frame.leaving
        rows = FrameRows(frame, self._owner.vocab_size)
        logprobs_of = self._deal_prompts(frame.logprobs) if frame.logprobs else {}
        for each in frame.weights:
            if (target := self.slots.get(each.slot)) is not None and each.sample_index < target.num_samples:
                # The message would keep the frame.
                origin = Origin(tuple(each.weights), each.numerics, each.mixed_numerics)
                target.origins[each.sample_index] = origin
        ending = {(finished.slot, finished.sample_index) for finished in frame.finished}
        start, has_begun = 0, False
        # An end and the tokens before it are one event, if both are handed out in one turn.
        rows_per_turn = len(rows.token_ids) + 1 if ending else ROWS_PER_TURN
        for number, (slot, sample, text, token_index, count) in enumerate(rows):
            if (has_begun and token_index) or (number and not number % rows_per_turn):
                yield
            has_begun = not token_index
            end = start + count
            if (target := self.slots.get(slot)) is not None:
                index, token_ids = target.first_index + sample, rows.token_ids[start:end]
                try:
                    if sample >= target.num_samples or token_index + count > target.max_tokens:
                        raise WrongFrame(f"sample {sample} has {token_index + count} tokens")
                    if logprobs_of or ending:
                        key = slot, sample
                        logprobs, ends = logprobs_of.get(key, ()), key in ending
                        target.collector.put(index, text, token_index, token_ids, logprobs=logprobs, ends=ends)
                    else:
                        target.collector.put(index, text, token_index, token_ids)
                except WrongFrame as wrong:
                    self._drop(slot, target, wrong)
            start = end
        if has_begun and not ending:
            yield
        self._deal_ends(frame)
        has_ends = frame.finished or frame.found_slots or frame.engine_death_slots
        if rows or has_ends or frame.logprobs or frame.pooled:  # heartbeats need no credit
            self._grant()

    def _deal_ends(self, frame: pb.ProcessFrame) -> None:
        """Hand out what follows a frame's tokens."""
        for part in frame.pooled:
            if (target := self.slots.get(part.slot)) is not None:
                try:
                    target.collector.put_pooled(target.first_index, part)
                except WrongFrame as wrong:
                    self._drop(part.slot, target, wrong)
        for slot in frame.found_slots:
            if (request := self.slots.get(slot)) is not None:
                request.found()
        for slot in frame.engine_death_slots:
            if (request := self.slots.get(slot)) is not None:
                request.engine_deaths += 1
        for finished in frame.finished:
            self._finish(finished)

    def _deal_prompts(
        self, logprobs: Iterable[pb.SlotTextLogprobs]
    ) -> dict[tuple[int, int], list[pb.SlotTextLogprobs]]:
        """Hand out the log probabilities of prompts; return those of output tokens, by slot and sample. Raises
        ``WrongFrame`` for columns that do not fit together, and for what no model says."""
        of_tokens: dict[tuple[int, int], list[pb.SlotTextLogprobs]] = {}
        for each in logprobs:
            _check_logprobs(each, self._owner.vocab_size)
            if not each.prompt:
                of_tokens.setdefault((each.slot, each.sample_index), []).append(each)
            elif (target := self.slots.get(each.slot)) is not None:
                try:
                    target.collector.put_prompt(target.first_index, each)
                    target.num_prompt_logprobs += len(each.logprobs.sampled)
                except WrongFrame as wrong:
                    self._drop(each.slot, target, wrong)
        return of_tokens

    def _finish(self, finished: pb.RequestFinished) -> None:
        if (target := self.slots.get(finished.slot)) is None:
            return
        if finished.HasField("error") and finished.error.reason == errors.TryElsewhere.reason:
            self.cancel(finished.slot)  # its other samples move with it
            self._owner.on_moved(self, target, wire_errors.from_proto(finished.error))
            return
        if finished.error.reason == errors.MediaLost.reason:
            self.cancel(finished.slot)
            self._owner.on_media_lost(target, wire_errors.from_proto(finished.error))
            return
        if finished.error.field and target.media is not None:
            target.media.name(error := wire_errors.from_proto(finished.error))
            finished.error.CopyFrom(wire_errors.to_proto(error))
        if finished.error.reason == errors.RequestLost.reason and target.is_sought:
            del self.slots[finished.slot]
            self._owner.on_unknown(self, target, is_copied=finished.is_copied)
            return
        try:
            if finished.sample_index >= target.num_samples:
                raise WrongFrame(f"sample {finished.sample_index} has ended")
            target.collector.finish(target.first_index + finished.sample_index, finished)
        except WrongFrame as wrong:
            self._drop(finished.slot, target, wrong)
            return
        target.num_live -= 1
        if not target.num_live:
            del self.slots[finished.slot]
            target.release()

    def _drop(self, slot: int, target: PendingRequest, wrong: WrongFrame) -> None:
        """Give up a request of which the output processor sent what cannot be; another one continues it. Raises
        ``wrong``, which ends the stream and so all requests on it, when it is not the first time."""
        if self.num_wrong + 1 >= MAX_WRONG_FRAMES:
            raise wrong
        self.num_wrong += 1
        log.warning("output processor %s: %s", self.incarnation[0], wrong.message)
        self.cancel(slot)
        self._owner.on_wrong(self, target)

    def _message_after(self, num_bytes: int = 0, *, ends_only: bool = False) -> pb.ProcessInput:
        """Return a message for a request that begins, or that resumes (``ends_only``).

        The parts of a message take effect in the order of its fields: requests that begin, that resume, and that end. A
        request that follows one of another kind needs a message of its own, or a cancelled request's end would be that
        of its repeat.
        """
        last = self._outbox[-1] if self._outbox else None
        has_later = last is not None and bool(last.cancel_slots or last.withdraw or (last.resume and not ends_only))
        return self._message(num_bytes, is_new=has_later)


def _check_logprobs(part: pb.SlotTextLogprobs, vocab_size: int) -> None:
    columns = part.logprobs
    texts = len(part.sampled_text), len(part.token_text)
    if not logprob_columns.fit_together(columns) or texts != (len(columns.sampled), len(columns.token_id)):
        raise WrongFrame("the log probabilities of a frame differ in length")
    if not logprob_columns.are_probable(columns, vocab_size):
        raise WrongFrame("the log probabilities of a frame are of no model")


log = logging.getLogger(__name__)

MIN_BACKOFF, MAX_BACKOFF, LEFT_BACKOFF = 0.1, 0.2, 1.0
"""Seconds between two attempts to connect: a restarted output processor is used at once. The last one: to one that has
sent wrong frames."""


UNKNOWN_MARK = "0" * MARK_DIGITS
"""Of a request that no output processor was connected for."""


def mark_in(request_id: str) -> str:
    """Return the mark in an id; empty for one of several prompts, which are spread."""
    return request_id[RANDOM_DIGITS:] if len(request_id) == RANDOM_DIGITS + MARK_DIGITS else ""


class OutputLink:
    """Connects to one output processor, again and again.

    Attributes:
        stream: The live stream, once both sides have said hello; otherwise None.
        mark: What stands for the output processor in ids of requests, once it has said hello: a digest of its name. By
            it any gateway finds a request; nothing else can be read from an id.
        changed_at: When it was lost, or returned, last; -inf once it was connected and never lost. Before that, when
            this gateway has begun to connect: what another gateway has begun may be there.
        is_left: Whether its present incarnation has sent :data:`MAX_WRONG_FRAMES` wrong frames, so that it gets no
            requests that another one can run.
        stub: Calls it, while ``stream`` is live.
    """

    stub: "output_processor_pb2_grpc.OutputProcessorAsyncStub"

    def __init__(
        self,
        address: str,
        ours: types_pb2.Hello,
        owner: StreamOwner,
        is_needed: Callable[[], bool] = lambda: True,
    ) -> None:
        """Args:
        ours: What this gateway says hello with.
        owner: Learns what happens to the streams.
        is_needed: Returns whether a stream stays open without requests.
        """
        self.address = address
        self.mark = UNKNOWN_MARK
        self.changed_at = asyncio.get_running_loop().time()
        self._was_lost = False
        self._owner = owner
        self.stream: ProcessStream | None = None
        self._ours = ours
        self._is_needed = is_needed
        self._backoff = MIN_BACKOFF
        self.is_left = False
        self._wrong: list[Incarnation] = []  # of the last wrong frames; bounded by MAX_WRONG_FRAMES

    def rank(self, request_id: str) -> tuple[bool, bytes]:
        """Return a key that sorts output processors for a request: the one that its id names, then all others in an
        order that every gateway computes alike (rendezvous hashing)."""
        digest = hashlib.blake2s(f"{request_id} {self.mark}".encode(), digest_size=8).digest()
        return self.mark != mark_in(request_id), digest

    async def connect(self, stub: "output_processor_pb2_grpc.OutputProcessorAsyncStub") -> None:
        """Keep one incarnation of the stream to its end, then back off."""
        stream = ProcessStream(self._owner, self._is_needed)
        self.stub = stub
        try:
            message = pb.ProcessInput(hello=self._ours)
            error = await stream.serve(stub.Process(), message, lambda frame: self._greet(stream, frame))
            was_used = self.stream is stream
            level = logging.WARNING if was_used and not isinstance(error, StreamNotNeeded) else logging.DEBUG
            log.log(level, "output processor %s: %s", self.address, describe(error))
            stream.was_silent = was_silent(error)
            stream.was_wrong = isinstance(error, WrongFrame)
            stream.num_wrong += stream.was_wrong
            if stream.num_wrong:
                self._note_wrong(stream)
        finally:
            if was_used := self.stream is stream:
                self.stream, self._was_lost = None, True
                self.changed_at = asyncio.get_running_loop().time()
            # Detached before they are placed again: a late frame of the old stream must not reach a collector that
            # already gets the output from the new one.
            self._owner.on_lost(stream, stream.end())
        # One that sends wrong frames gets requests only if there is no other, which may be starting again: a request
        # ends after few such streams, and must not have them all within a tenth of a second.
        self._backoff = MIN_BACKOFF if was_used else min(self._backoff * 2, MAX_BACKOFF)
        await asyncio.sleep(LEFT_BACKOFF if self.is_left else self._backoff)

    def _note_wrong(self, stream: ProcessStream) -> None:
        before = [each for each in self._wrong if each == stream.incarnation]
        self._wrong = [*before, *[stream.incarnation] * stream.num_wrong][-MAX_WRONG_FRAMES:]
        if len(self._wrong) == MAX_WRONG_FRAMES and not self.is_left:
            self._set_left(True)

    def _set_left(self, is_left: bool) -> None:
        self.is_left = is_left
        self._owner.on_left(self)

    def _greet(self, stream: ProcessStream, frame: pb.ProcessFrame) -> None:
        """Begin to use a stream whose output processor has said hello. Raises ``FailedPrecondition``."""
        # After the hello only: until then an output processor of another model may be at this address.
        check_hello(frame.hello, fingerprint=self._ours.fingerprint)
        self.mark = hashlib.blake2s(frame.hello.peer_id.encode(), digest_size=MARK_DIGITS // 2).hexdigest()
        stream.leaving, stream.incarnation = frame.leaving, (self.address, frame.hello.epoch)
        stream.takes_packed_ids = PACKED_IDS in frame.hello.features
        stream.keeps_copies = JOURNAL_COPIES in frame.hello.features
        if self.is_left and stream.incarnation not in self._wrong:
            self._wrong.clear()  # it was restarted
            self._set_left(False)
        self.stream = stream
        self.changed_at = asyncio.get_running_loop().time() if self._was_lost else -math.inf
        log.info("connected to output processor %s", self.address)
        self._owner.on_open()
