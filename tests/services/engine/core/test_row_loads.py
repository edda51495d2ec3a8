"""The front brings rows from an encoder: one call for each image, repeated from where it ended, and checked."""

import asyncio
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.services.engine.fake_encoder import FakeEncoder, expected_of, make_item, make_media_add, running_encoder
from tests.services.engine.peer import VOCAB_SIZE, Peer, make_settings, running_engine
from tokenloom.request import errors, wire_errors
from tokenloom.services.engine.core import row_loads
from tokenloom.services.runtime import liveness
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.v1.encoder_pb2 import ROW_TYPE_BFLOAT16, RowChunk
from tokenloom.v1.types_pb2 import FINISH_REASON_ERROR, FINISH_REASON_LENGTH


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_loads.RowLoads.__init__, "__defaults__", (row_loads.Pauses(0.0, 0.0),))


@pytest.fixture
def encoder() -> FakeEncoder:
    return FakeEncoder()


@pytest.fixture
async def address(socket_dir: Path, encoder: FakeEncoder) -> AsyncIterator[str]:
    async with running_encoder(socket_dir, encoder) as address:
        yield address


@pytest.fixture
async def host(socket_dir: Path) -> AsyncIterator[Host]:
    async with running_engine(make_settings(socket_dir)) as host:
        yield host


@pytest.fixture
async def peer(host: Host) -> AsyncIterator[Peer]:
    async with Peer(host.address) as peer:
        yield peer


async def error_of(peer: Peer, slot: int = 1) -> errors.TokenloomError:
    finished = (await peer.read_until_finished([slot])).finished[slot]
    assert finished.reason == FINISH_REASON_ERROR
    return wire_errors.from_proto(finished.error)


@pytest.mark.parametrize("dtype", [ROW_TYPE_BFLOAT16, RowChunk().type + 2])
async def test_an_image_is_read_once_for_all_that_wait(
    peer: Peer, encoder: FakeEncoder, address: str, dtype: int
) -> None:
    encoder.dtype = dtype  # type: ignore[assignment]
    adds = [make_media_add(slot, make_item(4, 10, address), tenant="a") for slot in (1, 2)]
    adds[1].prompt.cache_salt = b"other"  # shares no blocks
    adds.append(make_media_add(3, make_item(0, 8, address, "b"), make_item(12, 8, address, "c")))
    encoder.gate.clear()
    await peer.send(*adds)
    await encoder.called.wait()
    encoder.gate.set()
    received = await peer.read_until_finished([1, 2, 3])
    for add in adds:
        assert received.token_ids[add.slot] == expected_of(add, VOCAB_SIZE, encoder.dtype)
    assert encoder.calls == {b"image": 1, b"b": 1, b"c": 1}
    assert {request.item.key: request.tenant for request in encoder.requests} == {b"image": "a", b"b": "", b"c": ""}


async def test_a_second_turn_reads_nothing(peer: Peer, encoder: FakeEncoder, address: str) -> None:
    for slot in (1, 2):
        await peer.send(make_media_add(slot, make_item(4, 10, address)))
        received = await peer.read_until_finished([slot])
    assert encoder.calls == {b"image": 1}
    assert received.finished[2].cached_tokens == 28


@pytest.mark.parametrize(
    "fault",
    [errors.Unavailable("restarts"), errors.ResourceExhausted("full", retry_after=0.0), errors.Cancelled("stops")],
)
async def test_a_call_that_fails_for_a_moment_is_repeated(
    peer: Peer, encoder: FakeEncoder, address: str, fault: errors.TokenloomError
) -> None:
    encoder.faults = [fault, fault]
    await peer.send(add := make_media_add(1, make_item(4, 10, address)))
    received = await peer.read_until_finished([1])
    assert received.token_ids[1] == expected_of(add, VOCAB_SIZE)
    assert encoder.calls == {b"image": 3}


async def test_a_call_that_is_cut_goes_on_where_it_ended(peer: Peer, encoder: FakeEncoder, address: str) -> None:
    encoder.cut_after = [1, 0, 2]
    await peer.send(add := make_media_add(1, make_item(4, 10, address)))
    received = await peer.read_until_finished([1])
    assert received.token_ids[1] == expected_of(add, VOCAB_SIZE)
    assert [request.first_row for request in encoder.requests] == [0, 3, 3, 9]


