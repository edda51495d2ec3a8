"""The requests with images, with sounds, and for transcriptions."""

import base64
import io
import random
import wave
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks.chaos.clients.media import (
    IMAGE,
    RATE,
    SOUND,
    VIDEO,
    Medium,
    image_calls,
    png,
    sound_calls,
    transcript_cases,
    wav,
    with_new_files,
)
from benchmarks.chaos.clients.mix import FEATURES, Case, make_cases

MEDIA = pytest.mark.parametrize("medium", [IMAGE, SOUND, VIDEO], ids=lambda medium: str(medium.name))


def _cases(medium: Medium, seed: int) -> list[Case]:
    count = 3 * (len(FEATURES) + len(medium.features))
    cases = make_cases(random.Random(seed), 256, (5, 9), count, medium.features)
    return [case for case in cases if _files(case)]


def _files(case: Case) -> list[bytes]:
    parts: list[Mapping[str, Any]] = [
        part for turn in case.messages if not isinstance(turn["content"], str) for part in turn["content"]
    ]
    images = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    sounds = [part["input_audio"]["data"] for part in parts if part["type"] == "input_audio"]
    videos = [part["video_url"]["url"] for part in parts if part["type"] == "video_url"]
    pictures = [data for url in videos for data in url.removeprefix("data:video/jpeg;base64,").split(",")]
    files = (*images, *sounds, *pictures)
    return [base64.b64decode(data.removeprefix("data:image/png;base64,")) for data in files]


def _content(file: bytes) -> np.ndarray[Any, Any]:
    """Return the pixels or the samples of a file."""
    if not file.startswith(b"RIFF"):
        return np.asarray(Image.open(io.BytesIO(file)))
    with wave.open(io.BytesIO(file)) as read:
        assert (read.getframerate(), read.getnchannels(), read.getsampwidth()) == (RATE, 1, 2)
        return np.frombuffer(read.readframes(read.getnframes()), "<i2")


def test_a_file_has_what_it_was_made_from() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert np.array_equal(_content(png(pixels)), pixels)
    samples = np.arange(-5, 900, dtype=np.int16)
    assert np.array_equal(_content(wav(samples)), samples)


@MEDIA
def test_each_kind_comes_streamed_and_whole_with_one_file_or_several(medium: Medium) -> None:
    cases = _cases(medium, 0)
    assert cases == _cases(medium, 0) != _cases(medium, 1)
    for name, _ in medium.features:
        assert {case.streamed for case in cases if case.name.startswith(f"{name} ")} == {True, False}
    assert {len(_files(case)) for case in cases} >= ({2, 5} if medium is VIDEO else {1, 3})  # a video's pictures
    assert {len(case.messages) for case in cases} == {1, 3}
    assert all(case.options["temperature"] == 0 or "seed" in case.options for case in cases)


@MEDIA
def test_new_files_have_the_same_content(medium: Medium) -> None:
    for case in _cases(medium, 0):
        first, second = (with_new_files(case, number) for number in (1, 2))
        if not case.has_new_files:
            assert first == case
            continue
        files = [_files(each) for each in (case, first, second)]
        assert len({file for each in files for file in each}) == 3 * len(files[0])
        for drawn, renewed, again in zip(*files, strict=True):
            assert np.array_equal(_content(drawn), _content(renewed))
            assert np.array_equal(_content(drawn), _content(again))


def test_each_dialect_sends_a_file() -> None:
    calls = image_calls(random.Random(0), 9)
    assert {case.call for case in calls} == {"POST /v1/messages", "POST /v1/responses", "POST /api/chat"}
    assert all("iVBORw0KGgo" in str(case.options) for case in calls)  # how a PNG begins in base64
    calls = sound_calls(random.Random(0), 9)
    assert {case.call for case in calls} == {"POST /v1/responses"}
    assert all("UklGR" in str(case.options) for case in calls)  # how a RIFF begins in base64


def test_transcriptions_have_every_form_and_new_files_of_the_same_samples() -> None:
    cases = transcript_cases(random.Random(0), 14)
    assert len({case.name for case in cases}) == len(cases) == 21
    assert {case.call for case in cases} == {
        "POST /v1/audio/transcriptions",
        "POST /v1/audio/translations",
        "Transcribe",
    }
    assert {case.streamed for case in cases} == {True, False}
    assert max(len(_content(case.options["file"])) for case in cases) > 30 * RATE, "one is heard in pieces"
    for case in cases:
        renewed = with_new_files(case, 3).options["file"]
        assert (renewed != case.options["file"]) == case.has_new_files
        assert np.array_equal(_content(renewed), _content(case.options["file"]))
    assert {case.has_new_files for case in cases} == {True, False}
