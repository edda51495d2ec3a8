"""Where rows of images enter a step, and the rotary positions and limits of its tokens."""

import numpy as np
import pytest

from tokenloom.engine_core.data.embedding_rows import EmbedsSpan, MediaSpan
from tokenloom.gpu_worker.batch.media_rows import MediaRows, rope_positions, shift_behind

MEDIA = [
    MediaSpan(3, 6, 0, b"a", 6, grid=(1, 2, 3)),
    MediaSpan(11, 2, 0, b"b", 2),  # without a grid
    MediaSpan(14, 12, 0, b"c", 12, grid=(2, 3, 2)),
]
FRAMES = [0, 1, 2, *[3] * 6, 6, 7, 8, 9, 10, *[11] * 6, *[12] * 6, 14, 15]
LINES = [0, 1, 2, *[3] * 3, *[4] * 3, 6, 7, 8, 9, 10, *[11, 11, 12, 12, 13, 13] * 2, 14, 15]
COLUMNS = [0, 1, 2, *[3, 4, 5] * 2, 6, 7, 8, 9, 10, *[11, 12] * 6, 14, 15]


def array(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize("start", range(28))
def test_positions_count_lines_and_columns_of_images_in_every_chunk(start: int) -> None:
    whole = np.array([FRAMES, LINES, COLUMNS])
    for end in range(start, 29):
        assert np.array_equal(rope_positions(MEDIA, start, end), whole[:, start:end])
    assert shift_behind(MEDIA) == 14 - 26


def test_frames_of_a_video_stand_at_their_times() -> None:
    """Whole positions, counted in float32; text goes on behind the last frame, also beyond the index of its token."""
    video = [MediaSpan(2, 6, 0, b"v", 6, grid=(3, 1, 2), frame_step=2.3), MediaSpan(9, 2, 0, b"b", 2)]
    found = rope_positions(video, 0, 12)
    assert found[0].tolist() == [0, 1, 2, 2, 4, 4, 6, 6, 7, 8, 9, 10]
    assert found[2].tolist() == [0, 1, *[2, 3] * 3, 7, 8, 9, 10]
    assert shift_behind(video) == -1
    for start in range(12):
        assert np.array_equal(rope_positions(video, start, 12), found[:, start:])
    slow = [MediaSpan(0, 4, 0, b"v", 4, grid=(4, 1, 1), frame_step=10.0)]
    assert rope_positions(slow, 0, 6)[0].tolist() == [0, 10, 20, 30, 31, 32]
    assert shift_behind(slow) == 27


def rows_of(**spans: list[MediaSpan]) -> MediaRows:
    media = MediaRows(8)
    for row, each in spans.items():
        media.add(int(row[1:]), each)
    return media


def test_behind_images_a_position_is_the_index_and_a_shift() -> None:
    media = rows_of(r2=MEDIA, r4=[MEDIA[1]])
    rows, lengths = array(4, 2, 0), array(1, 2, 1)
    positions = array(20, 26, 27, 5)
    assert media.rope(rows, array(20, 26, 5), lengths, positions).tolist() == [20, 14, 15, 5]  # type: ignore[union-attr]
    among = media.rope(rows, array(20, 25, 5), lengths, array(20, 25, 26, 5))
    assert among is not None
    assert among.tolist() == [[20, 12, 14, 5], [20, 13, 14, 5], [20, 12, 14, 5]]
    assert media.rope(array(4, 0), array(12, 5), array(1, 1), array(12, 5)) is None
    assert media.turn(2)
    assert not media.turn(4)
    assert media.shifts.tolist() == [0, 0, -12, 0, 0, 0, 0, 0]
    media.remove(2)
    media.remove(2)
    assert media.rope(rows, array(20, 26, 5), lengths, positions) is None
    assert not media.shifts.any()


def test_rows_go_where_their_tokens_are() -> None:
    media = rows_of(r1=MEDIA)
    rows = np.arange(6, dtype=np.float32)[:, None]
    step = (["text", "images"], array(0, 1), array(0, 5), array(3, 9))
    found = media.step(*step, {"images": [EmbedsSpan(5, rows[2:6]), EmbedsSpan(11, rows[:2])]})
    assert [(start, part[:, 0].tolist()) for start, part in found.embeds] == [(3, [2, 3, 4, 5]), (9, [0, 1])]
    assert found.limits is None
    assert media.step(["images"], array(1), array(26), array(1), {}) == ([], None)


@pytest.mark.parametrize(
    ("given", "message"),
    [([], "6 tokens"), ([(5, 4)], "2 tokens"), ([(4, 4), (11, 2)], "beyond"), ([(5, 4), (11, 4)], "beyond")],
)
def test_a_token_of_an_image_needs_its_row(given: list[tuple[int, int]], message: str) -> None:
    spans = [EmbedsSpan(position, np.zeros((count, 2), np.float32)) for position, count in given]
    with pytest.raises(AssertionError, match=message):
        rows_of(r1=MEDIA).step(["images"], array(1), array(5), array(9), {"images": spans})


def test_tokens_of_a_whole_image_see_its_last_one() -> None:
    whole = [MediaSpan(2, 3, 0, b"a", 3, is_whole=True), MediaSpan(7, 2, 0, b"b", 2, is_whole=True)]
    media, rows = rows_of(r0=whole), np.zeros((3, 2), np.float32)
    step = (["text", "images"], array(1, 0), array(9, 3), array(2, 7))
    found = media.step(*step, {"images": [EmbedsSpan(3, rows[1:]), EmbedsSpan(7, rows[:2])]})
    assert found.limits is not None
    assert found.limits.tolist() == [9, 10, 4, 4, 5, 6, 8, 8, 9]
    with pytest.raises(AssertionError, match="inside an image"):
        media.step(["images"], array(0), array(0), array(3), {"images": [EmbedsSpan(2, rows[:1])]})