@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        ([errors.NotFound("gone")], errors.MediaLost),
        ([errors.Unavailable("away")] * 4, errors.MediaLost),
        ([errors.InvalidArgument("image 0 cannot be decoded", "messages")], errors.InvalidArgument),
        ([errors.DeadlineExceeded("decoding takes too long")], errors.DeadlineExceeded),
        ([errors.PermissionDenied("gateway may not call Encoder")], errors.Internal),
    ],
)
async def test_what_lasts_ends_those_that_wait(
    peer: Peer, encoder: FakeEncoder, address: str, faults: list[BaseException], kind: type[errors.TokenloomError]
) -> None:
    encoder.faults = faults
    encoder.gate.clear()
    await peer.send(*(make_media_add(slot, make_item(4, 10, address)) for slot in (1, 2)))
    await encoder.called.wait()
    encoder.gate.set()
    for slot in (1, 2):
        assert type(await error_of(peer, slot)) is kind
    await peer.send(add := make_media_add(3, make_item(4, 10, address)))  # the engine goes on
    assert (await peer.read_until_finished([3])).token_ids[3] == expected_of(add, VOCAB_SIZE)


async def test_each_request_learns_which_of_its_images_is_refused(
    peer: Peer, encoder: FakeEncoder, address: str
) -> None:
    encoder.faults = [errors.InvalidArgument("the image is damaged", "messages")]
    encoder.gate.clear()
    items = [make_item(4, 10, address), make_item(4, 10, address)]
    items[1].index = 3
    await peer.send(*(make_media_add(slot, item) for slot, item in enumerate(items, 1)))
    await encoder.called.wait()
    encoder.gate.set()
    assert [(await error_of(peer, slot)).field for slot in (1, 2)] == ["media[0]", "media[3]"]


async def test_an_encoder_that_does_not_exist_has_lost_the_image(peer: Peer, socket_dir: Path) -> None:
    await peer.send(make_media_add(1, make_item(4, 10, f"unix:{socket_dir}/nobody")))
    assert isinstance(await error_of(peer), errors.MediaLost)


@pytest.mark.parametrize("fault", [errors.NotFound("gone"), errors.Unavailable("away")])
async def test_an_encoder_that_lost_an_image_ends_only_those_whose_file_it_had(
    peer: Peer, socket_dir: Path, encoder: FakeEncoder, address: str, fault: errors.TokenloomError
) -> None:
    other = FakeEncoder()
    async with running_encoder(socket_dir, other, "other") as elsewhere:
        encoder.faults = [fault] * 4
        encoder.gate.clear()
        await peer.send(make_media_add(1, make_item(4, 10, address)))
        await encoder.called.wait()
        # Both in one message: the engine asks for the rows of both before the first end.
        adds = [make_media_add(slot, make_item(4, 10, place)) for slot, place in ((2, address), (3, elsewhere))]
        await peer.send(*adds, make_media_add(4, make_item(4, 10, elsewhere, "b")))
        await other.called.wait()  # for what is asked for behind the others
        encoder.gate.set()
        received = await peer.read_until_finished([1, 2, 3, 4])
    assert received.token_ids[3] == expected_of(adds[1], VOCAB_SIZE)
    for slot in (1, 2):
        assert isinstance(wire_errors.from_proto(received.finished[slot].error), errors.MediaLost)
    assert other.calls == {b"image": 1, b"b": 1}


def ask_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = row_loads.Pauses(0.0, 0.0, quiet=0.0)
    monkeypatch.setattr(row_loads.RowLoads.__init__, "__defaults__", (pauses,))


