"""The requests with images."""

import base64
import io
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.chaos.clients.images import IMAGE_FEATURES, image_calls, png, with_new_files
from benchmarks.chaos.clients.mix import FEATURES, Case, make_cases

NUM_FEATURES = len(FEATURES) + len(IMAGE_FEATURES)


def _cases(seed: int) -> list[Case]:
    cases = make_cases(random.Random(seed), 256, (5, 9), 3 * NUM_FEATURES, IMAGE_FEATURES)
    return [case for case in cases if _files(case)]


def _files(case: Case) -> list[bytes]:
    parts: list[Mapping[str, Any]] = [
        part for turn in case.messages if not isinstance(turn["content"], str) for part in turn["content"]
    ]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    return [base64.b64decode(url.removeprefix("data:image/png;base64,")) for url in urls]


def test_a_file_has_the_pixels_it_was_drawn_from() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(png(pixels)))), pixels)


def test_each_kind_comes_streamed_and_whole_with_one_image_or_several() -> None:
    cases = _cases(0)
    assert cases == _cases(0) != _cases(1)
    for name, _ in IMAGE_FEATURES:
        assert {case.streamed for case in cases if case.name.startswith(f"{name} ")} == {True, False}
    assert {len(_files(case)) for case in cases} >= {1, 3}
    assert {len(case.messages) for case in cases} == {1, 3}
    assert all(case.options["temperature"] == 0 or "seed" in case.options for case in cases)


def test_new_files_have_the_same_pixels() -> None:
    for case in _cases(0):
        first, second = (with_new_files(case, number) for number in (1, 2))
        if not case.has_new_files:
            assert first == case
            continue
        files = [_files(each) for each in (case, first, second)]
        assert len({file for each in files for file in each}) == 3 * len(files[0])
        for drawn, renewed, again in zip(*files, strict=True):
            pixels = [np.asarray(Image.open(io.BytesIO(file))) for file in (drawn, renewed, again)]
            assert np.array_equal(pixels[0], pixels[1])
            assert np.array_equal(pixels[0], pixels[2])


def test_each_dialect_sends_an_image() -> None:
    calls = image_calls(random.Random(0), 9)
    assert {case.call for case in calls} == {"POST /v1/messages", "POST /v1/responses", "POST /api/chat"}
    assert all("iVBORw0KGgo" in str(case.options) for case in calls)  # how a PNG begins in base64
