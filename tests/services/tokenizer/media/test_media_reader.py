"""What stands for images is what transformers' processors write for them, from sizes alone."""

import importlib
import json
import math
import random
import sys
import types
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.services.tokenizer.media.published import MODELS, SIZES, TOKENS, Published
from tokenloom.request.errors import InvalidArgument
from tokenloom.request.prefix_schedule import MediaTokens, prefix_hashes
from tokenloom.services.tokenizer.encoder import TextEncoder
from tokenloom.services.tokenizer.media.media_reader import MediaReader
from tokenloom.services.tokenizer.spelled_tokens import Rendered
from tokenloom.v1.tokenizer_pb2 import EncodeChatRequest, MediaSize, TokenizedPrompt
from tokenloom.v1.types_pb2 import MEDIA_KIND_AUDIO, MEDIA_KIND_IMAGE

PROMPTS = 50


def make_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in TOKENS])
    return made


TOKENIZER = make_tokenizer()


def reader_of(name: str, directory: Path, **entries: Any) -> MediaReader:
    """Return the reader of a published model's files. ``entries`` change those of the image processor."""
    model = MODELS[name]
    images = {**model.images, **entries} if model.images else {}
    for file, values in (
        ("config.json", model.config),
        ("preprocessor_config.json", images),
        ("processor_config.json", model.processor),
    ):
        if values:
            (directory / file).write_text(json.dumps(values))
    found = MediaReader.of_checkpoint(directory, TOKENIZER)
    assert found is not None
    return found


def image(width: int, height: int, **fields: Any) -> MediaSize:
    return MediaSize(kind=MEDIA_KIND_IMAGE, width=width, height=height, digest=b"d" * 32, **fields)


def encode(reader: MediaReader, text: str, media: Sequence[MediaSize], **wishes: Any) -> TokenizedPrompt:
    encoder = TextEncoder(TOKENIZER, block_size=16, max_text_bytes=1 << 20, reader=reader)
    request = EncodeChatRequest(media=media, **wishes)
    expanded, items = reader.expand(text, media, request.cache_salt)
    return encoder.encode_chat(Rendered(expanded), request, items)


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_published_models(name: str, tmp_path: Path) -> None:
    reader = reader_of(name, tmp_path)
    found = []
    for width, height in SIZES:
        prompt = encode(reader, f"a{reader.family.mark}b", [image(width, height)])
        (item,) = prompt.media
        assert item.num_rows == list(prompt.token_ids).count(reader.token_id)
        assert item.num_rows == sum(run.num_tokens for run in item.runs)
        found.append(item.num_rows)
    assert found == list(MODELS[name].rows)


class Scaling:
    """Scales images without looking at their pixels, and writes them as the processor of transformers does."""

    def __init__(self, model: Published) -> None:
        own = {**model.images, **model.processor.get("image_processor", {})}
        if "image_grid_pinpoints" not in own and model.processor_class.startswith("llava_one"):
            own["image_grid_pinpoints"] = MODELS["llava-onevision-qwen2-7b-ov-hf"].images["image_grid_pinpoints"]
        if model.image_class.startswith("got_ocr2"):
            own["crop_to_patches"] = True  # as a default of the processor's call, whatever its file says
        given = {name: value for name, value in own.items() if value is not None}
        self._images = _load(model.image_class)(**given, do_rescale=False, do_normalize=False)
        self._nested = model.image_class.startswith(("idefics3", "smolvlm", "llava_one"))
        self._processor = object.__new__(_load(model.processor_class))  # its constructor wants torchvision, for videos
        for key, value in {**model.processor, **model.attributes, "image_processor": self._images}.items():
            setattr(self._processor, key, value)

    def texts(self, sizes: Sequence[tuple[int, int]]) -> list[str]:
        images = [np.zeros((3, height, width), np.uint8) for width, height in sizes]
        given: Any = [images] if self._nested else images
        options = {"return_row_col_info": True} if hasattr(self._images, "return_row_col_info") else {}
        inputs = self._images(given, input_data_format="channels_first", return_tensors="np", **options)
        return [self._processor.replace_image_token(inputs, index) for index in range(len(sizes))]


