"""Frames of a video become the patches that transformers' video processors make of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import frame_prompts
from tests.checkpoints.video_prompts import video_processor_class
from tests.checkpoints.whole_vision import write_whole_vision
from tests.gpu_worker.towers.video_files import listed, shades
from tokenloom.gpu_worker.towers.processor import Processor
from tokenloom.gpu_worker.towers.video_file import BadVideo

PLANS = {"qwen2_5_vl": (28, "qwen2_vl"), "qwen3_vl": (32, "qwen3_vl")}


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("kind", PLANS)
def test_patches_are_those_of_the_processor(kind: str, count: int, tmp_path: Path) -> None:
    """To a rounding of float32, and also where the last frame fills up its pair."""
    path, (side, name) = write_whole_vision(kind, tmp_path), PLANS[kind]
    frames = np.stack(shades(count, 90, 70))
    settings = json.loads((path / "preprocessor_config.json").read_text())
    theirs = video_processor_class(name)(
        **{key: value for key, value in settings.items() if not key.endswith(("_type", "_class"))}
    )
    expected = theirs(
        [frames] if count > 1 else [np.concatenate([frames] * 2)],
        do_sample_frames=False,
        do_convert_rgb=False,
        input_data_format="channels_last",
        return_tensors="np",
        cap_pixels_per_frame=False,
    )
    ((groups, lines, columns),) = expected["video_grid_thw"]
    plan = {"frames": list(range(count)), "height": int(lines) * side // 2, "width": int(columns) * side // 2}
    found = Processor(path).frames(listed(list(frames)), plan)
    assert found["image_grid_thw"].tolist() == [[groups, lines, columns]]
    assert np.abs(found["pixel_values"] - expected["pixel_values_videos"]).max() < 1e-5
    assert found["pixel_values"].flags.c_contiguous


@pytest.mark.parametrize(("width", "height"), [(90, 70), (40, 131)])
@pytest.mark.parametrize("kind", ["llava_onevision", "internvl", "smolvlm", "gemma4_e2b"])
def test_frames_are_those_of_the_processor(kind: str, width: int, height: int, tmp_path: Path) -> None:
    """Of models to which each is an image: to a rounding of float32, in the shape that their towers take."""
    path, frames = write_whole_vision(kind, tmp_path), np.stack(shades(3, width, height))
    theirs = video_processor_class(frame_prompts.family_of(kind))(**frame_prompts.settings_of(path))
    expected = theirs(
        [frames],
        do_sample_frames=False,
        do_convert_rgb=False,
        input_data_format="channels_last",
        return_tensors="np",
    )
    size = [56, 56]
    if kind == "gemma4_e2b":
        size = [16 * (int(each) + 1) for each in expected["video_position_ids"].reshape(-1, 2).max(0)[::-1]]
    plan = {"frames": [0, 1, 2], "height": size[0], "width": size[1]}
    found = Processor(path).frames(listed(list(frames)), plan)
    if kind == "gemma4_e2b":  # whose processor fills each frame up to the most patches
        number = found["video_position_ids"].shape[1]
        assert (expected["video_position_ids"][:, number:] == -1).all()
        assert (found["video_position_ids"] == expected["video_position_ids"][:, :number]).all()
        assert found["num_frames_per_video"].tolist() == [3]
        wanted = expected["pixel_values_videos"][:, :number]
    else:
        wanted = expected["pixel_values" if kind == "smolvlm" else "pixel_values_videos"]
        wanted = wanted[0] if kind == "internvl" else wanted
    values = found["pixel_values_videos" if kind in ("llava_onevision", "gemma4_e2b") else "pixel_values"]
    assert values.shape == wanted.shape
    assert np.abs(values - wanted).max() < 1e-5
    assert values.flags.c_contiguous


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"frames": [], "height": 28, "width": 28}, "1 to 4096 frames"),
        ({"frames": [1, 0], "height": 28, "width": 28}, "in order"),
        ({"frames": [0.5], "height": 28, "width": 28}, "by their indices"),
        ({"frames": [-1], "height": 28, "width": 28}, "by their indices"),
        ({"frames": [0], "height": 28}, "whole numbers from 1"),
        ({"frames": [0], "height": 28, "width": 1 << 20}, "whole numbers from 1"),
        ({"frames": [0], "height": 28, "width": 30}, "30 x 28 pixels is not made of squares of 28"),
        ({"frames": [0, 9], "height": 28, "width": 28}, "no one at index 9"),
        ({"frames": [0, 0], "height": 28 * 40, "width": 28 * 40}, "too many pixels once it is prepared"),
    ],
)
def test_plans_that_are_refused(plan: dict[str, Any], message: str, tmp_path: Path) -> None:
    processor = Processor(write_whole_vision("qwen2_vl", tmp_path))
    with pytest.raises(BadVideo, match=message):
        processor.frames(listed(shades(2)), plan, max_bytes=1 << 20)


def test_frames_that_are_refused(tmp_path: Path) -> None:
    processor = Processor(write_whole_vision("gemma4_e2b", tmp_path))
    with pytest.raises(BadVideo, match="50 x 48 pixels is not made of squares of 48"):
        processor.frames(listed(shades(2)), {"frames": [0], "height": 48, "width": 50})
    processor = Processor(write_whole_vision("internvl", tmp_path))
    with pytest.raises(BadVideo, match="too many pixels once it is prepared"):
        processor.frames(listed(shades(2)), {"frames": [0, 1], "height": 500, "width": 500}, max_bytes=1 << 20)


def test_other_families_are_shown_no_videos(tmp_path: Path) -> None:
    processor = Processor(write_whole_vision("llava", tmp_path))
    assert not processor.reads_videos
    with pytest.raises(BadVideo, match="shown no videos"):
        processor.frames(listed(shades(2)), {"frames": [0], "height": 28, "width": 28})


@pytest.mark.parametrize("value", [None, False])
def test_frames_are_rgb_whether_they_are_converted_or_not(value: bool | None, tmp_path: Path) -> None:
    path = write_whole_vision("internvl", tmp_path)
    (path / "video_preprocessor_config.json").write_text(json.dumps({"do_convert_rgb": value}))
    assert Processor(path).reads_videos


def test_settings_that_are_not_known_are_refused(tmp_path: Path) -> None:
    path = write_whole_vision("qwen2_vl", tmp_path)
    (path / "video_preprocessor_config.json").write_text(json.dumps({"do_resize": False}))
    with pytest.raises(ValueError, match="prepared without do_resize"):
        Processor(path)
    (path / "video_preprocessor_config.json").write_text(json.dumps({"patch_size": {"height": 14}}))
    with pytest.raises(ValueError, match="of another type"):
        Processor(path)
    path = write_whole_vision("internvl", tmp_path)
    (path / "video_preprocessor_config.json").write_text(json.dumps({"do_center_crop": True}))
    with pytest.raises(ValueError, match="prepared with do_center_crop"):
        Processor(path)
