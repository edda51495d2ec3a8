"""Segments and words are those that transformers finds in the same tokens."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.models.whisper import generation_whisper, tokenization_whisper

from tokenloom.services.gateway.records.transcript import (
    HeardToken,
    PieceFigures,
    compression_ratio,
    cut,
    segments_of,
    text_of,
    words_of,
)
from tokenloom.v1.tokenizer_pb2 import TranscriptTraits

EOS, FIRST = 256, 300
TRAITS = TranscriptTraits(
    sampling_rate=16_000,
    piece_samples=480_000,
    frame_samples=160,
    timestamp_samples=320,
    first_timestamp_id=FIRST,
    first_special_id=EOS,
)
FIGURES = PieceFigures(0, 0.0, -0.5, 1.0, 0.25)


def heard(text: str, *stamps: int) -> list[HeardToken]:
    """Return a token for each byte, with the timestamps in the places of the bars."""
    at = iter(stamps)
    return [
        HeardToken(FIRST + next(at), b"", -1.0) if byte == ord("|") else HeardToken(byte, bytes([byte]), -1.0)
        for byte in text.encode()
    ]


def ids(tokens: Sequence[HeardToken]) -> list[int]:
    return [each.id for each in tokens]


def of_transformers(tokens: Sequence[int], num_frames: int) -> tuple[list[tuple[float, float, list[int]]], int]:
    segments, advance = generation_whisper.WhisperGenerationMixin._retrieve_segment(
        seek_sequence=torch.tensor(tokens),
        seek_outputs=[{}],
        time_offset=torch.zeros(1, dtype=torch.float64),
        timestamp_begin=FIRST,
        seek_num_frames=torch.tensor([num_frames]),
        time_precision=0.02,
        time_precision_features=0.01,
        input_stride=2,
        prev_idx=0,
        idx=0,
        return_token_timestamps=False,
        decoder_input_ids=torch.zeros(1, 3),
    )
    return [(float(each["start"]), float(each["end"]), each["tokens"].tolist()) for each in segments], int(advance)


def made(random_: random.Random) -> list[HeardToken]:
    """Return tokens as the rules of timestamps allow them."""
    stamp, found = random_.randrange(50), list[HeardToken]()
    for _ in range(random_.randrange(1, 5)):
        found += heard("|" + "ab c"[: random_.randrange(1, 5)], stamp)
        if random_.random() < 0.15:
            return found  # without an end
        stamp += random_.randrange(1, 200)
        found += heard("|", stamp)
        stamp += random_.randrange(3)
    return found + heard("|x", stamp) if random_.random() < 0.3 else found


@pytest.mark.parametrize("seed", range(200))
def test_segments_are_those_of_transformers(seed: int) -> None:
    random_ = random.Random(seed)
    tokens, num_frames = made(random_), random_.choice([3000, 1700, 2])
    slices, advance = cut(ids(tokens), num_frames, TRAITS)
    ours = [(each.begins_at * 0.02, each.ends_at * 0.02, ids(tokens)[each.first : each.end]) for each in slices]
    theirs, their_advance = of_transformers(ids(tokens), num_frames)
    assert advance == their_advance
    assert [each[2] for each in ours] == [each[2] for each in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one[:2] == pytest.approx(other[:2])


@pytest.mark.parametrize(
    ("text", "stamps", "advance"),
    [
        ("|a||b||", (0, 10, 10, 30, 30), 60),  # both have ended, and the next piece begins where the second one ends
        ("|a||b|", (0, 10, 10, 30), 3000),  # nothing is spoken after the second one
        ("|a||b", (0, 10, 12), 20),  # the second one is cut off, and heard again
        ("ab", (), 3000),
        ("|a|", (0, 10), 3000),
        ("", (), 3000),
        ("||a", (0, 0), 3000),  # a model that does not advance
    ],
)
def test_where_the_next_piece_begins(text: str, stamps: Sequence[int], advance: int) -> None:
    assert cut(ids(heard(text, *stamps)), 3000, TRAITS)[1] == advance


def test_segments_have_times_of_the_whole_sound_and_those_without_text_are_left_out() -> None:
    tokens = heard("|a||  ||b|", 0, 10, 10, 20, 30, 40)
    figures = FIGURES._replace(seek=500)
    segments = segments_of(tokens, cut(ids(tokens), 3000, TRAITS)[0], figures, TRAITS)
    assert [(each.start, each.end, each.text, each.first) for each in segments] == [
        (5.0, 5.2, "a", 0),
        (5.6, 5.8, "b", 7),
    ]


def test_texts_hold_no_timestamps_and_split_characters_are_whole() -> None:
    assert text_of(heard("|é| ü", 1, 2), TRAITS) == "é ü"


def test_compression_of_a_text_that_repeats_itself() -> None:
    assert compression_ratio("again and " * 50) > 2.4 > compression_ratio("a text as people speak it")


class Spelled:
    """A tokenizer of transformers' whose tokens are bytes."""

    eos_token_id = EOS
    language = None

    def __init__(self) -> None:
        table = sorted(pre_tokenizers.ByteLevel.alphabet())
        self._made = Tokenizer(models.BPE({char: index for index, char in enumerate(table)}, []))
        self._made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._made.decoder = decoders.ByteLevel()

    def ids(self, text: str) -> list[int]:
        found: list[int] = self._made.encode(text).ids
        return found

    def token(self, token_id: int) -> bytes:
        return bytes([_BYTES[self._made.id_to_token(token_id)]])

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        text: str = self._made.decode(list(tokens))
        return text


def _unicode_of_bytes() -> dict[str, int]:
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [each for each in range(256) if each not in plain]
    return {chr(each): each for each in plain} | {chr(256 + index): each for index, each in enumerate(rest)}


_BYTES = _unicode_of_bytes()


@pytest.mark.parametrize(
    ("text", "language"),
    [
        (" Hello, world! How's it going?", "english"),
        (' She said: "yes" (twice). And -- left...', "english"),
        (" Füße über alles - 3,5 Ünal's", "german"),
        ("你好,世界。是的", "chinese"),
        ("no blank at the begin", "english"),
        (" a  b 😀 c", "english"),
    ],
)
def test_words_are_those_of_transformers(text: str, language: str) -> None:
    spelled = Spelled()
    token_ids = spelled.ids(text)
    times = [index / 10 for index in range(len(token_ids) + 1)]
    theirs = tokenization_whisper._collate_word_timestamps(
        spelled, token_ids, list(itertools.pairwise(times)), language, False
    )
    code = {"english": "en", "german": "de", "chinese": "zh"}[language]
    tokens = [HeardToken(each, spelled.token(each), 0.0) for each in token_ids]
    ours = words_of(tokens, times, code, TRAITS)
    assert [tuple(each) for each in ours] == [
        (each["text"].strip(), *each["timestamp"]) for each in theirs if each["text"].strip()
    ]


def test_timestamps_are_no_words() -> None:
    tokens = heard("| a b|", 0, 9)
    times = [0.0, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert [tuple(each) for each in words_of(tokens, times, "en", TRAITS)] == [("a", 0.0, 0.2), ("b", 0.2, 0.4)]
