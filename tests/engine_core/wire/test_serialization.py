import contextlib

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.engine_core.wire.test_array_arena import reader_of
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from tokenloom.engine_core.wire.array_arena import MIN_BYTES, ArrayArena
from tokenloom.engine_core.wire.frames import MAX_INLINE_BYTES, Decoder, Frame, call_with_raw, encode, from_raw, to_raw


def test_messages_survive_the_round_trip() -> None:
    request = EngineCoreRequest("a", [1, 2], CoreSamplingParams(max_tokens=3, seed=2**64 - 1), cache_salt=b"\x00salt")
    assert Decoder(EngineCoreRequest).decode(encode(request)) == request
    outputs = EngineCoreOutputs(step=7, outputs=[EngineCoreOutput("a", [5], 2, FinishReason.STOP, stop_token_id=5)])
    assert Decoder(EngineCoreOutputs).decode(encode(outputs)) == outputs


@pytest.mark.parametrize("frames", [[b"\xc1"], [b""], encode({"step": 1}), encode("text"), [*encode([1]), b"more"], []])
def test_what_is_not_the_expected_type_is_refused(frames: list[Frame]) -> None:
    with pytest.raises(msgspec.DecodeError):
        Decoder(EngineCoreOutputs).decode(frames)


def double(value: int, *, scale: int = 2) -> int:
    return value * scale


def test_arguments_are_decoded_to_the_annotated_types() -> None:
    assert call_with_raw(double, [to_raw(4)]) == 8
    with pytest.raises(msgspec.ValidationError):
        call_with_raw(double, [to_raw("4")])
    with pytest.raises(TypeError):
        call_with_raw(double, [])


def test_raw_values_keep_plain_data() -> None:
    assert from_raw(to_raw({"a": [1, None, b"x", True]})) == {"a": [1, None, b"x", True]}


class Tables(msgspec.Struct, array_like=True):
    name: str
    first: npt.NDArray[np.float32]
    others: list[np.ndarray] = []


FIRST = np.arange(200, dtype=np.float32).reshape(10, 20)


def test_arrays_travel_in_frames_of_their_own_unless_they_are_small() -> None:
    small, large = np.arange(5, dtype=np.int64), np.ones((3, 100), dtype=np.uint8) * 7
    frames = encode(Tables("a", FIRST, [small, large[:, ::2], large]))
    assert len(frames) == 3, "40 and 150 bytes lie in the body"
    assert isinstance(frames[1], memoryview)
    assert np.shares_memory(np.frombuffer(frames[1], np.uint8), FIRST)
    tables = Decoder(Tables).decode([bytes(frame) for frame in frames])
    for found, sent in zip([tables.first, *tables.others], [FIRST, small, large[:, ::2], large], strict=True):
        assert found.dtype == sent.dtype
        np.testing.assert_array_equal(found, sent)
        assert not found.flags.writeable
    assert encode([1]) == [b"\x91\x01"], "the next message carries none of them"


@given(
    arrays.arrays(
        arrays.scalar_dtypes().filter(
            lambda dtype: dtype.kind in "biuf" and dtype.str[0] in "<|" and dtype.itemsize <= 8
        ),
        arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=40),
    )
)
def test_arrays_of_every_size_and_shape_survive(array: npt.NDArray[np.generic]) -> None:
    frames = encode([array])
    assert len(frames) == 1 + (array.nbytes > MAX_INLINE_BYTES)
    (found,) = Decoder(list[np.ndarray]).decode(frames)
    assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