def _stand_in_for_torchvision() -> None:
    """Let a module be imported that imports torchvision and calls none of it here."""
    if "torchvision" not in sys.modules:
        parts = [
            types.ModuleType(name) for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
        ]
        parts[2].functional = None  # type: ignore[attr-defined]
        try:
            sys.modules.update({part.__name__: part for part in parts})
            importlib.import_module("transformers.models.pixtral.image_processing_pixtral")
        finally:
            for part in parts:
                del sys.modules[part.__name__]


def _load_backend() -> Any:
    return importlib.import_module("transformers.image_processing_backends").PilBackend


def _load(path: str) -> Any:
    module, _, name = path.rpartition(".")
    if module.startswith("pixtral"):
        _stand_in_for_torchvision()
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)


@pytest.mark.parametrize("name", MODELS)
def test_texts_are_those_of_the_processors(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = _load_backend()
    resize = backend.resize

    def scale(self: Any, image: Any, size: Any, **options: Any) -> Any:
        if size.height and size.width:
            return np.zeros((3, size.height, size.width), np.uint8)
        return resize(self, image, size, **options)

    monkeypatch.setattr(backend, "resize", scale)
    reader, scaling, rng = reader_of(name, tmp_path), Scaling(MODELS[name]), random.Random(7)
    for index in range(PROMPTS):
        count = 2 if index % 10 == 9 else 1
        sizes = [(_length(rng), _length(rng)) for _ in range(count)]
        text = "a" + reader.family.mark * count + "\n b"
        prompt = encode(reader, text, [image(*size) for size in sizes])
        theirs = TOKENIZER.encode("a" + "".join(scaling.texts(sizes)) + "\n b").ids
        assert list(prompt.token_ids) == theirs, sizes


PLAIN = "Qwen2.5-VL-7B-Instruct"


def test_a_grid_is_that_of_rotary_positions(tmp_path: Path) -> None:
    (item,) = encode(reader_of(PLAIN, tmp_path), "<|image_pad|>", [image(200, 120)]).media
    assert (item.grid_t, item.grid_h, item.grid_w, item.levels, item.is_whole) == (1, 4, 7, 1, False)


@pytest.mark.parametrize(
    ("name", "levels", "is_whole", "num_runs"),
    [
        ("Qwen3-VL-8B-Instruct", 4, False, 1),
        ("gemma-3-4b-it", 1, True, 1),
        ("gemma-4-E4B-it", 1, True, 1),
        ("pixtral-12b", 1, False, 8),
        ("SmolVLM2-2.2B-Instruct", 1, False, 13),
        ("llava-1.5-7b-hf", 1, False, 1),
    ],
)
def test_how_the_rows_of_a_family_stand(name: str, levels: int, is_whole: bool, num_runs: int, tmp_path: Path) -> None:
    reader = reader_of(name, tmp_path)
    (item,) = encode(reader, f"a{reader.family.mark}b", [image(200, 120)]).media
    assert (item.levels, item.is_whole, len(item.runs)) == (levels, is_whole, num_runs)
    offset = 0
    for run in item.runs:
        assert run.row_offset == offset
        offset += run.num_tokens
    assert offset == item.num_rows


def test_ids_beyond_the_vocabulary_become_0(tmp_path: Path) -> None:
    reader = reader_of(PLAIN, tmp_path)
    small = replace(reader, vocab_size=reader.token_id)
    prompt = encode(small, "a<|image_pad|>b", [image(56, 56)], want_hashes=True, takes_packed_ids=True)
    assert list(prompt.token_ids)[1:-1] == [0] * 4
    assert [(run.position, run.num_tokens) for run in prompt.media[0].runs] == [(1, 4)]
    assert reader.token_id in encode(reader, "<|image_pad|>", [image(56, 56)]).token_ids


def test_each_image_has_its_own_runs_and_its_encoder(tmp_path: Path) -> None:
    reader = reader_of("llava-1.5-7b-hf", tmp_path, crop_size={"height": 28, "width": 28})
    media = [image(9, 9, encoder="one"), image(8, 8, encoder="two")]
    prompt = encode(reader, "ab<image>c<image>", media)
    assert [[(run.position, run.num_tokens) for run in item.runs] for item in prompt.media] == [[(2, 4)], [(7, 4)]]
    assert [(item.index, item.encoder, item.num_in_prompt) for item in prompt.media] == [(0, "one", 2), (1, "two", 2)]
    assert [item.digest for item in prompt.media] == [each.digest for each in media]


def key_of(reader: MediaReader, media: Sequence[MediaSize], salt: bytes = b"") -> bytes:
    return encode(reader, reader.family.mark * len(media), media, cache_salt=salt).media[0].key


def test_a_key_covers_all_on_which_rows_depend(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path in paths:
        path.mkdir()
    qwen, other, vision = (
        reader_of(PLAIN, path, image_mean=[mean] * 3) for path, mean in zip(paths, (0, 0, 1), strict=True)
    )
    same = image(300, 300)
    keys = [
        key_of(qwen, [same]),
        key_of(qwen, [same], b"tenant"),
        key_of(vision, [same]),
        key_of(qwen, [image(300, 300, options_json=b'{"max_pixels":90000}')]),
        key_of(qwen, [image(400, 300)]),
        key_of(qwen, [MediaSize(kind=MEDIA_KIND_IMAGE, width=300, height=300, digest=b"e" * 32)]),
    ]
    assert len(set(keys)) == len(keys)
    assert keys[0] == key_of(other, [same]) == key_of(qwen, [same, image(40, 40)])


def test_two_images_of_one_vision_have_other_rows_than_one(tmp_path: Path) -> None:
    reader, media = reader_of("llava-onevision-qwen2-7b-ov-hf", tmp_path), image(200, 120)
    assert encode(reader, "<image><image>", [media] * 2).media[0].num_rows == 730
    assert key_of(reader, [media]) != key_of(reader, [media] * 2) == key_of(reader, [media] * 3)


def test_block_hashes_are_those_of_keys_and_not_of_placeholders_alone(tmp_path: Path) -> None:
    reader = reader_of(PLAIN, tmp_path)
    media = [MediaSize(kind=MEDIA_KIND_IMAGE, width=300, height=300, digest=each * 32) for each in (b"d", b"e")]
    one, two = (encode(reader, "a" * 40 + "<|image_pad|>", [each], want_hashes=True) for each in media)
    assert one.token_ids == two.token_ids
    same = [a == b for a, b in zip(one.block_hash_prefixes, two.block_hash_prefixes, strict=True)]
    assert same == [True, True] + [False] * (len(same) - 2)
    (item,) = one.media
    tokens = [MediaTokens(run.position, run.num_tokens, run.row_offset, item.key) for run in item.runs]
    assert list(one.block_hash_prefixes) == prefix_hashes(one.token_ids, 16, b"", tokens)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_that_are_known_get_the_same_items(name: str, tmp_path: Path) -> None:
    """As a chat that was rendered before is sent again in tokens."""
    reader = reader_of(name, tmp_path)
    media, mark, salt = [image(200, 120), image(60, 300)], reader.family.mark, b"salt"
    expected = encode(reader, f"a{mark}b{mark}c", media, want_hashes=True, cache_salt=salt)
    encoder = TextEncoder(TOKENIZER, block_size=16, max_text_bytes=1 << 20, reader=reader)
    ids = list(expected.token_ids)
    request = EncodeChatRequest(media=media, want_hashes=True, cache_salt=salt, token_ids=ids)
    assert encoder.place(request) == expected
    for wrong in ([*ids, reader.token_id], [each for each in ids if each != reader.token_id]):
        del request.token_ids[:]
        request.token_ids.extend(wrong)
        with pytest.raises(InvalidArgument, match="each row takes one") as caught:
            encoder.place(request)
        assert caught.value.field == "token_ids"


def test_marks_in_clients_texts_are_plain_text(tmp_path: Path) -> None:
    reader, mask = reader_of(PLAIN, tmp_path), "\U00100000"
    encoder = TextEncoder(TOKENIZER, block_size=16, max_text_bytes=1 << 20, reader=reader)
    text, items = reader.expand(f"{mask} <|image_pad|>{mask}", [image(56, 56)])
    prompt = encoder.encode_chat(Rendered(text, {mask: "<|image_pad|>"}), EncodeChatRequest(), items)
    assert list(prompt.token_ids).count(reader.token_id) == 4
    assert [(run.position, run.num_tokens) for run in prompt.media[0].runs] == [(len("<|image_pad|> "), 4)]
    assert list(prompt.plain_text_tokens) == ["<|image_pad|>"]


@pytest.mark.parametrize(
    ("name", "text", "media", "message", "field"),
    [
        (PLAIN, "no mark", [image(9, 9)], "written 0 marks <|image_pad|> for 1 images", "messages"),
        (PLAIN, "<|image_pad|>" * 2, [image(90, 90)], "written 2 marks", "messages"),
        (PLAIN, "<|image_pad|>", [image(1, 201)], "image 1 .* 200 times as long", "media[0]"),
        (PLAIN, "<|image_pad|>", [image(0, 20)], "it is empty", "media[0]"),
        (PLAIN, "<|image_pad|>", [MediaSize(kind=MEDIA_KIND_AUDIO, samples=9)], "no sounds", "media[0]"),
        ("pixtral-12b", "[IMG]" * 2, [image(9, 9), image(1, 5000)], "image 2 .* leaves no rows", "media[1]"),
        ("gemma-4-E4B-it", "<|image|>", [image(9, 9, options_json=b'{"max_soft_tokens":71}')], "one of 70", ""),
        (PLAIN, "<|image_pad|>", [image(9, 9, options_json=b'{"max_pixels":99999999}')], "from 784 to 12845056", ""),
        (PLAIN, "<|image_pad|>", [image(9, 9, options_json=b'{"fps":1}')], "there are: max_pixels, min_pixels", ""),
        (PLAIN, "<|image_pad|>", [image(9, 9, options_json=b'{"max_pixels":true}')], "not an option", ""),
    ],
)
def test_what_a_model_does_not_take_is_refused(
    name: str, text: str, media: list[MediaSize], message: str, field: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match=message) as refusal:
        encode(reader_of(name, tmp_path), text, media)
    assert (refusal.value.field or "").startswith(field or "mm_processor_kwargs.")


def test_options_change_the_number_of_rows(tmp_path: Path) -> None:
    (few,) = encode(
        reader_of(PLAIN, tmp_path), "<|image_pad|>", [image(640, 480, options_json=b'{"max_pixels":78400}')]
    ).media
    assert few.num_rows == 88 <= 78400 // 28**2
    assert few.options_json


@pytest.mark.parametrize(
    ("config", "images"),
    [
        ({"model_type": "llama"}, {"size": 3}),
        ({"model_type": "aya_vision"}, {"size": 3}),
        ({"model_type": "llava"}, {}),
    ],
)
def test_other_models_read_no_images(config: dict[str, Any], images: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(images))
    assert MediaReader.of_checkpoint(tmp_path, TOKENIZER) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"patch_size": "14"}, "patch_size must be a whole number"), ({"max_pixels": 0}, "max_pixels must be")],
)
def test_wrong_files_are_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=f"preprocessor_config.json: {message}"):
        reader_of(PLAIN, tmp_path, **changes)


def _length(rng: random.Random) -> int:
    return round(math.exp(rng.uniform(math.log(20), math.log(1800))))
