"""Frames are found however their bytes are split."""

import contextlib
import itertools

import grpc
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.request.errors import Internal, ResourceExhausted
from tokenloom.services.runtime.local_streams.socket_end import (
    Kind,
    decode_status,
    encode_frame,
    encode_status,
    split_frames,
)

LIMIT = 64
frames = st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=LIMIT)), max_size=8)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(frames, st.lists(st.integers(min_value=0), max_size=12))
def test_any_split_gives_the_same_frames(sent: list[tuple[Kind, bytes]], cuts: list[int]) -> None:
    data, rest = b"".join(encode_frame(kind, payload) for kind, payload in sent), bytearray()
    assert [frame for part in split(data, cuts) for frame in split_frames(rest, part, LIMIT)[0]] == sent


@given(st.binary(), st.lists(st.integers(min_value=0), max_size=4))
def test_any_bytes_are_frames_or_an_error(data: bytes, cuts: list[int]) -> None:
    rest, found, error = bytearray(), 0, None
    for part in split(data, cuts):
        if error is None:
            complete, error = split_frames(rest, part, LIMIT)
            found += sum(5 + len(payload) for _, payload in complete)
    assert found <= len(data)


def test_what_comes_before_a_broken_frame_is_found() -> None:
    found, error = split_frames(bytearray(), encode_frame(Kind.MESSAGE, b"a") + b"\0\0\0\0\x63", LIMIT)
    assert found == [(Kind.MESSAGE, b"a")]
    assert isinstance(error, Internal)
    assert "kind 99" in error.message


def test_a_payload_over_the_limit_is_refused_by_its_length_alone() -> None:
    found, error = split_frames(bytearray(), encode_frame(Kind.MESSAGE, bytes(LIMIT + 1))[:5], LIMIT)
    assert found == []
    assert isinstance(error, ResourceExhausted)
    assert "65 bytes exceeds the limit of 64" in error.message


def test_a_status_with_metadata() -> None:
    metadata = (("details-bin", b"\xff\0"), ("plain", "word"))
    status = decode_status(encode_status(grpc.StatusCode.NOT_FOUND, "gone: ü", metadata))
    assert (status.code(), status.details()) == (grpc.StatusCode.NOT_FOUND, "gone: ü")
    assert tuple(status.trailing_metadata()) == metadata


def test_a_code_of_a_later_version() -> None:
    assert decode_status(msgspec.msgpack.encode((99, "", ()))).code() is grpc.StatusCode.UNKNOWN


@given(st.binary())
def test_any_bytes_are_a_status_or_an_error(payload: bytes) -> None:
    with contextlib.suppress(Internal):
        assert isinstance(decode_status(payload).code(), grpc.StatusCode)


def test_a_status_that_is_none() -> None:
    with pytest.raises(Internal, match="status of a local stream cannot be decoded"):
        decode_status(b"")