async def test_a_silent_encoder_has_lost_the_image(
    socket_dir: Path, encoder: FakeEncoder, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_at_once(monkeypatch)
    monkeypatch.setattr(liveness, "ANSWER_SECONDS", 0.01)
    encoder.gate.clear()
    encoder.hangs = True
    async with running_engine(make_settings(socket_dir)) as host, Peer(host.address) as peer:
        await peer.send(make_media_add(1, make_item(4, 10, address)))
        error = await error_of(peer)
    assert isinstance(error, errors.MediaLost)
    assert "is silent" in error.message
    await encoder.ended.wait()
    assert encoder.calls == {b"image": 1}, "another encoder may be asked now"


async def test_an_encoder_that_computes_for_long_is_no_silent_one(
    socket_dir: Path, encoder: FakeEncoder, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_at_once(monkeypatch)
    encoder.gate.clear()  # until it is asked for the second time
    async with running_engine(make_settings(socket_dir)) as host, Peer(host.address) as peer:
        await peer.send(add := make_media_add(1, make_item(4, 10, address)))
        assert (await peer.read_until_finished([1])).token_ids[1] == expected_of(add, VOCAB_SIZE)
    assert encoder.calls == {b"image": 1}


def nan(chunk: RowChunk) -> RowChunk:
    return RowChunk(
        first_row=chunk.first_row, num_rows=chunk.num_rows, width=chunk.width, type=chunk.type,
        rows=struct.pack("<f", float("nan")) + chunk.rows[4:],
    )  # fmt: skip


def with_fields(**fields: int) -> object:
    def change(chunk: RowChunk) -> RowChunk:
        changed = RowChunk()
        changed.CopyFrom(chunk)
        for name, value in fields.items():
            setattr(changed, name, value)
        return changed

    return change


@pytest.mark.parametrize(
    "change",
    [
        nan,
        with_fields(width=9),
        with_fields(num_rows=2),
        with_fields(num_rows=0),
        with_fields(num_rows=11),
        with_fields(first_row=1),
        with_fields(type=0),
        with_fields(type=ROW_TYPE_BFLOAT16),
    ],
)
async def test_rows_that_cannot_be_used_never_reach_the_core(
    peer: Peer, encoder: FakeEncoder, address: str, change: object
) -> None:
    encoder.change = change  # type: ignore[assignment]
    await peer.send(make_media_add(1, make_item(4, 10, address)))
    assert type(await error_of(peer)) is errors.Internal
    encoder.change = lambda chunk: chunk
    await peer.send(add := make_media_add(2, make_item(4, 10, address)))
    assert (await peer.read_until_finished([2])).token_ids[2] == expected_of(add, VOCAB_SIZE)


async def test_a_call_ends_with_the_last_request_that_waits(peer: Peer, encoder: FakeEncoder, address: str) -> None:
    encoder.gate.clear()
    await peer.send(*(make_media_add(slot, make_item(4, 10, address)) for slot in (1, 2)))
    await encoder.called.wait()
    await peer.send(abort_slots=[1])
    await peer.read_until_finished([1])
    assert not encoder.ended.is_set()
    await peer.send(abort_slots=[2])
    async with asyncio.timeout(30):
        await encoder.ended.wait()
    encoder.gate.set()
    await peer.send(add := make_media_add(3, make_item(4, 10, address)))
    received = await peer.read_until_finished([3])
    assert received.token_ids[3] == expected_of(add, VOCAB_SIZE)
    assert received.finished[3].reason == FINISH_REASON_LENGTH


async def test_a_request_ends_at_its_deadline_while_it_waits(peer: Peer, encoder: FakeEncoder, address: str) -> None:
    encoder.gate.clear()
    add = make_media_add(1, make_item(4, 10, address))
    add.timeout.FromMilliseconds(50)
    await peer.send(add)
    assert isinstance(await error_of(peer), errors.DeadlineExceeded)


async def test_the_engine_stops_while_rows_are_on_their_way(
    socket_dir: Path, encoder: FakeEncoder, address: str
) -> None:
    encoder.gate.clear()
    async with running_engine(make_settings(socket_dir)) as host, Peer(host.address) as peer:
        await peer.send(make_media_add(1, make_item(4, 10, address)))
        await encoder.called.wait()
    async with asyncio.timeout(30):
        await encoder.ended.wait()


async def test_another_request_that_asks_while_a_load_is_given_up_gets_the_rows(
    peer: Peer, encoder: FakeEncoder, address: str
) -> None:
    encoder.gate.clear()
    await peer.send(make_media_add(1, make_item(4, 10, address)))
    await encoder.called.wait()
    encoder.gate.set()
    await peer.send(add := make_media_add(2, make_item(4, 10, address)), abort_slots=[1])
    assert (await peer.read_until_finished([1, 2])).token_ids[2] == expected_of(add, VOCAB_SIZE)


async def test_channels_to_encoders_that_are_not_used_are_closed(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_loads, "_MAX_CHANNELS", 2)
    channels = row_loads.EncoderChannels(Channels())
    async with channels.stub(f"unix:{socket_dir}/used"):
        for index in range(4):
            async with channels.stub(f"unix:{socket_dir}/{index}"):
                pass
        assert list(channels._open) == [f"unix:{socket_dir}/used", f"unix:{socket_dir}/3"]
    await channels.close()
    assert not channels._open
