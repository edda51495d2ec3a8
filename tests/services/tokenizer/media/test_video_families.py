"""Which frames of a video are shown, how they are scaled and what stands for them: as transformers' video processors
have it, from the numbers of frames and pixels alone."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from transformers.video_utils import VideoMetadata

from tests.checkpoints.video_prompts import video_processor_class
from tests.checkpoints.whole_vision import TOKENS, make_tokenizer
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.tokenizer.media.media_reader import MediaReader
from tokenloom.v1.tokenizer_pb2 import MediaSize
from tokenloom.v1.types_pb2 import MEDIA_KIND_IMAGE, MEDIA_KIND_VIDEO, MediaItem

VIDEOS = 275
"""Of each of the two families, at random."""
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2},
    "qwen3_vl": {"size": {"longest_edge": 25165824, "shortest_edge": 4096}, "patch_size": 16, "merge_size": 2},
}
"""As published, beside ``temporal_patch_size``, which is 2."""
RATES = (24.0, 25.0, 30.0, 30000 / 1001, 10.0, 1.0, 60.0)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer(TOKENS).backend_tokenizer


def reader_of(directory: Path, tokenizer: Tokenizer, kind: str, **entries: Any) -> MediaReader:
    """Return the reader of a published model's files. ``entries`` change those of the processor of videos."""
    vision = {"tokens_per_second": 2} if kind == "qwen2_5_vl" else {"deepstack_visual_indexes": [8, 16, 24]}
    (directory / "config.json").write_text(json.dumps({"model_type": kind, "vision_config": vision}))
    images = {"patch_size": 14, "merge_size": 2, "size": {"longest_edge": 10**6, "shortest_edge": 3136}}
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    (directory / "video_preprocessor_config.json").write_text(json.dumps({**SETTINGS[kind], **entries}))
    found = MediaReader.of_checkpoint(directory, tokenizer)
    assert found is not None
    return found


def video(width: int, height: int, frames: int, rate: float, **options: Any) -> MediaSize:
    return MediaSize(
        kind=MEDIA_KIND_VIDEO,
        width=width,
        height=height,
        frames=frames,
        frame_rate=rate,
        digest=b"d" * 32,
        options_json=json.dumps(options).encode() if options else b"",
    )


