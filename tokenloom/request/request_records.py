"""The records of finished requests, from which `tokenloom replay` computes them again: their form and their files.

A file holds the records of one output processor and one day (UTC), a line each: the SHA-256 of the record in
hexadecimal, a blank, and the record as JSON.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

VERSION: Final = 1
"""Of the form. A reader refuses records of a newer one by name."""
LARGEST_FILE: Final = 64 << 20
"""Bytes after which a file is followed by the next one of the day."""
_FILES_IN_BOUND = 8
"""A file takes at most this part of the bound, which is kept by removing whole files."""
_NAME = re.compile(r"requests-(\d{4}-\d{2}-\d{2})-\d+-[0-9a-f]+-\d+\.jsonl")
_DIGEST_CHARS = 64


class RecordedLogprobs(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Log probabilities of consecutive tokens, in columns as ``Logprobs`` of the protos has them."""

    start: int = 0
    """Position of the first of these tokens, in the output or in the prompt."""
    sampled: bytes
    """[n] float32, little-endian: of the tokens themselves."""
    ranks: list[int]
    """[n]"""
    top: int = 0
    """Alternatives of each token: k."""
    token_ids: list[int] = []
    """[n * k]"""
    logprobs: bytes = b""
    """[n * k] float32, little-endian."""


class RecordedLeg(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one engine was given to compute of an output."""

    engine: str
    epoch: int = 0
    """Its incarnation; 0: not recorded, as the next two by older releases."""
    num_threads: int = 0
    """Threads of each of its workers on a CPU; 0: it computed elsewhere, or is of an older release."""
    draws_by_drafts: bool = False
    """Whether its drafts change what is drawn for requests that are not greedy."""
    kind: str
    """``whole``; or ``prefill`` and ``decode`` where two engines share the request."""
    start: int = 0
    """Output tokens that the request had when the engine got it."""
    weights: str = ""
    """Fingerprint of the engine's weights, in hexadecimal; empty: it has none."""
    numerics: str = ""
    kv_layout: str = ""
    preempted_at: list[int] = []
    """Output tokens that there were at each preemption; known where the engine ended the leg."""


class RecordedOutput(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sample of a request."""

    index: int
    token_ids: list[int]
    finish_reason: str
    """As ``FinishReason`` of the protos, for example ``stop``."""
    stop_reason: str = ""
    """The stop string, or the decimal id of the stop token; empty for the model's own end."""
    error: str = ""
    text: str | None = None
    """None: texts are not recorded."""
    logprobs: list[RecordedLogprobs] = []
    prompt_logprobs: list[RecordedLogprobs] = []
    lacks_logprobs: bool = False
    """Whether there was no room for those that it asked for."""
    weights: list[str] = []
    """Fingerprints of the weights that computed it, in order; several after a change that let requests go on."""
    numerics: str = ""
    """Of the engine that computed its last tokens."""
    is_mixed: bool = False
    """Whether engines of different numerics computed it."""
    num_given: int = 0
    """Tokens that another output processor, which was lost, had sent before this one went on."""
    legs: list[RecordedLeg] = []
    """In order. A leg after the first, other than a decode leg, begins after the loss of the one before."""
    cached_tokens: int = 0
    timeline: dict[str, int | str | bool] = {}
    """The fields of ``Timeline`` that are not zero, without drafts."""


class RecordedRequest(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request that has ended, with everything that decides its tokens."""

    version: int
    id: str
    tenant: str = ""
    model: str
    """The name under which it was served."""
    path: str
    """The model as the output processor was given it: a directory, a file or a hub id."""
    tokenizer: str
    """Fingerprint of the tokenizer's files, in hexadecimal."""
    release: str
    began_ms: int
    """Milliseconds since 1970, as the next one."""
    ended_ms: int
    prompt: list[int]
    prompt_text: str | None = None
    reasoning_start: int = 0
    adapter: str = ""
    """SHA-256 of the adapter, in hexadecimal."""
    sampling_params: dict[str, Any]
    """``SamplingParams`` of the protos as JSON, by the protos' names; with the seed of the first sample."""
    text_options: dict[str, Any] = {}
    """``TextOptions`` of the protos as JSON."""
    is_half: bool = False
    """Whether only one half was asked for, prefill or decode."""
    left_out: list[str] = []
    """What else decides its tokens and is not recorded, for example images."""
    outputs: list[RecordedOutput]

    @property
    def num_threads(self) -> int:
        """Threads with which each worker computed; 0: they are not recorded, or its engines had different ones."""
        found = {leg.num_threads for output in self.outputs for leg in output.legs}
        return found.pop() if len(found) == 1 else 0


TOKENWISE: Final = "tokenwise"
"""The part of the numerics of batch-invariant engines."""
_INPUT_ROUNDINGS = frozenset({"by-row", "by-group", "no-kernels"})
_ROUNDED_KV = ("int8", "fp8")


def repeats_exactly(numerics: str, kv_layout: str) -> bool:
    """Return whether engines that compute so compute the same tokens again whatever runs beside a request: in float32,
    and batch-invariant in every dtype. Rounded inputs or keys make of the last bits of sums another token now and
    then."""
    parts = numerics.split("/")
    if parts[0] == "hash" or TOKENWISE in parts:
        return True
    is_rounded = not _INPUT_ROUNDINGS.isdisjoint(parts) or any(name in kv_layout for name in _ROUNDED_KV)
    return "float32" in parts and not is_rounded


class DamagedLine(NamedTuple):
    """A line of a file that is no record."""

    place: str
    """File and number of the line."""
    reason: str
    line: bytes


class _Head(Struct):
    version: int = 0


_encoder = msgspec.json.Encoder()
_head_decoder = msgspec.json.Decoder(_Head)
_decoder = msgspec.json.Decoder(RecordedRequest)


def floats(values: Iterable[float]) -> bytes:
    """Return numbers as little-endian float32, the form in which records hold them."""
    return np.fromiter(values, "<f4").tobytes()


def from_floats(data: bytes) -> list[float]:
    """Return the numbers of :func:`floats`. Raises ``ValueError`` for bytes that are no whole numbers."""
    numbers: list[float] = np.frombuffer(data, "<f4").tolist()
    return numbers


def sealed(record: RecordedRequest) -> bytes:
    """Return the line of a record."""
    body = _encoder.encode(record)
    return b"%s %s\n" % (hashlib.sha256(body).hexdigest().encode(), body)


def unsealed(line: bytes) -> RecordedRequest:
    """Return the record of a line. Raises ``ValueError`` that says what is wrong: a line that was changed, that is not
    complete, or that a newer release wrote."""
    if not line.endswith(b"\n"):
        raise ValueError("is not complete: its output processor ended while it wrote")
    digest, _, body = line.rstrip(b"\n").partition(b" ")
    if len(digest) != _DIGEST_CHARS or hashlib.sha256(body).hexdigest().encode() != digest:
        raise ValueError("was changed after it was written: it does not have its checksum")
    try:
        version = _head_decoder.decode(body).version
        if version != VERSION:
            raise ValueError(f"has the form {version}, and this release reads {VERSION}")
        return _decoder.decode(body)
    except msgspec.DecodeError as error:
        raise ValueError(f"is no record of this release: {error}") from None


def read_records(folder: Path, request_id: str = "") -> Iterator[RecordedRequest | DamagedLine]:
    """Yield the records of a folder, the newest file first, and the lines that are none. Raises ``OSError``.

    ``request_id``: only lines that name this request, or one of its prompts, which have its id and a number; empty:
    all.
    """
    wanted = request_id.encode()
    of_prompt = re.compile(re.escape(request_id) + r"(?:-\d+)?")
    for path, _ in sorted(_dated(folder), reverse=True):
        try:
            file = path.open("rb")
        except FileNotFoundError:  # it has expired meanwhile
            continue
        with file:
            for number, line in enumerate(file, 1):
                if wanted not in line:
                    continue
                try:
                    record = unsealed(line)
                except ValueError as error:
                    yield DamagedLine(f"{path.name}:{number}", str(error), line)
                    continue
                if not wanted or of_prompt.fullmatch(record.id):
                    yield record


class RecordFiles:
    """Writes the records of one process into files of a folder that several processes share. Readable by this user
    alone. For one thread at a time."""

    def __init__(self, folder: Path, *, max_bytes: int, days: int, now: Callable[[], int], epoch: int) -> None:
        """Args:
        max_bytes: Of all files of the folder; the oldest are removed.
        days: After which a file is removed.
        now: Returns milliseconds since 1970.
        epoch: Of this process, which no other one of the folder has.
        """
        self._folder = folder
        self._max_bytes = max_bytes
        self._file_bytes = min(LARGEST_FILE, max_bytes // _FILES_IN_BOUND)
        self._days = days
        self._now = now
        self._epoch = epoch
        self._number = 0
        self._file = -1  # descriptor of the present file; -1: there is none
        self._path = folder  # of the present file, once there is one
        self._day = date.min
        self._size = 0  # of the present file

    @property
    def largest_record(self) -> int:
        """Bytes of the longest line that fits."""
        return self._max_bytes // 2

    def open(self) -> None:
        """Make the folder, show that files can be begun there, and remove what has expired. Raises ``OSError``."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._begin(_day_of(self._now()))
        # The first record begins another one: a process that dies again and again at its start leaves no files.
        self.close()
        self.expire(self._file_bytes)

    def write(self, line: bytes) -> None:
        """Append a line. Raises ``OSError``; nothing of the line is left then."""
        day = _day_of(self._now())
        is_full = self._size + len(line) > self._file_bytes
        if self._file < 0 or day != self._day or (is_full and self._size) or self._is_removed():
            self._begin(day)
            is_full = True
        if is_full:
            self.expire(max(len(line), self._file_bytes))
        try:
            _write_all(self._file, line)
        except OSError:
            try:
                os.ftruncate(self._file, self._size)
            except OSError:  # the half line is the last one of its file
                with contextlib.suppress(OSError):
                    self.close()
            raise
        self._size += len(line)

    def expire(self, room: int = 0) -> None:
        """Remove the files that are too old and, if all are larger than the bound less ``room``, the oldest of the
        others. A file that cannot be removed stays, and so do all of a folder that cannot be listed."""
        oldest_day = _day_of(self._now()) - timedelta(days=self._days)
        left = list[tuple[Path, int]]()
        with contextlib.suppress(OSError):
            for path, day in sorted(_dated(self._folder)):
                with contextlib.suppress(OSError):  # another process has removed it
                    if day < oldest_day:
                        path.unlink()
                    else:
                        left.append((path, path.stat().st_size))
        total = sum(size for _, size in left)
        for path, size in left:
            if total > self._max_bytes - room and path != self._path:
                with contextlib.suppress(OSError):
                    path.unlink()
                    total -= size

    def close(self) -> None:
        """Close the present file, and remove it if it is empty; :meth:`write` begins another one. Idempotent. Raises
        ``OSError`` if the disk says now that it has not taken all lines; the file is closed all the same."""
        if self._file >= 0:
            # Forgotten first: after a close that fails, its number may be that of a connection.
            descriptor, self._file = self._file, -1
            if not self._size:
                with contextlib.suppress(OSError):
                    self._path.unlink()
            os.close(descriptor)

    def _begin(self, day: date) -> None:
        """Close the file, if there is one, and begin the next. Raises ``OSError`` of either."""
        self.close()
        self._day, self._size = day, 0
        self._number += 1
        name = f"requests-{day.isoformat()}-{self._now():013d}-{self._epoch:016x}-{self._number}.jsonl"
        self._path = self._folder / name
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(self._path, flags, 0o600)

    def _is_removed(self) -> bool:
        """Return whether the present file has no name any more: another process kept the bound, or a cleaner came; or
        whether it cannot be reached any more, as on a server that has forgotten it."""
        try:
            return not os.fstat(self._file).st_nlink
        except OSError:
            return True


def _dated(folder: Path) -> Iterator[tuple[Path, date]]:
    """Yield the files of records in a folder with their days. Raises ``OSError``."""
    for path in folder.iterdir():
        if match := _NAME.fullmatch(path.name):
            with contextlib.suppress(ValueError):  # no day of the calendar: it is none of ours
                yield path, date.fromisoformat(match[1])


def _day_of(milliseconds: int) -> date:
    return datetime.fromtimestamp(milliseconds / 1000, UTC).date()


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
