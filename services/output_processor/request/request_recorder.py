"""Records the requests that have ended, for `tokenloom replay` and `--verify`. Nothing waits for the disk but the
records."""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeVar

from google.protobuf.json_format import MessageToDict

from tokenloom.process.fall_backs import FallBacks
from tokenloom.request import logprob_columns
from tokenloom.request.errors import InvalidArgument
from tokenloom.request.limits import AdmissionLimit
from tokenloom.request.packed_ids import ids_of
from tokenloom.request.request_records import (
    VERSION,
    RecordedLeg,
    RecordedLogprobs,
    RecordedOutput,
    RecordedRequest,
    RecordFiles,
    floats,
    sealed,
)
from tokenloom.v1.output_processor_pb2 import RequestFinished, SlotTextLogprobs, Submit
from tokenloom.v1.types_pb2 import FinishReason, Logprobs

from ..text.vocabulary import Vocabulary
from .sample_output import SampleOutput
from .telemetry import Leg, OutputTrail

log = logging.getLogger(__name__)

MOST_WAITING_BYTES: Final = 64 << 20
"""Memory of requests that have ended and wait for the disk; what is beyond it is not recorded."""
MOST_LOGPROB_BYTES: Final = 64 << 20
"""Memory of the log probabilities of requests that run; of a sample beyond it they are not recorded."""
CALM_SECONDS = 10.0
"""How long nothing must have been dropped before the fall-back ends: a disk that takes every second record is one."""
EXPIRY_SECONDS: Final = 3600.0
"""How often files that are too old are looked for while no file begins."""
_REQUEST_BYTES = 4096
"""Memory of the objects of a request that has ended, besides its outputs."""
_LAST_SECONDS = 5.0
"""How long the records that wait have at the end of this process."""
_FALL_BACK = "unrecorded"

Group = TypeVar("Group")


class RecordOrigin(NamedTuple):
    """What all records of an output processor have in common.

    Attributes:
        model: The name under which it is served.
        path: The model as this process was given it.
        tokenizer: The fingerprint of its files.
        release: The version of this package.
    """

    model: str
    path: str
    tokenizer: bytes
    release: str


class EndedRequest(NamedTuple):
    """What is kept of a request until it is written. Nothing of it changes any more."""

    submit: Submit
    outputs: Sequence[SampleOutput]
    began_ms: int
    ended_ms: int
    num_bytes: int


class _Written(NamedTuple):
    """What has become of records.

    Attributes:
        refusal: Why the disk refused one; empty: it refused none.
        sampled: Those that are to be computed again.
    """

    refusal: str
    sampled: list[RecordedRequest]


class RecordSamples(Protocol):
    """Uses the records of a share of the requests."""

    def wants(self, request_id: str) -> bool:
        """Return whether a request is one of them. Thread-safe."""

    def offer(self, record: RecordedRequest) -> None:
        """Take a record."""


