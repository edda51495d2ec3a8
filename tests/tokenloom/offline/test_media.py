"""Images and sounds in the offline API: in any form, in chats and in prompts, over the hash worker and real towers."""

import base64
import io
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from tests.checkpoints.whole_sound import RATE, sound, write_whole_sound
from tests.checkpoints.whole_vision import write_whole_vision
from tokenloom import LLM, SamplingParams
from tokenloom.engine_core.data.embedding_rows import EmbedsSpan
from tokenloom.engine_core.fake_workers.hash_row import embeds_ids
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens
from tokenloom.gpu_worker.towers.processor import Processor
from tokenloom.gpu_worker.towers.sound_processor import SoundProcessor
from tokenloom.gpu_worker.towers.sound_tower import SoundTower
from tokenloom.gpu_worker.towers.tower import Tower
from tokenloom.offline.media import GivenMedia, read_image, take_media

Samples = npt.NDArray[np.float32]
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
OPTIONS: dict[str, Any] = {"worker": "hash", "num_gpu_blocks_override": 400, "block_size": 4, "dtype": "float32"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whole_vision("llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    llm = LLM(str(path), **OPTIONS)
    yield llm
    llm.close()


def picture(seed: int, size: tuple[int, int] = (40, 30)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def question(*images: object, text: str = "what is it?") -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def expected(path: Path, llm: LLM, prompt_ids: list[int], *images: Image.Image) -> list[int]:
    """Return what the hash worker makes of a prompt whose rows are those of the checkpoint's tower."""
    tower, processor = Tower(path, "float32"), Processor(path)
    token = llm.get_tokenizer().token_to_id("<image>")
    rows = [row for image in images for row in tower.rows(processor.pixels(png(image)))]
    ids = embeds_ids(EmbedsSpan(0, np.stack(rows)))
    assert prompt_ids.count(token) == len(ids)
    hashed = iter(ids)
    return expected_tokens([next(hashed) if each == token else each for each in prompt_ids], 6, vocab_size(llm))


def vocab_size(llm: LLM) -> int:
    return llm._builder.limits.vocab_size


def test_an_image_of_any_form_is_the_same(llm: LLM, path: Path, tmp_path: Path) -> None:
    image = picture(0)
    (tmp_path / "a.png").write_bytes(png(image))
    url = f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"
    forms = [image, tmp_path / "a.png", str(tmp_path / "a.png"), f"file://{tmp_path}/a.png", url, png(image)]
    outputs = llm.chat([question(form) for form in forms], PARAMS, use_tqdm=False)
    wanted = expected(path, llm, outputs[0].prompt_token_ids, image)
    assert [output.outputs[0].token_ids for output in outputs] == [wanted] * len(forms)


def test_other_images_give_other_tokens(llm: LLM, path: Path) -> None:
    images = [picture(seed) for seed in range(3)]
    prompts = [question(images[0]), question(images[1]), question(*images), question(text="no image")]
    outputs = llm.chat(prompts, PARAMS, use_tqdm=False)
    shown = [images[:1], images[1:2], images, []]
    for output, each in zip(outputs[:3], shown, strict=False):
        assert output.outputs[0].token_ids == expected(path, llm, output.prompt_token_ids, *each)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 4


def test_a_second_turn_computes_no_rows(llm: LLM) -> None:
    turns = question(picture(0))
    (first,) = llm.chat(turns, PARAMS, use_tqdm=False)
    llm.reset_mm_cache()
    turns += [{"role": "assistant", "content": "a square"}, {"role": "user", "content": "which colour?"}]
    (second,) = llm.chat(turns, PARAMS, use_tqdm=False)
    assert second.num_cached_tokens is not None
    assert second.num_cached_tokens >= first.prompt_token_ids.count(llm.get_tokenizer().token_to_id("<image>"))
    assert not llm._media._rows


def test_a_prompt_of_text_has_images_at_its_marks(llm: LLM, path: Path) -> None:
    image, other = picture(0), picture(1)
    prompts = [
        {"prompt": "<image> what?", "multi_modal_data": {"image": image}},
        {"prompt": "a <image> b <image> c", "multi_modal_data": {"image": [image, other]}},
        {"prompt": "plain", "multi_modal_data": {"image": []}},
    ]
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
    for output, images in zip(outputs, ([image], [image, other], []), strict=True):
        assert output.outputs[0].token_ids == (
            expected(path, llm, output.prompt_token_ids, *images)
            if images
            else expected_tokens(output.prompt_token_ids, 6, vocab_size(llm))
        )


def test_samples_and_preempted_requests_get_their_rows(path: Path) -> None:
    llm = LLM(str(path), **{**OPTIONS, "num_gpu_blocks_override": 30, "max_model_len": 100, "max_num_seqs": 3})
    images = [picture(seed) for seed in range(3)]
    params = SamplingParams(max_tokens=6, ignore_eos=True, n=2)
    outputs = llm.chat([question(image) for image in images], params, use_tqdm=False)
    for output, image in zip(outputs, images, strict=True):
        wanted = expected(path, llm, output.prompt_token_ids, image)
        assert [sample.token_ids for sample in output.outputs] == [wanted, wanted]
    llm.close()


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ({"prompt": "no mark", "multi_modal_data": {"image": b"x"}}, "header|not a PNG"),
        ({"prompt": "no mark", "multi_modal_data": {"image": picture(0)}}, "0 marks <image> for 1 images"),
        (
            {"prompt": "<image>", "multi_modal_data": {"smell": 1}},
            "with image, video or audio, and nothing else",
        ),
        ({"prompt": "<image>", "multi_modal_data": {"video": 1}}, "a video must be a path"),
        ({"prompt": "<image>", "multi_modal_data": {"video": []}}, "a video must be a path"),
        ({"prompt": "<image>", "multi_modal_data": {"image": 3}}, "must be a picture of PIL, a path"),
        ({"prompt": "<image>", "multi_modal_data": {"image": "/no/such/file"}}, "cannot be read"),
        ({"prompt": "<image>", "multi_modal_data": {"image": "https://example.com/a.png"}}, "URLs are not fetched"),
        ({"prompt_token_ids": [1], "multi_modal_data": {"image": picture(0)}}, "needs a prompt of text"),
    ],
)
def test_what_cannot_be_an_image_is_refused(llm: LLM, prompt: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        llm.generate(prompt, PARAMS, use_tqdm=False)


def test_an_image_that_breaks_ends_its_request_alone(llm: LLM) -> None:
    damaged = png(picture(0, (400, 300)))[:2000]
    good, bad = llm.chat([question(picture(1)), question(damaged)], PARAMS, use_tqdm=False)
    assert len(good.outputs[0].token_ids) == 6
    assert "image 1 of the prompt cannot be read" in (bad.error or "")


def test_limits_and_models_of_text_refuse_images(path: Path) -> None:
    llm = LLM(str(path), **OPTIONS, limit_mm_per_prompt={"image": 1, "audio": 0})
    with pytest.raises(ValueError, match="2 images; at most 1"):
        llm.chat(question(picture(0), picture(1)), PARAMS, use_tqdm=False)
    llm.close()
    text = LLM("tokenloom-demo", worker="hash", num_gpu_blocks_override=64)
    with pytest.raises(ValueError, match="reads text only"):
        text.generate({"prompt": "a", "multi_modal_data": {"image": picture(0)}}, PARAMS, use_tqdm=False)
    text.close()


def test_parts_become_marks_in_their_order() -> None:
    media: list[GivenMedia] = []
    message = {
        "role": "user",
        "content": [
            "a",
            {"type": "image", "image": b"1"},
            {"type": "text", "text": "b"},
            {"type": "input_image", "image_url": b"2"},
            {"type": "image_pil", "image_pil": b"3"},
        ],
    }
    taken = take_media(message, media)
    mark = {"type": "image"}
    assert taken["content"] == ["a", mark, {"type": "text", "text": "b"}, mark, mark]
    assert [each.file for each in media] == [b"1", b"2", b"3"]
    plain = {"role": "user", "content": "a"}
    assert take_media(plain, media) is plain


@pytest.mark.parametrize("url", ["data:image/png,abc", "data:image/png;base64", "data:image/png;base64,%%"])
def test_data_urls_are_base64(url: str) -> None:
    with pytest.raises(ValueError, match="a data: URL"):
        read_image(url)


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    llm = LLM(str(write_whole_sound("qwen2_audio", tmp_path_factory.mktemp("sound"))), **OPTIONS)
    yield llm
    llm.close()


def wav(samples: Samples, rate: int = RATE) -> bytes:
    """Return a file whose samples are exactly those of 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(rate)
        written.writeframes((samples * 32768).astype("<i2").tobytes())
    return file.getvalue()


def rounded(samples: Samples) -> Samples:
    return (samples * 32768).astype("<i2").astype(np.float32) / 32768


def heard(*parts: dict[str, Any], text: str = "What is it?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def expected_of_sounds(llm: LLM, prompt_ids: list[int], *sounds: Samples) -> list[int]:
    """Return what the hash worker makes of a prompt whose rows are those of the checkpoint's tower."""
    tower, processor = SoundTower(llm.llm_engine._path, "float32"), SoundProcessor(llm.llm_engine._path)
    rows = [row for each in sounds for row in tower.rows(processor.features(each))]
    ids = embeds_ids(EmbedsSpan(0, np.stack(rows)))
    token = llm.get_tokenizer().token_to_id("<|AUDIO|>")
    assert prompt_ids.count(token) == len(ids)
    hashed = iter(ids)
    return expected_tokens([next(hashed) if each == token else each for each in prompt_ids], 6, vocab_size(llm))


def test_a_sound_of_any_form_is_the_same(hearing: LLM, tmp_path: Path) -> None:
    samples = rounded(sound(1.0))
    (tmp_path / "a.wav").write_bytes(wav(samples))
    data = base64.b64encode(wav(samples)).decode()
    parts: list[dict[str, Any]] = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}},
        {"type": "audio_url", "audio_url": f"file://{tmp_path}/a.wav"},
        *({"type": "audio", "audio": form} for form in (samples, (samples, RATE), samples.tolist(), wav(samples))),
        {"type": "audio", "audio": np.stack([samples, samples])},  # channels
        {"type": "audio", "audio": torch.from_numpy(samples)},
    ]
    outputs = hearing.chat([heard(part) for part in parts], PARAMS, use_tqdm=False)
    wanted = expected_of_sounds(hearing, outputs[0].prompt_token_ids, samples)
    assert [output.error for output in outputs] == [None] * len(parts)
    assert [output.outputs[0].token_ids for output in outputs] == [wanted] * len(parts)


