"""What the measurement of images sends, and what it reads."""

import base64
import io
import os
import tempfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from benchmarks.mesh import images
from benchmarks.mesh.images import LARGE_SIDE, SIDE, MemoryGrowth, drawn, mesh_options, turn


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


async def test_growth_is_that_of_memory_and_of_files_without_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "pids_by_service", lambda mesh: {"gateway": [os.getpid()]})
    growth = MemoryGrowth(cast(Any, None), ("gateway",), every=0.001)

    async def work() -> int:
        with tempfile.TemporaryFile() as file:
            file.truncate(5 << 20)
            held = np.ones(8 << 20)  # 64 MiB
            growth.look()
            return len(held)

    assert await growth.during(work()) == 8 << 20
    report = growth.report()
    assert 40 < report["growth_mib"]["gateway"] < 200
    assert report["unnamed_files_mib"]["gateway"] >= 5
