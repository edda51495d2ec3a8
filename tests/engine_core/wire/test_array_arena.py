"""Arrays in shared memory: the two sides in one process here, in several in ``test_client.py`` and ``executor``."""

import contextlib
import gc
import logging
import mmap
import os
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tokenloom.engine_core.wire.array_arena import MIN_BYTES, NUM_SLOTS, ArenaAddress, ArenaReader, ArrayArena, Region

UNIT = MIN_BYTES
Bytes = npt.NDArray[np.uint8]


def array_of(content: int, nbytes: int = UNIT) -> Bytes:
    return np.full(nbytes, content, np.uint8)


def reader_of(arena: ArrayArena, index: int = 0) -> ArenaReader:
    """As a process that inherits the descriptor makes it."""
    assert arena.address is not None
    return ArenaReader(msgspec.structs.replace(arena.address, fd=os.dup(arena.address.fd)), index)


def opened(reader: ArenaReader, region: Region | None) -> Bytes:
    """As a decoder does."""
    assert region is not None
    return np.frombuffer(reader.open(region), np.uint8)


def put(arena: ArrayArena, array: Bytes | npt.NDArray[np.int64]) -> Region | None:
    """As a sender does whose message arrives."""
    with arena.lend() as loan:
        return loan.put(array)


def fail_to_send(arena: ArrayArena, nbytes: int) -> None:
    with contextlib.suppress(ConnectionError), arena.lend() as loan:
        loan.put(array_of(255, nbytes))
        raise ConnectionError


@pytest.fixture
def arena() -> Iterator[ArrayArena]:
    arena = ArrayArena(4 * UNIT)
    yield arena
    arena.close()


def test_an_array_is_read_in_place_and_given_back_with_the_last_view(arena: ArrayArena) -> None:
    reader = reader_of(arena)
    view = opened(reader, put(arena, array_of(7)))
    assert (view == 7).all()
    part = view[100:200].reshape(10, 10)
    del view
    assert arena.num_lent == 1
    assert (part == 7).all()
    del part
    assert arena.num_lent == 0


def test_a_region_may_outlive_later_ones(arena: ArrayArena) -> None:
    reader = reader_of(arena)
    held = opened(reader, put(arena, array_of(1)))
    for content in range(2, 3 * NUM_SLOTS):
        assert (opened(reader, put(arena, array_of(content % 251, 3 * UNIT))) == content % 251).all()
    assert (held == 1).all()


def test_strided_arrays_of_any_kind_are_copied_as_they_are_read(arena: ArrayArena) -> None:
    array = np.arange(UNIT, dtype=np.int64).reshape(2, -1)[:, ::2]
    region = put(arena, array)
    assert region is not None
    found = np.frombuffer(reader_of(arena).open(region), np.int64).reshape(array.shape)
    np.testing.assert_array_equal(found, array)


def test_what_has_no_room_or_is_small_is_not_lent(arena: ArrayArena) -> None:
    assert put(arena, array_of(1, UNIT - 1)) is None
    assert put(arena, array_of(1, 4 * UNIT + 1)) is None
    first = put(arena, array_of(1, 3 * UNIT))
    assert put(arena, array_of(2, 2 * UNIT)) is None
    opened(reader_of(arena), first)
    assert put(arena, array_of(2, 2 * UNIT)) is not None, "the first was read and dropped"


def test_there_are_so_many_slots() -> None:
    arena = ArrayArena((NUM_SLOTS + 1) * UNIT)
    regions = [put(arena, array_of(n % 251)) for n in range(NUM_SLOTS + 1)]
    assert regions[-1] is None
    reader = reader_of(arena)
    views = [opened(reader, region) for region in regions[:-1]]
    del views[5]
    assert put(arena, array_of(1)) is not None
    arena.close()


def test_every_reader_has_to_give_a_region_back() -> None:
    arena = ArrayArena(UNIT, num_readers=2)
    readers = [reader_of(arena, 0), reader_of(arena, 1)]
    region = put(arena, array_of(3))
    views = [opened(reader, region) for reader in readers]
    for _ in readers:
        assert arena.num_lent == 1
        views.pop()
    assert arena.num_lent == 0
    arena.close()


def test_a_message_that_was_not_sent_leaves_nothing(arena: ArrayArena) -> None:
    fail_to_send(arena, UNIT)
    assert arena.num_lent == 0
    with arena.lend() as loan:
        region = loan.put(array_of(2, 4 * UNIT))
    assert (opened(reader_of(arena), region) == 2).all()


def test_what_was_handed_over_stays_with_its_readers_although_its_sender_fails(arena: ArrayArena) -> None:
    reader = reader_of(arena)
    with contextlib.suppress(ConnectionError), arena.lend() as loan:
        region = loan.put(array_of(7))
        loan.hand_over()
        loan.put(array_of(8))
        raise ConnectionError
    assert arena.num_lent == 1, "the second was not sent"
    for content in range(20):
        opened(reader, put(arena, array_of(content)))
    view = opened(reader, region)
    assert (view == 7).all()
    del view
    assert arena.num_lent == 0


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"slot": NUM_SLOTS}, "is not lent"),
        ({"slot": -1}, "is not lent"),
        ({"generation": 0}, "is not lent"),
        ({"generation": 2}, "is not lent"),
        ({"generation": 2**70}, "is not lent"),
        ({"offset": -1}, "is not within"),
        ({"offset": 3 * UNIT + 1}, "is not within"),
        ({"nbytes": 0}, "is not within"),
        ({"nbytes": -1}, "is not within"),
        ({"nbytes": 2**63}, "is not within"),
    ],
)
def test_what_was_not_lent_is_not_opened(arena: ArrayArena, change: dict[str, int], error: str) -> None:
    region, reader = put(arena, array_of(1)), reader_of(arena)
    assert region is not None
    with pytest.raises(ValueError, match=error):
        reader.open(region._replace(**change))
    view = reader.open(region)
    with pytest.raises(ValueError, match="was opened before"):
        reader.open(region)
    assert view.readonly


