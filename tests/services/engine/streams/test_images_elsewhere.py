"""Prompts with images whose KV another engine, or a file, has: it is found by the images' keys, without their rows. An
engine that has to compute asks for the rows."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.services.engine.fake_encoder import FakeEncoder, expected_of, make_item, make_media_add, running_encoder
from tests.services.engine.peer import VOCAB_SIZE, Peer, make_settings, running_engine
from tests.services.engine.streams.test_disaggregated import Pair, running_pair
from tokenloom.v1.engine_pb2 import AddRequest, KVSource
from tokenloom.v1.types_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_PREFILLED, MediaRun


@pytest.fixture
def encoder() -> FakeEncoder:
    return FakeEncoder()


@pytest.fixture
async def address(socket_dir: Path, encoder: FakeEncoder) -> AsyncIterator[str]:
    async with running_encoder(socket_dir, encoder) as address:
        yield address


def make_prompt(slot: int, address: str, key: str = "image") -> AddRequest:
    """Two images, of which the second has its rows in two runs."""
    runs = [MediaRun(position=30, num_tokens=8), MediaRun(position=40, num_tokens=8, row_offset=8)]
    lines = make_item(30, 16, address, f"{key} in lines", runs=runs)
    return make_media_add(slot, make_item(4, 20, address, key), lines, length=60, max_tokens=9)


def second_leg(add: AddRequest, kv: KVSource, first: list[int]) -> AddRequest:
    leg = AddRequest()
    leg.CopyFrom(add)
    leg.accepted_token_ids.extend(first)
    leg.kv_source.CopyFrom(kv)
    return leg


async def prefill(pair: Pair, add: AddRequest) -> tuple[KVSource, list[int]]:
    leg = AddRequest()
    leg.CopyFrom(add)
    leg.hold_kv = True
    await pair.prefill.send(leg)
    received = await pair.prefill.read_until_finished([add.slot])
    assert received.finished[add.slot].reason == FINISH_REASON_PREFILLED
    return received.finished[add.slot].kv, list(received.token_ids[add.slot])


async def decode(pair: Pair, add: AddRequest, kv: KVSource, first: list[int]) -> list[int]:
    await pair.decode.send(second_leg(add, kv, first))
    received = await pair.decode.read_until_finished([add.slot])
    assert received.finished[add.slot].reason == FINISH_REASON_LENGTH
    return first + received.token_ids[add.slot]


@pytest.mark.parametrize("own_process", [False, True])
async def test_the_decode_engine_needs_no_rows(
    socket_dir: Path, encoder: FakeEncoder, address: str, own_process: bool
) -> None:
    async with running_pair(socket_dir, own_process=own_process) as pair:
        for slot, key in ((1, "a"), (2, "b")):
            add = make_prompt(slot, address, key)
            assert await decode(pair, add, *await prefill(pair, add)) == expected_of(add, VOCAB_SIZE)
        assert set(encoder.calls.values()) == {1}
        assert len(encoder.calls) == 4
        # All of the first prompt, and of the second what is behind the first token of its image.
        assert pair.counted("kv_transfer_blocks") == 15 + 14


async def test_a_decode_engine_that_computes_asks_for_rows(
    socket_dir: Path, encoder: FakeEncoder, address: str
) -> None:
    async with running_pair(socket_dir) as pair:
        add = make_prompt(1, address)
        kv, first = await prefill(pair, add)
        kv.lease_id = bytes(16)
        assert await decode(pair, add, kv, first) == expected_of(add, VOCAB_SIZE)
        assert set(encoder.calls.values()) == {2}


async def test_the_lease_of_one_image_is_not_for_another(socket_dir: Path, encoder: FakeEncoder, address: str) -> None:
    async with running_pair(socket_dir) as pair:
        kv, first = await prefill(pair, make_prompt(1, address, "a"))
        other = make_prompt(2, address, "b")
        first = expected_of(other, VOCAB_SIZE)[: len(first)]
        assert await decode(pair, other, kv, first) == expected_of(other, VOCAB_SIZE)
        assert encoder.calls[b"b"] == 1
        assert not pair.counted("kv_transfer_blocks")


async def test_another_engine_goes_on_with_the_rows(socket_dir: Path, encoder: FakeEncoder, address: str) -> None:
    """As after the end of an engine: the tokens so far are part of the attempt."""
    add = make_prompt(1, address)
    tokens = expected_of(add, VOCAB_SIZE)
    add.accepted_token_ids.extend(tokens[:4])
    async with running_engine(make_settings(socket_dir)) as host, Peer(host.address) as peer:
        await peer.send(add)
        assert (await peer.read_until_finished([1])).token_ids[1] == tokens[4:]
    assert set(encoder.calls.values()) == {1}


async def test_kv_of_images_comes_back_from_a_file(socket_dir: Path, encoder: FakeEncoder, address: str) -> None:
    settings = make_settings(
        socket_dir,
        num_kv_blocks=30,
        max_model_len=100,
        kv_offload_path=str(socket_dir),
        kv_offload_bytes=1 << 20,
    )
    async with running_engine(settings) as host, Peer(host.address) as peer:
        for slot, key in enumerate("abca", 1):
            await peer.send(add := make_prompt(slot, address, key))
            assert (await peer.read_until_finished([slot])).token_ids[slot] == expected_of(add, VOCAB_SIZE)
    assert set(encoder.calls.values()) == {1}
    assert len(encoder.calls) == 6