class Theirs:
    """Chooses and scales frames without looking at them, and writes them as the processor of transformers does."""

    def __init__(self, kind: str, **entries: Any) -> None:
        self._kind = kind
        settings = {**SETTINGS[kind], **entries}
        self._videos = video_processor_class("qwen2_vl" if kind == "qwen2_5_vl" else "qwen3_vl")(**settings)
        name = "Qwen2_5_VLProcessor" if kind == "qwen2_5_vl" else "Qwen3VLProcessor"
        self._processor = object.__new__(getattr(transformers, name))
        self._processor.video_processor, self._processor.video_token = self._videos, "<|video_pad|>"
        self._processor.vision_start_token = "<|vision_start|>"
        self._processor.vision_end_token = "<|vision_end|>"

    def text(self, size: MediaSize, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[str, list[int]]:
        """Return what stands for a video, and the frames that are shown."""
        sampling = {name: options[name] for name in ("fps", "num_frames") if name in options} or {"fps": 2}
        facts = VideoMetadata(total_num_frames=size.frames, fps=size.frame_rate)
        indices = np.asarray(self._videos.sample_frames(facts, **sampling))
        facts.frames_indices = indices
        bounds = dict(self._videos.size)
        bounds |= {"longest_edge": options["max_pixels"]} if "max_pixels" in options else {}
        bounds |= {"shortest_edge": options["min_pixels"]} if "min_pixels" in options else {}
        chosen: list[int] = []

        def note(_: Any, image: Any, size: Any, **__: Any) -> Any:
            chosen[:] = size.height, size.width
            return image

        base = type(self._videos).__mro__[1]
        with monkeypatch.context() as patched:
            patched.setattr(base, "resize", note)
            self._videos.resize(
                torch.empty(1, len(indices), 3, size.height, size.width, device="meta"),
                type(self._videos.size)(**{name: bounds[name] for name in ("longest_edge", "shortest_edge")}),
                3,
                self._videos.patch_size * self._videos.merge_size,
                2,
                self._videos.cap_pixels_per_frame,
            )
        patch = self._videos.patch_size
        grid = np.array([[-(-len(indices) // 2), chosen[0] // patch, chosen[1] // patch]])
        return self._processor.replace_video_token({"video_grid_thw": grid, "video_metadata": [facts]}, 0), [
            int(each) for each in indices
        ]


def random_video(rng: random.Random) -> tuple[MediaSize, dict[str, Any]]:
    frames = rng.choice([rng.randint(2, 40), rng.randint(40, 1200)])
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options["fps"] = rng.choice([1, 4, 0.5, 7])
    elif rng.random() < 0.3:
        options["num_frames"] = rng.randint(2, min(frames, 64))
    if rng.random() < 0.5:
        options["max_pixels"] = rng.choice([100_352, 602_112])
    width, height = rng.randint(40, 700), rng.randint(40, 700)
    return video(width, height, frames, rng.choice(RATES), **options), options


def expanded(reader: MediaReader, size: MediaSize, tokenizer: Tokenizer) -> tuple[list[int], MediaItem]:
    text, (item,) = reader.expand("a<|video_pad|>b", [size])
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    reader.place([item], ids)
    return ids, item


@pytest.mark.parametrize("is_capped", [False, True])
@pytest.mark.parametrize("kind", SETTINGS)
def test_texts_are_those_of_the_processors(
    kind: str, is_capped: bool, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the option of both that limits the pixels of each frame, and without."""
    entries = {"cap_pixels_per_frame": is_capped}
    reader, theirs = reader_of(tmp_path, tokenizer, kind, **entries), Theirs(kind, **entries)
    rng, shown = random.Random(5), 0
    for _ in range(VIDEOS):
        size, options = random_video(rng)
        text, indices = theirs.text(size, monkeypatch, **options)
        if text.count("<|video_pad|>") > 1 << 14:  # which no tiny context holds, and takes long to compare
            continue
        ids, item = expanded(reader, size, tokenizer)
        assert ids == tokenizer.encode(f"a{text}b", add_special_tokens=False).ids, (size, options)
        plan = json.loads(item.options_json)
        assert plan["frames"] == indices, (size, options)
        assert item.num_rows == sum(run.num_tokens for run in item.runs)
        assert item.grid_t * item.grid_h * item.grid_w == item.num_rows
        assert len(item.runs) == (1 if kind == "qwen2_5_vl" else item.grid_t)
        shown += 1
    assert shown > 0.6 * VIDEOS


def test_times_of_frames_are_rotary_positions(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Twice the seconds from one pair of frames to the next, as float32 numbers."""
    _, item = expanded(reader_of(tmp_path, tokenizer, "qwen2_5_vl"), video(56, 56, 60, 10.0), tokenizer)
    frames = json.loads(item.options_json)["frames"]
    seconds = torch.tensor(2 / (len(frames) / 60 * 10.0))
    assert item.frame_step == float(seconds * 2) == 2.0
    assert (item.grid_t, item.grid_h, item.grid_w) == (6, 2, 2)


def test_a_list_of_pictures_is_shown_whole(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for kind, numbers in (("qwen2_5_vl", range(5)), ("qwen3_vl", range(5))):
        (directory := tmp_path / kind).mkdir()
        reader = reader_of(directory, tokenizer, kind)
        _, item = expanded(reader, video(64, 64, 5, 0.0), tokenizer)
        assert json.loads(item.options_json)["frames"] == list(numbers)
        assert item.grid_t == 3
        _, fewer = expanded(reader, video(64, 64, 5, 0.0, num_frames=2), tokenizer)
        assert len(json.loads(fewer.options_json)["frames"]) == 2


def test_one_frame(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for kind in SETTINGS:
        (directory := tmp_path / kind).mkdir()
        _, item = expanded(reader_of(directory, tokenizer, kind), video(64, 64, 1, 25.0), tokenizer)
        assert (json.loads(item.options_json)["frames"], item.grid_t) == ([0], 1)


def test_images_and_videos_of_a_prompt_in_their_order(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Each takes the options that are its own."""
    reader = reader_of(tmp_path, tokenizer, "qwen3_vl")
    options = b'{"fps":1,"max_pixels":40000}'
    media = [
        video(64, 64, 8, 4.0, fps=1, max_pixels=40_000),
        MediaSize(kind=MEDIA_KIND_IMAGE, width=90, height=90, digest=b"i" * 32, options_json=options),
    ]
    text, items = reader.expand("<|video_pad|>a<|image_pad|>", media)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    reader.place(items, ids)
    assert [item.options_json for item in items] == [
        b'{"frames":[0,2,5,7],"height":64,"width":64}',
        b'{"max_pixels":40000}',
    ]
    assert items[0].runs[-1].position < items[1].runs[0].position
    assert {ids[run.position] for run in items[0].runs} == {reader.video_id}
    assert ids[items[1].runs[0].position] == reader.token_id
    kinds = [MEDIA_KIND_IMAGE, MEDIA_KIND_VIDEO]
    assert reader.order("<|video_pad|>a<|image_pad|>", kinds) == [1, 0]
    assert reader.order("<|video_pad|>", kinds) == [0, 1], "the text has other marks, which is said by expand"


def test_a_key_covers_what_is_shown(tmp_path: Path, tokenizer: Tokenizer) -> None:
    reader = reader_of(tmp_path, tokenizer, "qwen2_5_vl")
    videos = [
        video(56, 56, 60, 10.0),
        video(56, 56, 60, 20.0),
        video(56, 56, 60, 10.0, fps=1),
        video(56, 56, 61, 10.0),
        video(84, 56, 60, 10.0),
    ]
    keys = [expanded(reader, each, tokenizer)[1].key for each in videos]
    assert len(set(keys)) == len(videos)
    same = video(56, 56, 60, 10.0, num_frames=6)
    assert expanded(reader, same, tokenizer)[1].key == keys[2], "other options, but the same frames"


@pytest.mark.parametrize(
    ("kind", "size", "message"),
    [
        ("qwen2_5_vl", video(56, 56, 0, 10.0), "it is empty"),
        ("qwen2_5_vl", video(1, 401, 60, 10.0), "200 times as long"),
        ("qwen2_5_vl", video(56, 56, 3, 10.0, num_frames=8), "it has 3 frames, and 8 of them are asked for"),
        ("qwen3_vl", video(56, 56, 60, 10.0, fps=1, num_frames=4), "exclude each other"),
        ("qwen3_vl", video(56, 56, 60, 10.0, num_frames=769), "from 1 to 768"),
        ("qwen3_vl", video(56, 56, 60, 10.0, fps=1001), "at most 1000"),
        ("qwen3_vl", video(56, 56, 60, 10.0, max_soft_tokens=70), "there are: fps, max_pixels, min_pixels, num_frames"),
        ("qwen3_vl", video(56, 56, 60, 10.0, num_frames=True), "not an option"),
        ("qwen2_5_vl", video(3500, 3500, 10_000, 10.0), "tokens, of 384 x"),
    ],
)
def test_what_is_not_shown_is_refused(
    kind: str, size: MediaSize, message: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        expanded(reader_of(tmp_path, tokenizer, kind), size, tokenizer)


def test_other_families_refuse_videos_by_name(tmp_path: Path, tokenizer: Tokenizer) -> None:
    files = {"config.json": {"model_type": "llava", "vision_config": {}}, "preprocessor_config.json": {"crop_size": 28}}
    for name, values in files.items():
        (tmp_path / name).write_text(json.dumps(values))
    reader = MediaReader.of_checkpoint(tmp_path, tokenizer)
    assert reader is not None
    assert reader.kinds == [MEDIA_KIND_IMAGE]
    with pytest.raises(InvalidArgument, match="reads text and images, and no videos"):
        reader.expand("<image>", [video(56, 56, 4, 1.0)])
