"""Makes requests with images, for models that read them: one or several, a second turn over one, in each dialect."""

import base64
import random
import struct
import zlib
from dataclasses import replace
from typing import Any

import numpy as np

from .mix import Case, MakeCase, open_ended, user

_FIELDS = 8
_LEAST_FIELD, _GREATEST_FIELD = 4, 40
"""Pixels of a side of a field."""
_HEAD = len(b"........") + 25
"""Bytes of a file before the chunk that a number may stand in: its signature and the chunk IHDR."""
_PREFIX = "data:image/png;base64,"


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
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def with_new_files(case: Case, number: int) -> Case:
    """Return a case that, if it asks for that, has a comment in its images: the same pixels in files of other digests,
    so that they are sent, decoded and computed again."""
    if not case.has_new_files:
        return case
    return replace(case, messages=[{**turn, "content": _renewed(turn["content"], number)} for turn in case.messages])


def _renewed(content: Any, number: int) -> Any:
    if isinstance(content, str):
        return content
    comment = _chunk(b"tEXt", f"Comment\0{number}".encode())
    parts = []
    for part in content:
        if part["type"] == "image_url":
            file = base64.b64decode(part["image_url"]["url"].removeprefix(_PREFIX))
            part = _image_part(file[:_HEAD] + comment + file[_HEAD:])
        parts.append(part)
    return parts


def _image_part(file: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": _PREFIX + base64.b64encode(file).decode()}}


def _base64(rng: random.Random) -> str:
    return base64.b64encode(draw_png(rng)).decode()


def _question(rng: random.Random, images: int = 1) -> dict[str, Any]:
    text = {"type": "text", "text": f"What is number {rng.randint(1, 999)}?"}
    return user([*(_image_part(draw_png(rng)) for _ in range(images)), text])


def _image(rng: random.Random, vocab_size: int, length: int) -> Case:
    return Case("", messages=[_question(rng)], options=open_ended(length, temperature=0.0))


def _new_image(rng: random.Random, vocab_size: int, length: int) -> Case:
    options = open_ended(length, temperature=0.9, seed=rng.getrandbits(31))
    return Case("", messages=[_question(rng)], has_new_files=True, options=options)


def _images(rng: random.Random, vocab_size: int, length: int) -> Case:
    question = _question(rng, rng.randint(2, 3))
    return Case("", messages=[question], has_new_files=True, options=open_ended(length, temperature=0.0))


def _second_turn(rng: random.Random, vocab_size: int, length: int) -> Case:
    answer = {"role": "assistant", "content": "Many fields."}
    turns = [_question(rng), answer, user(f"And what is {rng.randint(1, 999)}?")]
    return Case("", messages=turns, options=open_ended(length, temperature=0.0))


IMAGE_FEATURES: tuple[tuple[str, MakeCase], ...] = (
    ("image", _image),
    ("new image", _new_image),
    ("new images", _images),
    ("second turn", _second_turn),
)


def image_calls(rng: random.Random, length: int) -> list[Case]:
    """Return one call of each other dialect. ``length``: most tokens of an answer."""
    text = f"What is number {rng.randint(1, 999)}?"
    source = {"type": "base64", "media_type": "image/png", "data": _base64(rng)}
    message = user([{"type": "image", "source": source}, {"type": "text", "text": text}])
    turn = user([{"type": "input_image", "image_url": _PREFIX + _base64(rng)}, {"type": "input_text", "text": text}])
    response: dict[str, Any] = {"input": [turn], "max_output_tokens": length, "temperature": 0}
    calls: dict[str, tuple[str, dict[str, Any]]] = {
        "image message": ("POST /v1/messages", {"messages": [message], "max_tokens": length, "temperature": 0}),
        "image response": ("POST /v1/responses", response),
        "image response in the background": ("POST /v1/responses", {**response, "background": True}),
        "Ollama image": (
            "POST /api/chat",
            {
                "messages": [user(text) | {"images": [_base64(rng)]}],
                "stream": False,
                "options": {"num_predict": length, "temperature": 0},
            },
        ),
    }
    return [
        Case(name, streamed=False, call=call, client="plain HTTP", options=body) for name, (call, body) in calls.items()
    ]
