"""Sounds go to disk as they arrive, and no further than there is room."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from typing import Any, cast

import numpy as np
import pytest

from tests.loop_clock import settle
from tests.services.encoder.fakes import FakeEncoder, digest_of
from tests.services.encoder.test_encoder_servicer import has, rows
from tokenloom.request import errors
from tokenloom.services.encoder import sound_files
from tokenloom.services.encoder.sound_files import LEAST_BYTES, PieceOptions, SoundFile
from tokenloom.v1.encoder_pb2 import PutHeader, PutRequest, ReleaseFilesRequest
from tokenloom.v1.types_pb2 import MEDIA_KIND_AUDIO, MEDIA_KIND_IMAGE, MediaItem

OPEN = {"digest": b"", "num_bytes": 0}
"""The header of a file that is still arriving."""


@pytest.mark.parametrize("header", [{}, OPEN, {"digest": b""}, {"num_bytes": 0}])
async def test_a_sound_becomes_samples_on_disk(header: dict[str, Any]) -> None:
    encoder = FakeEncoder(hears=True)
    facts = await encoder.put(b"sound", pieces=3, request_id="r", **header)
    assert (facts.digest, facts.samples, facts.num_bytes) == (digest_of(b"sound"), 5, 5)
    assert await has(encoder, b"sound", tenant="t")
    sound = encoder.files.data(digest_of(b"sound"))
    assert np.frombuffer(sound.samples(1, 4), np.float32).tolist() == list(b"oun")
    assert encoder.files.num_pinned_bytes == 20
    item = MediaItem(key=b"k", kind=MEDIA_KIND_AUDIO, num_rows=4, digest=facts.digest)
    assert len(await rows(encoder, item)) == 4


async def test_a_sound_that_is_there_is_not_decoded_again() -> None:
    encoder = FakeEncoder(hears=True)
    await encoder.put(b"sound")
    await encoder.put(b"sound", tenant="other", **OPEN)
    assert encoder.reader.num_read == 1
    assert await has(encoder, b"sound", tenant="other")


@pytest.mark.parametrize(
    ("data", "header", "error"),
    [
        (b"sound", {"digest": b"x" * 32}, errors.InvalidArgument),
        (b"sound", {"digest": b"short"}, errors.InvalidArgument),
        (b"sound", {"num_bytes": 4}, errors.InvalidArgument),
        (b"sound", {"num_bytes": 6}, errors.InvalidArgument),
        (b"sound", {"num_bytes": 1 << 40}, errors.PayloadTooLarge),
        (b"s" * 70_000, OPEN, errors.PayloadTooLarge),
        (b"sound", {"kind": MEDIA_KIND_IMAGE}, errors.InvalidArgument),
        (b"", OPEN, errors.InvalidArgument),
        (b"bad sound", OPEN, errors.InvalidArgument),
    ],
)
async def test_what_is_refused_leaves_nothing(data: bytes, header: dict[str, Any], error: type[Exception]) -> None:
    encoder = FakeEncoder(hears=True)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(error):
        await encoder.put(data, **header)
    assert (encoder.files.num_bytes, len(encoder.files), encoder.files._arriving) == (0, 0, 0)
    assert len(os.listdir("/proc/self/fd")) <= before
    await encoder.put(b"fine")


async def test_samples_that_find_no_room_end_their_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sound_files, "LOOK_SECONDS", 0.001)
    encoder = FakeEncoder(hears=True, files_bytes=2000)
    await encoder.put(b"a" * 250, request_id="r", tenant="other")
    encoder.reader.opened.clear()
    with pytest.raises(errors.ResourceExhausted, match="leave no room"):
        await encoder.put(b"b" * 250, **OPEN)
    assert encoder.reader.num_running == 0
    encoder.reader.opened.set()
    await encoder.servicer.ReleaseFiles(ReleaseFilesRequest(tenant="other", request_id="r"), cast(Any, None))
    await encoder.put(b"b" * 250, **OPEN)
    with pytest.raises(errors.PayloadTooLarge, match="there are for all"):
        await encoder.put(b"c" * 450, **OPEN)


async def test_a_client_that_leaves_ends_its_decoding() -> None:
    encoder = FakeEncoder(hears=True)
    encoder.reader.opened.clear()
    call = asyncio.create_task(encoder.put(b"sound"))
    while not encoder.reader.num_running:
        await settle()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert (encoder.reader.num_running, encoder.files._arriving) == (0, 0)


async def test_a_write_that_is_on_its_way_reaches_no_other_file(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, write = FakeEncoder(hears=True), sound_files.write_all
    began, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    def hold(*arguments: Any) -> int:
        began.set()
        assert goes_on.wait(30)
        try:
            return write(*arguments)
        finally:
            ended.set()

    monkeypatch.setattr(sound_files, "write_all", hold)
    call = asyncio.create_task(encoder.put(b"sound", pieces=1))
    await asyncio.to_thread(began.wait)
    call.cancel()
    await settle()
    other = SoundFile("")  # the number of a descriptor that was closed is the next one's
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.to_thread(ended.wait)
    assert (other.num_bytes, encoder.files._arriving) == (0, 0)


async def test_no_more_sounds_are_decoded_than_there_are_processes() -> None:
    encoder = FakeEncoder(hears=True)
    encoder.reader.opened.clear()
    calls = [asyncio.create_task(encoder.put(b"%d" % number, tenant=f"{number}")) for number in range(5)]
    while encoder.reader.num_running < 2:
        await settle()
    await settle()
    assert encoder.reader.num_read == 2
    encoder.reader.opened.set()
    await asyncio.gather(*calls)
    assert encoder.reader.num_read == 5


async def test_a_message_without_data_is_refused() -> None:
    encoder = FakeEncoder(hears=True)

    async def messages() -> AsyncIterator[PutRequest]:
        yield PutRequest(header=PutHeader(kind=MEDIA_KIND_AUDIO))
        yield PutRequest()

    with pytest.raises(errors.InvalidArgument, match="no part"):
        await encoder.servicer.Put(messages(), cast(Any, None))


async def test_sounds_of_urls_are_fetched_where_that_is_allowed() -> None:
    class Fetcher:
        async def fetch(self, url: str, max_bytes: int | None = None) -> bytes:
            return url.encode()

    encoder = FakeEncoder(hears=True, fetcher=Fetcher())
    facts = await encoder.put(b"", url="https://host/a.mp3", **OPEN)
    assert facts.digest == digest_of(b"https://host/a.mp3")
    with pytest.raises(errors.PermissionDenied):
        await FakeEncoder(hears=True).put(b"", url="https://host/a.mp3", **OPEN)


@pytest.mark.parametrize(
    ("options", "expected"),
    [(b"", (1000, 0)), (b'{"samples":10,"start":990}', (10, 990)), (b'{"start":400}', (600, 400))],
)
def test_options_name_a_piece(options: bytes, expected: tuple[int, int]) -> None:
    piece = PieceOptions.of(MediaItem(options_json=options), 1000, 1000)
    assert (piece.samples, piece.start) == expected


@pytest.mark.parametrize(
    "options",
    [
        b"",
        b"[]",
        b'{"samples":1.5}',
        b'{"samples":0,"start":0}',
        b'{"samples":-1,"start":5}',
        b'{"samples":10,"start":-1}',
        b'{"samples":10,"start":991}',
        b'{"samples":501,"start":0}',
        b'{"start":1000}',
        b'{"samples":1,"start":0,"more":1}',
        b'{"samples":18446744073709551616,"start":0}',
    ],
)
def test_what_is_no_piece_is_refused(options: bytes) -> None:
    with pytest.raises(errors.InvalidArgument):
        PieceOptions.of(MediaItem(options_json=options), 1000, 500)


def test_a_disk_without_room_is_the_encoders_fault() -> None:
    with pytest.raises(errors.ResourceExhausted, match="disk takes no sound"):
        SoundFile("/nowhere")
    with open("/dev/full", "wb", buffering=0) as full:
        file = SoundFile("")
        os.dup2(full.fileno(), file.descriptor)
        with pytest.raises(errors.ResourceExhausted, match="disk takes no sound"):
            file.write(b"x", 0)


def test_a_file_is_closed_when_nothing_refers_to_it() -> None:
    file = SoundFile("")
    descriptor = file.descriptor
    assert os.fstat(descriptor).st_nlink == 0
    del file
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


def test_a_small_sound_counts_for_its_descriptor() -> None:
    file = SoundFile("")
    file.write(bytes(10), 0)
    assert (len(file), file.num_bytes) == (LEAST_BYTES, 10)
    file.write(b"x", 5 << 20)
    assert len(file) == (5 << 20) + 1
