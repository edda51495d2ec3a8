"""What the measurement of images sends, and what it reads."""

import base64
import io
from pathlib import Path

from PIL import Image

from benchmarks.mesh.images import LARGE_SIDE, SIDE, drawn, mesh_options, turn


def _file(url: str) -> bytes:
    return base64.b64decode(url.removeprefix("data:image/png;base64,"))


def test_images_have_their_sizes_and_differ() -> None:
    assert Image.open(io.BytesIO(_file(drawn(SIDE, 1, 16)))).size == (SIDE, SIDE)
    assert drawn(SIDE, 1, 16) == drawn(SIDE, 1, 16) != drawn(SIDE, 2, 16)
    assert 4_000_000 < len(_file(drawn(LARGE_SIDE, 1))) < 4_500_000


def test_a_turn_has_its_images_before_its_text() -> None:
    assert [part["type"] for part in turn(["a", "b"], "c")["content"]] == ["image_url", "image_url", "text"]


def test_the_engine_takes_the_flags() -> None:
    assert mesh_options(Path("model"), "--worker", "timed").flags["engine"][-2:] == ("--worker", "timed")
