"""Makes requests with images, videos or sounds, for models that read them: one or several, a second turn over one, in
each dialect; and transcriptions."""

import base64
import random
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from .mix import Case, MakeCase, open_ended, user

RATE = 16_000
"""Samples a second of the sounds."""
_FIELDS = 8
_LEAST_FIELD, _GREATEST_FIELD = 4, 40
"""Pixels of a side of a field."""
_LEAST_SECONDS, _GREATEST_SECONDS = 0.3, 2.0
_LONG_SECONDS = 33.0
"""Of a sound that a model hears in two pieces."""
_PNG_HEAD = len(b"........") + 25
"""Bytes of a file before the chunk that a number may stand in: its signature and the chunk IHDR."""
_WAV_HEAD = len(b"RIFF....WAVE")
_PREFIX = "data:image/png;base64,"
_LISTED = "data:video/jpeg;base64,"
"""Before the pictures of a video."""


def draw_png(rng: random.Random) -> bytes:
    """Return a file of 8 x 8 fields, each of a random colour."""
    height, width = (rng.randint(_LEAST_FIELD, _GREATEST_FIELD) for _ in range(2))
    numbers = np.random.default_rng(rng.getrandbits(32))
    fields = numbers.integers(0, 256, (_FIELDS, _FIELDS, 3), dtype=np.uint8)
    pixels = fields.repeat(height, axis=0).repeat(width, axis=1)
    return png(pixels)


def png(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    """Return a file of ``pixels`` [height, width, 3]."""
    height, width, _ = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)  # no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, red green blue
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_png_chunk(name, data) for name, data in chunks)


def _png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def play_wav(rng: random.Random, seconds: float = 0.0) -> bytes:
    """Return a file of four tones and noise. ``seconds``: its length; 0: any of a short one."""
    seconds = seconds or rng.uniform(_LEAST_SECONDS, _GREATEST_SECONDS)
    numbers = np.random.default_rng(rng.getrandbits(32))
    time = np.arange(round(seconds * RATE)) / RATE
    tones = sum(np.sin(2 * np.pi * pitch * time) for pitch in numbers.uniform(80, 4000, 4))
    return wav((3000 * tones + 600 * numbers.standard_normal(len(time))).astype("<i2"))


def wav(samples: np.ndarray[Any, np.dtype[np.int16]]) -> bytes:
    """Return a file of ``samples`` [n], of one channel."""
    form = struct.pack("<HHIIHH", 1, 1, RATE, 2 * RATE, 2, 16)
    return _riff(_wav_chunk(b"fmt ", form) + _wav_chunk(b"data", samples.tobytes()))


def _wav_chunk(name: bytes, data: bytes) -> bytes:
    return name + struct.pack("<I", len(data)) + data


def _riff(chunks: bytes) -> bytes:
    return b"RIFF" + struct.pack("<I", len(b"WAVE") + len(chunks)) + b"WAVE" + chunks


def with_new_files(case: Case, number: int) -> Case:
    """Return a case that, if it asks for that, has a comment in its files: the same pixels or samples in files of
    other digests, so that they are sent, decoded and computed again."""
    if not case.has_new_files:
        return case
    if "file" in case.options:
        return replace(case, options={**case.options, "file": _renewed(case.options["file"], number)})
    turns = [{**turn, "content": _renewed_parts(turn["content"], number)} for turn in case.messages]
    return replace(case, messages=turns)


def _renewed_parts(content: Any, number: int) -> Any:
    if isinstance(content, str):
        return content
    parts = []
    for part in content:
        if part["type"] == "image_url":
            part = image_part(_renewed(base64.b64decode(part["image_url"]["url"].removeprefix(_PREFIX)), number))
        elif part["type"] == "input_audio":
            part = sound_part(_renewed(base64.b64decode(part["input_audio"]["data"]), number))
        elif part["type"] == "video_url":
            pictures = part["video_url"]["url"].removeprefix(_LISTED).split(",")
            part = video_part([_renewed(base64.b64decode(each), number) for each in pictures])
        parts.append(part)
    return parts


def _renewed(file: bytes, number: int) -> bytes:
    if file.startswith(b"RIFF"):
        return _riff(_wav_chunk(b"JUNK", struct.pack("<Q", number)) + file[_WAV_HEAD:])
    return file[:_PNG_HEAD] + _png_chunk(b"tEXt", f"Comment\0{number}".encode()) + file[_PNG_HEAD:]


def image_part(file: bytes) -> dict[str, Any]:
    """Return a part of a turn."""
    return {"type": "image_url", "image_url": {"url": _PREFIX + base64.b64encode(file).decode()}}


def video_part(pictures: Sequence[bytes]) -> dict[str, Any]:
    """Return a part of a turn that shows these pictures, one after the other."""
    listed = ",".join(base64.b64encode(picture).decode() for picture in pictures)
    return {"type": "video_url", "video_url": {"url": _LISTED + listed}}


def sound_part(file: bytes) -> dict[str, Any]:
    """Return a part of a turn."""
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(file).decode(), "format": "wav"}}


