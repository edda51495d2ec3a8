"""Which frames of a video are shown to models that read each as an image, and what stands for them: as transformers'
processors have it, from the numbers of frames and pixels alone."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers.models.gemma4.processing_gemma4 import get_aspect_ratio_preserving_size
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE
from transformers.video_utils import VideoMetadata

from tests.checkpoints.frame_prompts import writer_of
from tests.checkpoints.video_prompts import video_processor_class
from tests.checkpoints.whole_vision import TOKENS, make_tokenizer
from tests.services.tokenizer.media.test_video_families import RATES, video
from tokenloom.model_files.checkpoint import CheckpointInfo
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.tokenizer.chat_template import ChatTemplate, MaskingTemplate
from tokenloom.services.tokenizer.media.media_reader import MediaReader
from tokenloom.services.tokenizer.media.media_text import in_words
from tokenloom.services.tokenizer.media.video_families import USUAL_FRAMES
from tokenloom.services.tokenizer.output_format import PARSED_MARKS, control_tokens
from tokenloom.services.tokenizer.spelled_tokens import TokenFinder
from tokenloom.v1.tokenizer_pb2 import MediaSize
from tokenloom.v1.types_pb2 import MEDIA_KIND_IMAGE, MEDIA_KIND_VIDEO, MediaItem

VIDEOS = 150
"""Of each family, at random."""
SETTINGS: dict[str, dict[str, Any]] = {
    "llava_onevision": {"size": {"height": 384, "width": 384}},
    "internvl": {"size": {"height": 448, "width": 448}, "initial_shift": True},
    "smolvlm": {
        "max_image_size": {"longest_edge": 512},
        "size": {"longest_edge": 2048},
        "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}},
    },
    "gemma4": {"max_soft_tokens": 70, "num_frames": 32, "patch_size": 16, "pooling_kernel_size": 3},
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "llava_onevision": {"num_image_tokens": 729},
    "internvl": {"image_seq_length": 256},
    "smolvlm": {"image_seq_len": 64},
    "gemma4": {},
}
"""As published."""
TOKENS_OF = {"llava_onevision": "<video>", "internvl": "<IMG_CONTEXT>", "smolvlm": "<image>", "gemma4": "<|video|>"}
MARKS = {family: "<|video|>" if family == "gemma4" else "<video>" for family in SETTINGS}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer(TOKENS).backend_tokenizer


def reader_of(directory: Path, tokenizer: Tokenizer, family: str, **entries: Any) -> MediaReader:
    """Return the reader of a published model's files. ``entries`` change those of the processor of videos."""
    settings = SETTINGS[family] | entries
    images = (
        settings if family == "smolvlm" else {"size": {"height": 384, "width": 384}, "image_grid_pinpoints": [[1, 1]]}
    )
    (directory / "config.json").write_text(json.dumps({"model_type": family, "vision_config": {"patch_size": 14}}))
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    (directory / "processor_config.json").write_text(json.dumps({**PROCESSORS[family], "video_processor": settings}))
    found = MediaReader.of_checkpoint(directory, tokenizer)
    assert found is not None
    return found


