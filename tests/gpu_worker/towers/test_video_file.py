"""What is read of videos: how many frames and how fast, the frames that are asked for, and nothing that is damaged,
huge or elsewhere."""

import io
import struct
from typing import Any

import av
import numpy as np
import pytest

from tests.gpu_worker.towers.sound_files import encoded, tone
from tests.gpu_worker.towers.video_files import KINDS, LISTED, listed, shades, video
from tokenloom.gpu_worker.towers import video_file
from tokenloom.gpu_worker.towers.image_file import BadImage
from tokenloom.gpu_worker.towers.video_file import BadVideo, VideoFacts, VideoLimits, read_frames, video_facts

FRAMES = shades(20)


def decoded(data: bytes) -> list[Any]:
    """Return all frames as FFmpeg decodes them one after the other, without a choice."""
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_frames_of_a_file(kind: str) -> None:
    rate = 25 if kind == "mpeg" else 10
    data = video(FRAMES, kind, rate)
    assert video_facts(data) == VideoFacts(64, 48, 20, rate)
    every, indices = decoded(data), [0, 3, 3, 12, 19]
    found = [np.asarray(frame) for frame in read_frames(data, indices)]
    assert len(every) == 20
    for index, frame in zip(indices, found, strict=True):
        assert np.array_equal(frame, every[index])
        assert abs(int(frame[40, 60, 0]) - int(FRAMES[index][40, 60, 0])) < 9


def test_frames_that_are_coded_in_another_order() -> None:
    """Of a codec whose frames refer to later ones."""
    data = video(FRAMES, "mp4", bf="2", g="8")
    assert video_facts(data).frames == 20
    for index in range(20):
        (frame,) = read_frames(data, [index])
        assert abs(int(np.asarray(frame)[40, 60, 0]) - int(FRAMES[index][40, 60, 0])) < 9


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_list_of_pictures(kind: str) -> None:
    data = listed(FRAMES[:3], kind)
    assert video_facts(data) == VideoFacts(64, 48, 3, 0.0)
    assert video_facts(data.replace(b"jpeg;", b"jpeg;fps=2.5;")).rate == 2.5
    first, last = (np.asarray(frame) for frame in read_frames(data, [0, 2]))
    assert abs(int(first[40, 60, 0]) - int(FRAMES[0][40, 60, 0])) < 9
    assert abs(int(last[40, 60, 0]) - int(FRAMES[2][40, 60, 0])) < 9


def test_one_picture_is_a_list_of_one() -> None:
    data = io.BytesIO()
    (picture,) = read_frames(listed(FRAMES[:1]), [0])
    picture.save(data, "JPEG")
    assert video_facts(data.getvalue()) == VideoFacts(64, 48, 1, 0.0)
    assert next(read_frames(data.getvalue(), [0])).size == (64, 48)


def test_a_turned_video_is_turned() -> None:
    """As telephones write them, with a matrix that says how they are shown."""
    file = bytearray(video(FRAMES, "mov"))
    at = file.index(b"tkhd") + 4 + 40
    matrix = struct.unpack(">9i", file[at : at + 36])
    assert matrix[0] == matrix[4] == 1 << 16
    file[at : at + 36] = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 48 << 16, 0, 1 << 30)
    facts = video_facts(bytes(file))
    assert (facts.width, facts.height) == (48, 64)
    (turned,), (plain,) = (read_frames(bytes(data), [3]) for data in (file, video(FRAMES, "mov")))
    # A quarter to the right: what was at the bottom is at the left.
    assert np.array_equal(np.asarray(turned), np.rot90(np.asarray(plain), -1))


def test_a_rate_that_time_stamps_contradict_is_not_believed() -> None:
    """As of recordings of browsers."""
    data, stream = io.BytesIO(), None
    with av.open(data, "w", format="webm") as file:
        stream = file.add_stream("libvpx", rate=1000, width=64, height=48)
        stream.pix_fmt = "yuv420p"  # type: ignore[attr-defined]
        for number, pixels in enumerate(FRAMES):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = number * 100
            file.mux(stream.encode(frame))  # type: ignore[attr-defined]
        file.mux(stream.encode(None))  # type: ignore[attr-defined]
    assert video_facts(data.getvalue()).rate == pytest.approx(10, rel=0.11)


def test_a_file_that_was_cut_is_read_as_far_as_it_goes() -> None:
    data = video(shades(40, 160, 120), "mkv")
    facts = video_facts(data[: len(data) * 3 // 4])
    assert 0 < facts.frames < 40
    assert len(list(read_frames(data[: len(data) * 3 // 4], list(range(40))))) == 40
    with pytest.raises(BadVideo, match="damaged or incomplete"):
        list(read_frames(data[: len(data) // 3], list(range(40))))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not one of MP4"),
        (b"<html>" + video(FRAMES), "not one of MP4"),
        (b"#EXTM3U\nhttp://127.0.0.1/a.mp4\n", "not one of MP4"),
        (video(FRAMES)[:200], "damaged or incomplete"),
        (b"\x1a\x45\xdf\xa3" + bytes(400), "damaged or incomplete"),
        (encoded(tone(1.0), "mp4", "aac"), "has no pictures"),
        (video(shades(2, 16, 4000), "mkv"), "ratio of its sides may be at most 200"),
        (LISTED + b"AAAA,!", "not base64"),
        (LISTED + b"," * video_file.MAX_LISTED, "at most 16,384 are taken"),
        (listed(FRAMES[:2]).replace(b"jpeg;", b"jpeg;fps=0;"), "from 0.01 to 1000"),
        (listed(FRAMES[:2]).replace(b"jpeg;", b"jpeg;fps=-1;"), "from 0.01 to 1000"),
        (listed(FRAMES[:2]).replace(b"jpeg;", b"jpeg;fps=1e-05;"), "from 0.01 to 1000"),
        (listed(FRAMES[:2]).replace(b"jpeg;", b"jpeg;fps=nan;"), "from 0.01 to 1000"),
        (listed(FRAMES[:2]).replace(b"jpeg;", b"jpeg;fps=two;"), "from 0.01 to 1000"),
        (LISTED + b"AAAA,AAAA", "not a PNG, JPEG, WebP or GIF"),
    ],
)
def test_what_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(BadImage, match=message):
        video_facts(data)


def test_limits() -> None:
    with pytest.raises(BadVideo, match=r"lasts 2.0 s; at most 1 s"):
        video_facts(video(FRAMES), VideoLimits(max_seconds=1))
    with pytest.raises(BadVideo, match="64 x 48 pixels; at most 3,000"):
        video_facts(video(FRAMES), VideoLimits(max_pixels=3000))
    with pytest.raises(BadImage, match="64 x 48 pixels; at most 3,000"):
        video_facts(listed(FRAMES), VideoLimits(max_pixels=3000))
    with pytest.raises(BadVideo, match="2 pictures, and no one at index 2"):
        list(read_frames(listed(FRAMES[:2]), [0, 2]))


def test_a_decoder_of_another_kind_does_not_run() -> None:
    data = io.BytesIO()
    with av.open(data, "w", format="matroska") as file:
        stream: Any = file.add_stream("ffv1", rate=5, width=64, height=48)
        stream.pix_fmt = "yuv420p"
        for pixels in FRAMES[:3]:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode(None))
    with pytest.raises(BadVideo, match=r"damaged|coded in a way"):
        video_facts(data.getvalue())