class RequestRecorder:
    """Takes the requests that end, in the event loop, and writes their records in a thread of its own.

    Attributes:
        samples: Gets the records of a share of the requests; None: nothing does.
    """

    def __init__(
        self,
        files: RecordFiles | None,
        origin: RecordOrigin,
        vocabulary: Vocabulary | None,
        *,
        count: Callable[[bool], object],
        fall_backs: FallBacks,
        now: Callable[[], int],
    ) -> None:
        """Args:
        files: None: no record is kept.
        vocabulary: Makes the texts of prompts; None: records hold no texts.
        count: Called for each request that ends, with whether it is recorded.
        fall_backs: Show that requests are not recorded.
        now: Returns milliseconds since 1970.
        """
        self.samples: RecordSamples | None = None
        self._files = files
        self._origin = origin
        self._vocabulary = vocabulary
        self._count = count
        self._fall_backs = fall_backs
        self._now = now
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="records")
        self._room = AdmissionLimit(MOST_LOGPROB_BYTES)
        self._waiting: list[EndedRequest] = []
        self._num_bytes = 0  # of those that wait or are being written
        self._writing: asyncio.Future[_Written] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._dropped_at = 0.0  # the last time, by the event loop
        self._logged: set[str] = set()  # why records were dropped, each reason once

    async def open(self, folder: Path) -> None:
        """Make the files' folder. Raises ``InvalidArgument`` if it cannot be used."""
        assert self._files is not None, "without files there is no folder"
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._files.open)
        except OSError as error:
            self._thread.shutdown()
            raise InvalidArgument(
                f"--request-record-dir: {folder} cannot be used: {error.strerror}; name a folder that this user can "
                "write",
                "request_record_dir",
            ) from None
        self._expire_later()

    def takes(self, submit: Submit) -> bool:
        """Return whether a request that begins is to be recorded, or computed again."""
        return self._files is not None or (self.samples is not None and self.samples.wants(submit.request_id))

    def trail(self) -> OutputTrail:
        """Return what a sample that begins leaves for its record."""
        return OutputTrail(self._room)

    def follow(
        self, submit: Submit, outputs: Sequence[SampleOutput], then: Callable[[Group], object]
    ) -> Callable[[Group], object]:
        """Return what is to be called when a request has ended: it is recorded, after what ``then`` does."""
        began_ms = self._now()

        def over(group: Group) -> None:
            then(group)
            self.add(submit, outputs, began_ms)

        return over

    def add(self, submit: Submit, outputs: Sequence[SampleOutput], began_ms: int) -> None:
        """Take a request whose outputs have ended. One that finds too many before it is not recorded."""
        num_bytes = _REQUEST_BYTES + submit.ByteSize() + sum(output.num_kept_bytes for output in outputs)
        if self._is_closed or self._num_bytes + num_bytes > MOST_WAITING_BYTES:
            self._drop(outputs)
            return
        self._num_bytes += num_bytes
        self._waiting.append(EndedRequest(submit, outputs, began_ms, self._now(), num_bytes))
        if self._writing is None:
            self._write_waiting()

    async def close(self) -> None:
        """Write what waits, for a few seconds at most, and close the files. To be called once."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        until = loop.time() + _LAST_SECONDS
        while self._writing is not None and loop.time() < until:
            await asyncio.wait([self._writing], timeout=until - loop.time())  # then the next writing has begun
        for each in self._waiting:
            self._drop(each.outputs)
        self._waiting.clear()
        if self._writing is None and self._files is not None:
            try:
                await loop.run_in_executor(self._thread, self._files.close)
            except OSError as error:  # of lines that were counted as written: a server took them, and not its disk
                log.warning("the last records may be lost: %s", error.strerror or error)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _drop(self, outputs: Iterable[SampleOutput]) -> None:
        """Record nothing of a request, for which there is no room or no time."""
        _close(outputs)
        if self._files is None:
            return
        self._count(False)
        if not self._is_closed:
            self._fall_back("the disk is slower than the requests")

    def _fall_back(self, reason: str) -> None:
        self._dropped_at = asyncio.get_running_loop().time()
        self._fall_backs.begin(_FALL_BACK, reason)

    def _write_waiting(self) -> None:
        ended, self._waiting = self._waiting, []
        self._writing = asyncio.get_running_loop().run_in_executor(self._thread, self._write, ended)
        self._writing.add_done_callback(lambda done: self._written(ended, done))

    def _written(self, ended: Sequence[EndedRequest], done: "asyncio.Future[_Written]") -> None:
        self._writing = None
        for each in ended:
            self._num_bytes -= each.num_bytes
            _close(each.outputs)
        if done.cancelled():  # the loop ends
            return
        written = done.result()
        if self.samples is not None:
            for record in written.sampled:
                self.samples.offer(record)
        if written.refusal:
            self._fall_back(written.refusal)
        elif asyncio.get_running_loop().time() - self._dropped_at >= CALM_SECONDS:
            self._fall_backs.end(_FALL_BACK)
        if self._waiting:
            self._write_waiting()

    def _write(self, ended: Iterable[EndedRequest]) -> _Written:
        """Write the records of requests, in the thread."""
        refusal, sampled = "", list[RecordedRequest]()
        for each in ended:
            is_written = False
            try:
                record = record_of(each, self._origin, self._vocabulary)
                if self.samples is not None and self.samples.wants(record.id):
                    sampled.append(record)
                is_written = self._files is not None and self._write_one(self._files, record)
            except OSError as error:
                refusal = f"{error.strerror or error}"
            except Exception as error:  # a fault of one record never ends those of others
                self._log_once("fault", "a request cannot be recorded, and others like it are not: %r", error)
            if self._files is not None:
                self._count(is_written)
        return _Written(refusal, sampled)

    def _write_one(self, files: RecordFiles, record: RecordedRequest) -> bool:
        """Write a record, unless it is too large. Raises ``OSError``."""
        line = sealed(record)
        if len(line) <= files.largest_record:
            files.write(line)
            return True
        text = "a record of %d bytes is not written, nor are others of more than %d, half of --request-record-bytes"
        self._log_once("large", text, len(line), files.largest_record)
        return False

    def _log_once(self, reason: str, message: str, *values: object) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            log.warning(message, *values, exc_info=reason == "fault")

    def _expire_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(EXPIRY_SECONDS, self._expire)

    def _expire(self) -> None:
        if self._files is not None:
            self._thread.submit(self._files.expire)
        self._expire_later()


def _close(outputs: Iterable[SampleOutput]) -> None:
    for output in outputs:
        if output.trail is not None:
            output.trail.close()


def place_of(model: str) -> str:
    """Return what names a model wherever a command is run: a path from the root on, or a hub id as it is."""
    return os.path.abspath(model) if os.path.exists(model) else model


def record_of(ended: EndedRequest, origin: RecordOrigin, vocabulary: Vocabulary | None) -> RecordedRequest:
    """Return the record of a request. ``vocabulary``: None: it holds no texts."""
    submit = ended.submit
    prompt = submit.prompt
    token_ids = list(prompt.token_ids or ids_of(prompt))
    text = None
    if vocabulary is not None:
        text = b"".join(map(vocabulary.token_bytes, token_ids)).decode(errors="replace")
    left_out = ["prompt embeddings"] if prompt.embeds else []
    if prompt.media:
        left_out.append("images and sounds")
    return RecordedRequest(
        version=VERSION,
        id=submit.request_id,
        tenant=submit.tenant,
        model=origin.model,
        path=origin.path,
        tokenizer=origin.tokenizer.hex(),
        release=origin.release,
        began_ms=ended.began_ms,
        ended_ms=ended.ended_ms,
        prompt=token_ids,
        prompt_text=text,
        reasoning_start=prompt.reasoning_start,
        adapter=prompt.adapter.hex(),
        sampling_params=MessageToDict(submit.sampling_params, preserving_proto_field_name=True),
        text_options=MessageToDict(submit.text, preserving_proto_field_name=True),
        is_half=submit.HasField("kv_transfer"),
        left_out=left_out,
        outputs=[_output_of(output, has_text=vocabulary is not None) for output in ended.outputs],
    )


def _output_of(output: SampleOutput, *, has_text: bool) -> RecordedOutput:
    finished, trail = output.finished, output.trail
    assert finished is not None, "only outputs that have ended are recorded"
    assert trail is not None, "each sample of a recorder leaves a trail"
    kept = trail.logprobs or []
    return RecordedOutput(
        index=output.sample_index,
        token_ids=list(output.token_ids),
        finish_reason=_reason_name(finished.reason),
        stop_reason=finished.stop_reason,
        error=finished.error.reason,
        text=output.text_so_far() if has_text else None,
        logprobs=_columns([each for each in kept if not each.prompt]),
        prompt_logprobs=_columns([each for each in kept if each.prompt]),
        weights=[each.hex() for each in output.weights],
        numerics=output.numerics,
        is_mixed=finished.timeline.mixed_numerics,
        num_given=output.num_given,
        lacks_logprobs=trail.logprobs is None,
        legs=list(map(_leg_of, trail.legs)),
        cached_tokens=finished.cached_tokens,
        timeline=_timeline_of(finished),
    )


def _reason_name(reason: FinishReason) -> str:
    known = reason in FinishReason.values()  # an engine of a newer release may know more
    return FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower() if known else str(reason)


def _leg_of(leg: Leg) -> RecordedLeg:
    serves, engine = leg.serves, leg.engine
    return RecordedLeg(
        engine=engine.engine_id,
        epoch=engine.epoch,
        num_threads=engine.num_threads,
        draws_by_drafts=engine.draws_by_drafts,
        kind=leg.kind,
        start=leg.start,
        weights=serves.weights.hex(),
        numerics=serves.numerics,
        kv_layout=serves.kv_layout,
        preempted_at=list(leg.preempted_at),
    )


def _timeline_of(finished: RequestFinished) -> dict[str, int | str | bool]:
    return {field.name: value for field, value in finished.timeline.ListFields() if field.message_type is None}


def _columns(parts: Iterable[SlotTextLogprobs]) -> list[RecordedLogprobs]:
    """Return log probabilities in as few columns as they fill: each part follows the one before, as a rule."""
    joined: list[tuple[int, Logprobs]] = []
    for part in parts:
        if joined and part.token_index == joined[-1][0] + logprob_columns.num_positions(joined[-1][1]):
            logprob_columns.extend(joined[-1][1], part.logprobs)
        else:
            own = Logprobs()
            own.CopyFrom(part.logprobs)
            joined.append((part.token_index, own))
    return [
        RecordedLogprobs(
            start=start,
            sampled=floats(each.sampled),
            ranks=list(each.rank),
            top=each.top,
            token_ids=list(each.token_id),
            logprobs=floats(each.logprob),
        )
        for start, each in joined
    ]