class Theirs:
    """Chooses frames without looking at them, and writes them as the processor of transformers does."""

    def __init__(self, family: str) -> None:
        self._family = family
        self._videos = video_processor_class(family)(**SETTINGS[family])
        self._writer = writer_of(family, **PROCESSORS[family])

    def text(self, size: MediaSize, options: dict[str, Any]) -> tuple[str, list[int]]:
        """Return what stands for a video, and the frames that are shown."""
        facts = VideoMetadata(total_num_frames=size.frames, fps=size.frame_rate, duration=size.frames / size.frame_rate)
        sampling = {name: options[name] for name in ("fps", "num_frames") if name in options}
        if self._family == "gemma4" and "fps" in sampling:  # which its class refuses beside the number that it has
            sampling = {"num_frames": max(1, int(size.frames / size.frame_rate * sampling["fps"]))}
        if self._family != "smolvlm" and not sampling:
            sampling = {"num_frames": min(USUAL_FRAMES, size.frames)}
        indices = np.asarray(self._videos.sample_frames(facts, **sampling))
        facts.frames_indices = indices
        shape = (len(indices), 3, 1, 1)
        prepared: dict[str, Any] = {"pixel_values_videos": [np.zeros(shape)], "video_metadata": [facts]}
        prepared["pixel_values"] = np.zeros((1, *shape))
        if self._family == "gemma4":
            most = options.get("max_soft_tokens", 70)
            height, width = get_aspect_ratio_preserving_size(size.height, size.width, 16, most * 9, 3)
            prepared["num_soft_tokens_per_video"] = [height * width // 48**2]
        return self._writer.replace_video_token(prepared, 0), [int(each) for each in indices]


def random_video(rng: random.Random, family: str) -> tuple[MediaSize, dict[str, Any]]:
    rate = rng.choice(RATES)
    frames = rng.choice([rng.randint(1, 40), rng.randint(40, 6000)])
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options["num_frames"] = rng.randint(1, min(frames, 100))
    if rng.random() < 0.3 and (family == "smolvlm" or not options):
        fps = rng.choice([0.5, 1, 2, 7])
        if family == "smolvlm" or 1 <= int(frames / rate * fps) <= min(frames, 128):  # others are refused, or cut
            options["fps"] = fps
    if family == "gemma4" and rng.random() < 0.3:
        options["max_soft_tokens"] = rng.choice([140, 280])
    return video(rng.randint(40, 700), rng.randint(40, 700), frames, rate, **options), options


def expanded(reader: MediaReader, family: str, size: MediaSize, tokenizer: Tokenizer) -> tuple[list[int], MediaItem]:
    text, (item,) = reader.expand(f"a{MARKS[family]}b", [size])
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    reader.place([item], ids)
    return ids, item


@pytest.mark.parametrize("family", SETTINGS)
def test_texts_are_those_of_the_processors(family: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    reader, theirs, rng = reader_of(tmp_path, tokenizer, family), Theirs(family), random.Random(3)
    for _ in range(VIDEOS):
        size, options = random_video(rng, family)
        text, indices = theirs.text(size, options)
        ours, (item,) = reader.expand(f"a{MARKS[family]}b", [size])
        assert ours == f"a{text}b", (size, options)
        plan = json.loads(item.options_json)
        assert plan["frames"] == indices, (size, options)
        assert item.num_rows == text.count(TOKENS_OF[family])
        assert (item.grid_t, item.frame_step) == (0, 0.0), "rotary positions count on"


@pytest.mark.parametrize("family", SETTINGS)
def test_rows_have_places(family: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """LLaVA-OneVision has one run of rows, the others one for each frame."""
    reader = reader_of(tmp_path, tokenizer, family)
    ids, item = expanded(reader, family, video(64, 48, 12, 4.0), tokenizer)
    own = [place for place, each in enumerate(ids) if each == reader.video_id]
    covered = [place for run in item.runs for place in range(run.position, run.position + run.num_tokens)]
    assert covered == own
    frames = len(json.loads(item.options_json)["frames"])
    assert len(item.runs) == (1 if family == "llava_onevision" else frames)


def test_frames_with_the_token_of_images_stand_between_them(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """What SmolVLM and InternVL write for a frame is also in an image."""
    reader = reader_of(tmp_path, tokenizer, "internvl", num_frames=2)
    assert reader.video_id == reader.token_id
    image = MediaSize(kind=MEDIA_KIND_IMAGE, width=90, height=90, digest=b"i" * 32)
    media = [image, video(64, 64, 8, 4.0), image]
    text, items = reader.expand("<IMG_CONTEXT>a<video>b<IMG_CONTEXT>", media)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    reader.place(items, ids)
    assert [item.kind for item in items] == [MEDIA_KIND_IMAGE, MEDIA_KIND_VIDEO, MEDIA_KIND_IMAGE]
    positions = [run.position for item in items for run in item.runs]
    assert positions == sorted(positions)
    assert [len(item.runs) for item in items] == [1, 2, 1]
    assert sum(item.num_rows for item in items) == ids.count(reader.token_id)
    with pytest.raises(InvalidArgument, match="rows of the images and videos; each row takes one"):
        reader.place(reader.items(media), [*ids, reader.token_id])


def test_a_list_of_pictures_is_shown_whole(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """One for each second, and more of them than of a video where nothing else is said."""
    for family in SETTINGS:
        (directory := tmp_path / family).mkdir()
        reader = reader_of(directory, tokenizer, family)
        _, item = expanded(reader, family, video(64, 64, 70, 0.0), tokenizer)
        assert json.loads(item.options_json)["frames"] == list(range(70))
        _, fewer = expanded(reader, family, video(64, 64, 70, 0.0, num_frames=2), tokenizer)
        assert len(json.loads(fewer.options_json)["frames"]) == 2


def test_more_frames_a_second_than_a_video_has(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for family in ("llava_onevision", "internvl", "gemma4"):
        (directory := tmp_path / family).mkdir()
        reader = reader_of(directory, tokenizer, family)
        _, item = expanded(reader, family, video(64, 64, 9, 3.0, fps=30), tokenizer)
        assert json.loads(item.options_json)["frames"] == list(range(9))


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("llava_onevision", video(56, 56, 0, 10.0), "it is empty"),
        ("llava_onevision", video(56, 56, 3, 10.0, num_frames=8), "it has 3 frames, and 8 of them are asked for"),
        ("internvl", video(56, 56, 60, 10.0, fps=1, num_frames=4), "exclude each other"),
        ("gemma4", video(56, 56, 600, 10.0, num_frames=129), "from 1 to 128"),
        ("gemma4", video(56, 56, 60, 10.0, max_soft_tokens=71), "must be one of 70"),
        ("smolvlm", video(56, 56, 60, 10.0, fps=1001), "at most 1000"),
        ("smolvlm", video(56, 56, 60, 10.0, max_pixels=70), "there are: fps, num_frames"),
    ],
)
def test_what_is_not_shown_is_refused(
    family: str, size: MediaSize, message: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        expanded(reader_of(tmp_path, tokenizer, family), family, size, tokenizer)


@pytest.mark.parametrize(("shift", "frames"), [(False, [0, 3, 6]), (0, [0, 3, 6]), (2.5, [2, 5, 8]), (None, [1, 4, 7])])
def test_where_frames_begin(shift: float | None, frames: list[int], tmp_path: Path, tokenizer: Tokenizer) -> None:
    reader = reader_of(tmp_path, tokenizer, "internvl", initial_shift=shift, num_frames=3)
    _, item = expanded(reader, "internvl", video(64, 64, 9, 3.0), tokenizer)
    assert json.loads(item.options_json)["frames"] == frames
    facts = VideoMetadata(total_num_frames=9, fps=3.0)
    theirs = video_processor_class("internvl")().sample_frames(facts, num_frames=3, initial_shift=shift)
    assert theirs.tolist() == frames


def test_a_shift_that_is_no_number_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidArgument, match="initial_shift must be true, false or a number from 0 on"):
        reader_of(tmp_path, tokenizer, "internvl", initial_shift="middle")
    reader = reader_of(tmp_path, tokenizer, "internvl", initial_shift=20)
    with pytest.raises(InvalidArgument, match="it has 9 frames, and the first that is shown is at 20"):
        expanded(reader, "internvl", video(64, 64, 9, 3.0), tokenizer)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (1, "one"),
        (13, "thirteen"),
        (20, "twenty"),
        (64, "sixty-four"),
        (100, "one hundred"),
        (101, "one hundred and one"),
        (128, "one hundred and twenty-eight"),
    ],
)
def test_numbers_in_words(number: int, words: str) -> None:
    """As num2words has them, which SmolVLM's processor calls."""
    assert in_words(number) == words


_PUBLISHED = DEFAULT_CHAT_TEMPLATE.replace("{% elif line['type'] == 'video' %}{{ '<video>' }}", "")
"""That of SmolVLM2's files, which writes nothing for a video."""


def test_a_template_without_a_mark_for_videos_gets_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "smolvlm"}')
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": _PUBLISHED}))
    assert CheckpointInfo.load(tmp_path).chat_template == DEFAULT_CHAT_TEMPLATE
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": DEFAULT_CHAT_TEMPLATE}))
    assert CheckpointInfo.load(tmp_path).chat_template == DEFAULT_CHAT_TEMPLATE
    (tmp_path / "config.json").write_text('{"model_type": "idefics3"}')
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": _PUBLISHED}))
    assert CheckpointInfo.load(tmp_path).chat_template == _PUBLISHED


def test_a_mark_that_is_no_token_is_plain_text_in_a_users_words(tmp_path: Path) -> None:
    own = make_tokenizer([token for token in TOKENS if token != "<video>"]).backend_tokenizer
    reader = reader_of(tmp_path, own, "smolvlm")
    template = ChatTemplate(DEFAULT_CHAT_TEMPLATE)
    controls = [*control_tokens(own, DEFAULT_CHAT_TEMPLATE), *reader.marks]
    masking = MaskingTemplate(template, TokenFinder(controls), PARSED_MARKS)
    parts = [{"type": "video"}, {"type": "text", "text": "Is <video> a tag?"}]
    rendered = masking.render([{"role": "user", "content": parts}], None, None)
    text, (item,) = reader.expand(rendered.text, [video(64, 64, 8, 4.0)])
    assert text.count("<video>") == 0
    assert "<video>" in rendered.masks.values()
    assert item.num_rows == 2 * 64