def test_a_region_that_was_given_back_is_stale(arena: ArrayArena) -> None:
    reader = reader_of(arena)
    first = put(arena, array_of(1))
    opened(reader, first)
    second = put(arena, array_of(2))
    assert first is not None
    assert second is not None
    assert (second.slot, second.offset) == (first.slot, first.offset)
    with pytest.raises(ValueError, match="is not lent"):
        reader.open(first)


def test_readers_keep_what_they_have_when_the_sender_is_gone(arena: ArrayArena) -> None:
    view = opened(reader_of(arena), put(arena, array_of(9)))
    arena.close()
    arena.close()
    assert put(arena, array_of(1)) is None
    del arena
    gc.collect()
    assert (view == 9).all()


def test_without_shared_memory_there_are_frames(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert put(ArrayArena(0), array_of(1)) is None

    def refuse(*_: object) -> int:
        raise OSError("not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with caplog.at_level(logging.WARNING):
        arena = ArrayArena(UNIT)
    assert "they are sent over sockets: not permitted" in caplog.text
    assert arena.address is None
    assert put(arena, array_of(1)) is None
    arena.close()


def foreign_file(address: ArenaAddress) -> int:
    read, write = os.pipe()
    os.close(write)
    return read


def unsealed(address: ArenaAddress) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.ftruncate(fd, address.header_bytes + address.nbytes)
    return fd


@pytest.mark.parametrize("make_fd", [foreign_file, unsealed])
def test_a_descriptor_of_something_else_is_refused(arena: ArrayArena, make_fd: Callable[[ArenaAddress], int]) -> None:
    assert arena.address is not None
    fd = make_fd(arena.address)
    with pytest.raises(ValueError, match="does not belong to"):
        ArenaReader(msgspec.structs.replace(arena.address, fd=fd))
    os.close(fd)
    for wrong in (
        msgspec.structs.replace(arena.address, nbytes=arena.address.nbytes + mmap.PAGESIZE),
        msgspec.structs.replace(arena.address, fd=2**30),
    ):
        with pytest.raises(ValueError, match="does not belong to"):
            ArenaReader(wrong)
    with pytest.raises(ValueError, match="reader 1"):
        ArenaReader(arena.address, 1)


class Lending(RuleBasedStateMachine):
    """Two readers that open, keep and drop regions in any order, against a list of what each of them still has."""

    regions = Bundle("regions")
    views = Bundle("views")

    def __init__(self) -> None:
        super().__init__()
        self.arena = ArrayArena(8 * UNIT, num_readers=2)
        self.readers = [reader_of(self.arena, index) for index in range(2)]
        self.content = 0
        self.lent: dict[Region, tuple[int, set[int]]] = {}  # what it holds, and who has not given it back
        self.held: dict[tuple[Region, int], Bytes] = {}

    @rule(target=regions, units=st.integers(1, 5), extra=st.integers(0, 100))
    def put(self, units: int, extra: int) -> object:
        self.content = self.content % 250 + 1
        region = put(self.arena, array_of(self.content, units * UNIT + extra))
        if region is None:
            assert self.lent, "an empty arena has room for this"
            return multiple()
        self.lent[region] = (self.content, {0, 1})
        return region

    @rule(target=views, region=regions, index=st.integers(0, 1))
    def open(self, region: Region, index: int) -> object:
        may_open = region in self.lent and index in self.lent[region][1] and (region, index) not in self.held
        if not may_open:
            with pytest.raises(ValueError, match="is not lent"):
                self.readers[index].open(region)
            return multiple()
        self.held[region, index] = opened(self.readers[index], region)
        return region, index

    @rule(view=consumes(views))
    def drop(self, view: tuple[Region, int]) -> None:
        region, index = view
        del self.held[view]
        missing = self.lent[region][1]
        missing.discard(index)
        if not missing:
            del self.lent[region]

    @rule(target=regions, units=st.integers(1, 3))
    def fail_in_the_middle(self, units: int) -> object:
        self.content = self.content % 250 + 1
        region = None
        with contextlib.suppress(ConnectionError), self.arena.lend() as loan:
            region = loan.put(array_of(self.content, units * UNIT))
            loan.hand_over()
            raise ConnectionError
        if region is None:
            return multiple()
        self.lent[region] = (self.content, {0, 1})
        return region

    @rule(units=st.integers(1, 5))
    def fail_to_send(self, units: int) -> None:
        fail_to_send(self.arena, units * UNIT)

    @invariant()
    def nothing_is_overwritten_nor_forgotten(self) -> None:
        for (region, _), view in self.held.items():
            assert len(view) == region.nbytes
            assert (view == self.lent[region][0]).all()
        assert self.arena.num_lent == len(self.lent)

    def teardown(self) -> None:
        self.held.clear()
        self.arena.close()


TestLending = Lending.TestCase
TestLending.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