def body(*first: object) -> bytes:
    return msgspec.msgpack.encode(["a", first])


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        ([body("<f4", [10, 20], 1)], "frame 1 does not exist"),
        ([body("<f4", [10, 20], 0), b""], "frame 0 does not exist"),
        ([body("<f4", [10, 20], 1), bytes(801)], "801 bytes do not fit an array"),
        ([body("<f4", [10, 2**62], 1), bytes(800)], "800 bytes do not fit an array"),
        ([body("<f4", [-10, -20], 1), bytes(800)], "is not allowed"),
        ([body("<f4", [1] * 9, 1), bytes(4)], "is not allowed"),
        ([body("<f4", [1.5], 1), bytes(4)], "Expected `int`"),
        ([body("|O", [1], 1), bytes(8)], "is not allowed"),
        ([body("<f8", [100], 1), bytes(800)], "the array has dtype <f8, expected <f4"),
        ([body("<f4", [200], 1), bytes(800), b"more"], "does not refer to 1 of its frames"),
        ([msgspec.msgpack.encode(["a", ["<f4", [1], 1], [["<f4", [1], 1]]]), bytes(4)], "belongs to another array"),
    ],
)
def test_arrays_that_are_not_what_they_say_are_refused(frames: list[Frame], error: str) -> None:
    with pytest.raises(msgspec.DecodeError, match=error):
        Decoder(Tables).decode(frames)


LARGE = np.arange(MIN_BYTES // 4, dtype=np.float32).reshape(2, -1)


def test_large_arrays_lie_in_shared_memory_as_long_as_it_has_room() -> None:
    arena = ArrayArena(2 * MIN_BYTES)
    decoder = Decoder(Tables, reader_of(arena))
    with arena.lend() as loan:
        frames = encode(Tables("a", LARGE, [FIRST, LARGE * 2, LARGE * 3]), loan)
    assert [len(frame) for frame in frames[1:]] == [FIRST.nbytes, LARGE.nbytes], "the last has no room"
    tables = decoder.decode([bytes(frame) for frame in frames])
    for found, sent in zip([tables.first, *tables.others], [LARGE, FIRST, LARGE * 2, LARGE * 3], strict=True):
        np.testing.assert_array_equal(found, sent)
        assert not found.flags.writeable
    assert arena.num_lent == 2
    tables.others.clear()
    del found
    assert arena.num_lent == 1
    with pytest.raises(msgspec.DecodeError, match="was opened before"):
        decoder.decode(frames)
    with pytest.raises(NotImplementedError), arena.lend() as loan:
        encode([LARGE, object()], loan)
    assert arena.num_lent == 1, "a message that cannot be sent leaves nothing"
    assert len(encode([LARGE])) == 2, "nor does the loan outlive it"
    arena.close()


@pytest.mark.parametrize(
    ("region", "error"),
    [
        ([0, 1, 0, MIN_BYTES - 4], f"{MIN_BYTES - 4} bytes do not fit an array"),
        ([0, 1, 0], "at least|length 4|Expected"),
        ([0, 1, 0, "all"], "Expected `int`"),
        ([0, 1, MIN_BYTES, MIN_BYTES], "is not within"),
        ([0, 7, 0, MIN_BYTES], "is not lent"),
    ],
)
def test_regions_that_are_not_what_they_say_are_refused(region: list[object], error: str) -> None:
    arena = ArrayArena(MIN_BYTES)
    frames: list[Frame] = [body("<f4", LARGE.shape, region)]
    with arena.lend() as loan:
        assert loan.put(LARGE) == (0, 1, 0, MIN_BYTES)
    with pytest.raises(msgspec.DecodeError, match=error):
        Decoder(Tables, reader_of(arena)).decode(frames)
    with pytest.raises(msgspec.DecodeError, match=r"but this receiver has none|Expected"):
        Decoder(Tables).decode(frames)
    arena.close()


@pytest.mark.parametrize("value", [object(), np.array(["text"]), np.array([object()]), np.array([1j])])
def test_only_plain_data_can_be_sent(value: object) -> None:
    with pytest.raises(NotImplementedError, match="a message cannot carry"):
        encode([FIRST, value])
    assert len(encode(["next"])) == 1


def test_a_large_array_is_no_argument_of_a_call() -> None:
    with pytest.raises(TypeError, match="more than 256 bytes"):
        to_raw(FIRST)


@given(st.binary())
def test_noise_is_refused_or_decoded_but_never_fails_otherwise(noise: bytes) -> None:
    with contextlib.suppress(msgspec.DecodeError):
        Decoder(Tables).decode([noise, noise])