@dataclass(frozen=True)
class Medium:
    """One kind of files that chats show to a model."""

    name: str
    part: Callable[[random.Random], dict[str, Any]]
    """Makes a part of a turn with a file that no other one has."""

    @property
    def features(self) -> tuple[tuple[str, MakeCase], ...]:
        """What chats do with such files."""
        return (
            (self.name, partial(_one, self)),
            (f"new {self.name}", partial(_new_one, self)),
            (f"new {self.name}s", partial(_several, self)),
            ("second turn", partial(_second_turn, self)),
        )

    def question(self, rng: random.Random, count: int = 1) -> dict[str, Any]:
        """Return a turn with ``count`` files and a question."""
        text = {"type": "text", "text": f"What is number {rng.randint(1, 999)}?"}
        return user([*(self.part(rng) for _ in range(count)), text])


IMAGE = Medium("image", lambda rng: image_part(draw_png(rng)))
SOUND = Medium("sound", lambda rng: sound_part(play_wav(rng)))
VIDEO = Medium("video", lambda rng: video_part([draw_png(rng) for _ in range(rng.randint(2, 5))]))


def _one(medium: Medium, rng: random.Random, vocab_size: int, length: int) -> Case:
    return Case("", messages=[medium.question(rng)], options=open_ended(length, temperature=0.0))


def _new_one(medium: Medium, rng: random.Random, vocab_size: int, length: int) -> Case:
    options = open_ended(length, temperature=0.9, seed=rng.getrandbits(31))
    return Case("", messages=[medium.question(rng)], has_new_files=True, options=options)


def _several(medium: Medium, rng: random.Random, vocab_size: int, length: int) -> Case:
    question = medium.question(rng, rng.randint(2, 3))
    return Case("", messages=[question], has_new_files=True, options=open_ended(length, temperature=0.0))


def _second_turn(medium: Medium, rng: random.Random, vocab_size: int, length: int) -> Case:
    answer = {"role": "assistant", "content": "Many fields."}
    turns = [medium.question(rng), answer, user(f"And what is {rng.randint(1, 999)}?")]
    return Case("", messages=turns, options=open_ended(length, temperature=0.0))


def image_calls(rng: random.Random, length: int) -> list[Case]:
    """Return one call of each other dialect that takes images. ``length``: most tokens of an answer."""
    text = f"What is number {rng.randint(1, 999)}?"
    first, second, third = (base64.b64encode(draw_png(rng)).decode() for _ in range(3))
    source = {"type": "base64", "media_type": "image/png", "data": first}
    message = user([{"type": "image", "source": source}, {"type": "text", "text": text}])
    chat = {
        "messages": [user(text) | {"images": [third]}],
        "stream": False,
        "options": {"num_predict": length, "temperature": 0},
    }
    return [
        _call("image message", "/v1/messages", {"messages": [message], "max_tokens": length, "temperature": 0}),
        *_responses("image", {"type": "input_image", "image_url": _PREFIX + second}, text, length),
        _call("Ollama image", "/api/chat", chat),
    ]


def sound_calls(rng: random.Random, length: int) -> list[Case]:
    """Return one call of each other dialect that takes sounds. ``length``: most tokens of an answer."""
    return _responses("sound", SOUND.part(rng), f"What is number {rng.randint(1, 999)}?", length)


def _responses(name: str, part: Mapping[str, Any], text: str, length: int) -> list[Case]:
    turn = user([part, {"type": "input_text", "text": text}])
    body = {"input": [turn], "max_output_tokens": length, "temperature": 0}
    return [
        _call(f"{name} response", "/v1/responses", body),
        _call(f"{name} response in the background", "/v1/responses", {**body, "background": True}),
    ]


def _call(name: str, path: str, body: Mapping[str, Any]) -> Case:
    return Case(name, streamed=False, call=f"POST {path}", client="plain HTTP", options=body)


_WORDS = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
_FORMS: tuple[tuple[str, str, Mapping[str, str], float], ...] = (
    ("transcript", "transcriptions", {}, 0.0),
    ("words", "transcriptions", {**_WORDS, "language": "en"}, 0.0),
    ("subtitles", "transcriptions", {"response_format": "srt", "language": "de"}, 0.0),
    ("translation", "translations", {"response_format": "text"}, 0.0),
    ("seeded transcript", "transcriptions", {"temperature": "0.7", "seed": "5", "prompt": "Names: Ab"}, 0.0),
    ("streamed transcript", "transcriptions", {"stream": "true"}, 0.0),
    ("long transcript", "transcriptions", {"response_format": "verbose_json"}, _LONG_SECONDS),
)
"""Of each transcription its name, route, fields and seconds (0: any of a short sound)."""


def transcript_cases(rng: random.Random, count: int) -> list[Case]:
    """Return ``count`` transcriptions, of which every second one sends new files, and half as many over gRPC."""
    cases = []
    for number in range(count):
        name, route, fields, seconds = _FORMS[number % len(_FORMS)]
        options = {"file": play_wav(rng, seconds), "fields": fields}
        case = Case(f"{name} {number}", streamed="stream" in fields, client="transcripts", options=options)
        cases.append(replace(case, call=f"POST /v1/audio/{route}", has_new_files=number % 2 == 0))
    for number in range(count // 2):
        asked = {"language": "en", "return_segments": True, "return_words": number % 2 == 0}
        options = {"file": play_wav(rng, _LONG_SECONDS if number == 0 else 0.0), "fields": asked}
        case = Case(f"gRPC transcript {number}", streamed=False, client="gRPC transcripts", options=options)
        cases.append(replace(case, call="Transcribe", has_new_files=number % 2 == 0))
    return cases
