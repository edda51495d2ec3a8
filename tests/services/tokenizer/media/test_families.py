"""What stands for sounds is what transformers' processor writes for them, from their lengths alone."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer

from tests.checkpoints.whole_sound import AUDIO_ID, RATE, write_whole_sound
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.tokenizer.encoder import TextEncoder
from tokenloom.services.tokenizer.media.media_reader import MediaReader
from tokenloom.services.tokenizer.spelled_tokens import Rendered
from tokenloom.v1.tokenizer_pb2 import EncodeChatRequest, MediaSize, TokenizedPrompt
from tokenloom.v1.types_pb2 import MEDIA_KIND_AUDIO, MEDIA_KIND_IMAGE

HEARD = "Audio: <|audio_bos|><|AUDIO|><|audio_eos|>\n"


class Tokens:
    """Encodes with the tokenizer of a checkpoint, and with transformers' processor."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        reader = MediaReader.of_checkpoint(path, self.tokenizer)
        assert reader is not None
        self.reader = reader
        self._encoder = TextEncoder(self.tokenizer, block_size=16, max_text_bytes=1 << 20, reader=reader)
        extractor: Any = transformers.AutoFeatureExtractor.from_pretrained(path)
        self._processor: Any = transformers.Qwen2AudioProcessor(
            extractor, transformers.AutoTokenizer.from_pretrained(path), "{{ messages }}"
        )

    def encode(self, text: str, sizes: list[MediaSize], salt: bytes = b"") -> TokenizedPrompt:
        expanded, items = self.reader.expand(text, sizes, salt)
        return self._encoder.encode_chat(Rendered(expanded, {}), EncodeChatRequest(want_hashes=True), items)

    def expected(self, text: str, lengths: list[int]) -> list[int]:
        sounds = [np.zeros(length, np.float32) for length in lengths]
        ids: list[int] = self._processor(text=text, audio=sounds, sampling_rate=RATE)["input_ids"][0]
        return ids


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    return Tokens(write_whole_sound("qwen2_audio", tmp_path_factory.mktemp("sound")))


def sizes(*lengths: int) -> list[MediaSize]:
    return [
        MediaSize(digest=bytes([index]) * 32, kind=MEDIA_KIND_AUDIO, samples=length, encoder="e:1")
        for index, length in enumerate(lengths)
    ]


def test_prompts_of_random_lengths(tokens: Tokens) -> None:
    chance = random.Random(4)
    drawn = [[chance.randint(1600, 480_000) for _ in range(chance.choice((1, 1, 2, 3)))] for _ in range(20)]
    edges = [[321], [479], [480], [481], [640], [641], [479_999], [480_000]]
    for lengths in (*edges, *drawn):
        text = f"Listen: {HEARD * len(lengths)}What?"
        prompt = tokens.encode(text, sizes(*lengths))
        assert list(prompt.token_ids) == tokens.expected(text, lengths), lengths
        places = [run.position + at for item in prompt.media for run in item.runs for at in range(run.num_tokens)]
        assert places == [place for place, each in enumerate(prompt.token_ids) if each == AUDIO_ID]


def test_an_item_names_the_sound_and_where_it_stands(tokens: Tokens) -> None:
    first, second = tokens.encode(HEARD * 2, sizes(16_000, 32_000)).media
    assert (first.kind, first.num_rows, first.levels, first.is_whole) == (MEDIA_KIND_AUDIO, 25, 1, False)
    assert (first.grid_t, first.grid_h, first.grid_w) == (0, 0, 0), "positions count on"
    assert (second.num_rows, second.index, second.num_in_prompt, second.encoder) == (50, 1, 2, "e:1")
    assert [(run.num_tokens, run.row_offset) for run in second.runs] == [(50, 0)]
    (alone,) = tokens.encode(HEARD, sizes(16_000)).media
    assert alone.key == first.key, "its rows do not depend on the other sounds of a prompt"
    (of_other,) = tokens.encode(HEARD, sizes(16_000), b"another tenant").media
    assert of_other.key != first.key


def test_the_files_may_be_those_of_newer_versions(tokens: Tokens, tmp_path: Path) -> None:
    path = write_whole_sound("qwen2_audio", tmp_path)
    extractor = (path / "preprocessor_config.json").read_text()
    (path / "preprocessor_config.json").unlink()
    (path / "processor_config.json").write_text(f'{{"feature_extractor": {extractor}}}')
    reader = MediaReader.of_checkpoint(path, tokens.tokenizer)
    assert reader is not None
    assert reader.family == tokens.reader.family


@pytest.mark.parametrize(
    ("text", "media", "message", "field"),
    [
        (HEARD, sizes(480_001), r"sound 1 .* lasts 30.00 s, and 30 s are the most", "media[0]"),
        (HEARD * 2, sizes(16_000, 320), "sound 2 .* 320 samples leaves no rows", "media[1]"),
        (HEARD, sizes(0), "sound 1 .* is empty", "media[0]"),
        ("Nothing.", sizes(16_000), "0 marks .* for 1 sounds", "messages"),
        (HEARD, [MediaSize(kind=MEDIA_KIND_IMAGE, width=9, height=9)], "text and sounds, and no images", "media[0]"),
    ],
)
def test_what_is_refused(tokens: Tokens, text: str, media: list[MediaSize], message: str, field: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as refusal:
        tokens.encode(text, media)
    assert refusal.value.field == field