def test_a_prompt_of_text_has_sounds_at_its_marks(hearing: LLM) -> None:
    one, two = sound(0.5, 1), sound(0.7, 2)
    given: list[Any] = [one, (one, RATE), [one, (two, RATE)], []]
    mark = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    prompts = [
        {"prompt": f"{mark * max(count, 0)} what?", "multi_modal_data": {"audio": each}}
        for each, count in zip(given, (1, 1, 2, 0), strict=True)
    ]
    outputs = hearing.generate(prompts, PARAMS, use_tqdm=False)
    for output, sounds in zip(outputs, ([one], [one], [one, two]), strict=False):
        assert output.outputs[0].token_ids == expected_of_sounds(hearing, output.prompt_token_ids, *sounds)
    assert outputs[3].outputs[0].token_ids == expected_tokens(outputs[3].prompt_token_ids, 6, vocab_size(hearing))


def test_a_sound_is_brought_to_the_rate_of_the_model(hearing: LLM) -> None:
    low = sound(1.0)[::2].copy()
    (output,) = hearing.chat(heard({"type": "audio", "audio": (low, RATE // 2)}), PARAMS, use_tqdm=False)
    token = hearing.get_tokenizer().token_to_id("<|AUDIO|>")
    assert output.prompt_token_ids.count(token) == 25, "a second"


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("no file", "the file of a sound 'no file' cannot be read"),
        (b"no sound", "not one of wav"),
        (3, "an array of floating point samples"),
        (np.zeros(9, np.int16), "an array of floating point samples"),
        ((np.zeros(9), 16000.5), "a whole number of samples a second"),
        ((np.zeros(9), -1), "a whole number of samples a second"),
        (np.full(9999, np.nan), "finite numbers"),
        (np.zeros(480_001), "lasts 30.00 s, and 30 s are the most"),
        ("https://example.com/a.wav", "URLs are not fetched"),
        ({"data": "%%"}, "is not base64"),
    ],
)
def test_what_cannot_be_a_sound_is_refused(hearing: LLM, given: object, error: str) -> None:
    prompt: Any = {"prompt": "<|AUDIO|>", "multi_modal_data": {"audio": given}}
    with pytest.raises(ValueError, match=error):
        hearing.generate(prompt, PARAMS, use_tqdm=False)


def test_models_of_the_other_kind_refuse_by_name(hearing: LLM, llm: LLM) -> None:
    with pytest.raises(ValueError, match="reads text and sounds, and no images"):
        hearing.chat(question(picture(0)), PARAMS, use_tqdm=False)
    with pytest.raises(ValueError, match="reads text and images, and no sounds"):
        llm.chat(heard({"type": "audio", "audio": sound(1.0)}), PARAMS, use_tqdm=False)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("video_url", "reads text and sounds, and no videos"),
        ("video", "reads text and sounds, and no videos"),
        ("input_video", "give a video as a part of type video_url or video"),
    ],
)
def test_videos_are_refused_by_name(hearing: LLM, kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hearing.chat(heard({"type": kind, kind: {"url": "data:video/mp4;base64,AAAA"}}), PARAMS, use_tqdm=False)


@pytest.fixture(scope="module")
def scaling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    llm = LLM(str(write_whole_vision("qwen2_vl", tmp_path_factory.mktemp("qwen"))), **OPTIONS)
    yield llm
    llm.close()


_MARK = "<|vision_start|><|image_pad|><|vision_end|>"


def test_options_of_the_processor(scaling: LLM) -> None:
    """They change how many tokens an image and a video have, and the rows that take their places."""
    image, frames = picture(0, (200, 200)), [picture(seed, (80, 80)) for seed in range(8)]
    token = scaling.get_tokenizer().token_to_id
    outputs = scaling.generate(
        [
            {"prompt": _MARK, "multi_modal_data": {"image": image}},
            {
                "prompt": _MARK,
                "multi_modal_data": {"image": image},
                "mm_processor_kwargs": {"max_pixels": 28 * 28 * 4},
            },
            {
                "prompt": _MARK.replace("image", "video"),
                "multi_modal_data": {"video": (frames, {"fps": 2})},
                "mm_processor_kwargs": {"fps": 0.5},
            },
        ],
        PARAMS,
        use_tqdm=False,
    )
    counts = [output.prompt_token_ids.count(token("<|image_pad|>")) for output in outputs]
    assert counts == [49, 4, 0]
    assert outputs[2].prompt_token_ids.count(token("<|video_pad|>")) == 2 * 9, "2 of 4 s, at least 4 frames"
    turns = question(image, text="")
    (chat,) = scaling.chat(turns, PARAMS, mm_processor_kwargs={"max_pixels": 28 * 28 * 4}, use_tqdm=False)
    assert chat.prompt_token_ids.count(token("<|image_pad|>")) == 4
    prompt = scaling.llm_engine.chat_prompt(turns, mm_processor_kwargs={"max_pixels": 28 * 28 * 4})
    assert prompt.token_ids == chat.prompt_token_ids
    rows = Processor(scaling.llm_engine._path).pixels(png(image), {"max_pixels": 28 * 28 * 4})
    ids = embeds_ids(EmbedsSpan(0, Tower(scaling.llm_engine._path, "float32").rows(rows)))
    hashed = iter(ids)
    wanted = [next(hashed) if each == token("<|image_pad|>") else each for each in outputs[1].prompt_token_ids]
    assert outputs[1].outputs[0].token_ids == expected_tokens(wanted, 6, vocab_size(scaling))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_resize": 1}, "do_resize is not an option of this model's images"),
        ({"max_pixels": "9"}, "max_pixels is not an option"),
        ({"max_pixels": True}, "max_pixels is not an option"),
        ({"max_pixels": 0}, "from 784 to 50176"),
        ({"max_pixels": float("nan")}, "not JSON compliant"),
        ({"max_pixels": object()}, "a mapping of names to numbers"),
        ([1], "a mapping of names to numbers"),
    ],
)
def test_options_that_the_processor_has_not(scaling: LLM, options: Any, message: str) -> None:
    prompt = {"prompt": _MARK, "multi_modal_data": {"image": picture(0)}, "mm_processor_kwargs": options}
    with pytest.raises(ValueError, match=message):
        scaling.generate(prompt, PARAMS, use_tqdm=False)
    with pytest.raises(ValueError, match="needs images or videos"):
        scaling.generate({"prompt": "a", "mm_processor_kwargs": {"max_pixels": 9}}, PARAMS, use_tqdm=False)


@pytest.mark.parametrize("rate", [0, -1, 0.0])
def test_a_rate_of_frames_is_above_0(scaling: LLM, rate: float) -> None:
    frames = [picture(seed, (80, 80)) for seed in range(4)]
    prompt = {
        "prompt": _MARK.replace("image", "video"),
        "multi_modal_data": {"video": frames},
        "mm_processor_kwargs": {"fps": rate},
    }
    with pytest.raises(ValueError, match="fps must be above 0 and at most 1000"):
        scaling.generate(prompt, PARAMS, use_tqdm=False)
