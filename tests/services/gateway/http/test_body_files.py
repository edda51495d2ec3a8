"""Files leave bodies as they arrive, whatever the pieces, and nothing else of a body changes."""

import base64
import hashlib
import itertools
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tokenloom.request.limits import DividedLimit
from tokenloom.services.gateway.http import body_files
from tokenloom.services.gateway.http.body_files import SHORTEST_FILE, BodyFiles, FileExtractor

IMAGE = random.Random(1).randbytes(SHORTEST_FILE + 1000)
OTHER = random.Random(2).randbytes(SHORTEST_FILE + 2)
SMALL = b"small"
URL = "data:image/png;base64,"


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def extract(body: bytes, size: int) -> FileExtractor:
    extractor = FileExtractor()
    for start in range(0, len(body), size):
        extractor.feed(body[start : start + size])
    extractor.end()
    return extractor


def files_of(extractor: FileExtractor) -> dict[str, bytes]:
    for key, file in extractor.files.items():
        assert (key, file.num_bytes) == (file.digest, sum(map(len, file.pieces)))
    return {key.hex(): b"".join(file.pieces) for key, file in extractor.files.items()}


BODIES: dict[str, tuple[Any, Any, list[bytes]]] = {
    "chat": (
        {"messages": [{"content": [{"image_url": {"url": URL + b64(IMAGE), "detail": "low"}}, {"text": "x" * 999}]}]},
        {
            "messages": [
                {
                    "content": [
                        {"image_url": {"url": f"data:image/png;sha256,{digest(IMAGE)}", "detail": "low"}},
                        {"text": "x" * 999},
                    ]
                }
            ]
        },
        [IMAGE],
    ),
    "responses": (
        {"input": [{"image_url": URL + b64(IMAGE)}, {"image_url": URL + b64(OTHER)}]},
        {
            "input": [
                {"image_url": f"data:image/png;sha256,{digest(IMAGE)}"},
                {"image_url": f"data:image/png;sha256,{digest(OTHER)}"},
            ]
        },
        [IMAGE, OTHER],
    ),
    "anthropic": (
        {"source": {"type": "base64", "media_type": "image/png", "data": b64(IMAGE)}},
        {"source": {"type": "base64", "media_type": "image/png", "data": f"sha256:{digest(IMAGE)}"}},
        [IMAGE],
    ),
    "ollama": (
        {"images": [b64(IMAGE), b64(SMALL), b64(OTHER)], "model": "m", "data": "plain words"},
        {
            "images": [f"sha256:{digest(IMAGE)}", b64(SMALL), f"sha256:{digest(OTHER)}"],
            "model": "m",
            "data": "plain words",
        },
        [IMAGE, OTHER],
    ),
    "small files stay": (
        {"url": URL + b64(SMALL), "images": [b64(SMALL)], "data": b64(SMALL)},
        {"url": URL + b64(SMALL), "images": [b64(SMALL)], "data": b64(SMALL)},
        [],
    ),
    "texts stay": (
        {"text": URL + b64(IMAGE), "content": json.dumps({"url": URL + b64(IMAGE), "data": b64(IMAGE)})},
        {"text": URL + b64(IMAGE), "content": json.dumps({"url": URL + b64(IMAGE), "data": b64(IMAGE)})},
        [],
    ),
    "no base64": (
        {"url": URL + b64(IMAGE)[:-8] + "=" + b64(IMAGE)[-7:], "data": "a" * SHORTEST_FILE + "_"},
        {"url": URL + b64(IMAGE)[:-8] + "=" + b64(IMAGE)[-7:], "data": "a" * SHORTEST_FILE + "_"},
        [],
    ),
    "a list of pictures": (
        {"video_url": {"url": f"data:video/jpeg;fps=2;base64,{b64(IMAGE)},{b64(OTHER)}"}, "data": b64(IMAGE)},
        {
            "video_url": {"url": f"data:video/jpeg;fps=2;base64,{b64(IMAGE)},{b64(OTHER)}"},
            "data": f"sha256:{digest(IMAGE)}",
        },
        [IMAGE],
    ),
    "cut base64": ({"data": b64(IMAGE)[:-3]}, {"data": b64(IMAGE)[:-3]}, []),
    "arguments of tools": (
        {"input": {"data": 'name,"age"\nAda,36\n' * 2000, "images": ["é\\" * 9000, "word " * 9000]}, "x": b64(SMALL)},
        {"input": {"data": 'name,"age"\nAda,36\n' * 2000, "images": ["é\\" * 9000, "word " * 9000]}, "x": b64(SMALL)},
        [],
    ),
    "the same twice": (
        {"images": [b64(IMAGE), b64(IMAGE)]},
        {"images": [f"sha256:{digest(IMAGE)}", f"sha256:{digest(IMAGE)}"]},
        [IMAGE],
    ),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("size", [997, 4093, 1 << 20])
@pytest.mark.parametrize("indent", [None, 2])
def test_files_are_taken_out(name: str, size: int, indent: int | None) -> None:
    body, expected, files = BODIES[name]
    found = extract(json.dumps(body, indent=indent).encode(), size)
    assert json.loads(found.text) == expected
    assert files_of(found) == {digest(file): file for file in files}


@pytest.mark.parametrize("size", [61, 1 << 20])
def test_pieces_may_end_anywhere(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_files, "SHORTEST_FILE", 64)
    monkeypatch.setattr(body_files, "SLICE_BYTES", 50)
    monkeypatch.setattr(body_files, "PAUSE_SECONDS", 0.0)
    for length in range(40, 110):
        data = random.Random(length).randbytes(length)
        body = {"images": [b64(data), b64(data + b"x")], "b": [{"url": URL + b64(data)}, {"data": b64(data)}], "c": "d"}
        found = extract(json.dumps(body).encode(), size)
        assert len(files_of(found)) == sum(len(b64(each)) >= 64 for each in (data, data + b"x")), length
        text = json.loads(found.text)
        assert text["c"] == "d"
        assert len(text["images"]) == 2


@pytest.mark.parametrize("size", [7, 997, 1 << 20])
def test_escapes_of_json_are_read(size: int) -> None:
    text = b64(IMAGE)
    assert "/" in text
    assert "+" in text
    escaped = "".join({"/": "\\/", "+": "\\u002B"}.get(each, each) for each in text)
    wrapped = "\\n".join(text[at : at + 76] for at in range(0, len(text), 76))
    body = b'{"url": "data:image\\/png;base64,%b", "data": "%b"}' % (escaped.encode(), wrapped.encode())
    found = extract(body, size)
    assert files_of(found) == {digest(IMAGE): IMAGE}
    assert json.loads(found.text) == {
        "url": f"data:image/png;sha256,{digest(IMAGE)}",
        "data": f"sha256:{digest(IMAGE)}",
    }


@pytest.mark.parametrize("size", [7, 1 << 20])
@pytest.mark.parametrize("kind", ["video/jpeg", "VIDEO/JPEG;fps=2"])
def test_a_list_of_pictures_may_have_escapes(size: int, kind: str) -> None:
    """Known as one file that is no base64 only at its comma, it was refused: what had come was forgotten."""
    body = {"url": f"data:{kind};base64,{b64(IMAGE)},{b64(OTHER)}"}
    found = extract(json.dumps(body).replace("/", "\\/").encode(), size)
    assert json.loads(found.text) == body
    assert not found.files


def test_a_body_that_is_cut_stays_wrong() -> None:
    found = extract(b'{"data": "' + b64(IMAGE).encode()[:20000], 4096)
    assert not found.files
    with pytest.raises(ValueError):
        json.loads(found.text)


def test_a_file_is_held_once() -> None:
    """The base64 and the file are never there together."""
    extractor, piece = FileExtractor(), b64(bytes(3 << 16)).encode()
    extractor.feed(b'{"data": "')
    for _ in range(16):
        extractor.feed(piece)
        assert len(extractor._tail) + len(extractor.text) < 1024
    extractor.feed(b'"}')
    extractor.end()
    (file,) = extractor.files.values()
    assert file.num_bytes == 16 * (3 << 16)


class Pieces:
    """A body that arrives in these pieces, and its parser, which notes what it is given."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces
        self.read: list[bytes] = []

    async def stream(self, limit: int, length: int) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece

    async def run(self, call: Any) -> Any:
        self.read += getattr(call, "args", ())
        return call()


async def test_large_pieces_are_not_copied_and_small_ones_are_read_together() -> None:
    text = json.dumps({"images": [b64(IMAGE)] * 20}).encode()
    cuts = [0, 100, 200, 50_000, 50_100, 200_000, len(text)]
    body: Any = Pieces(*(text[start:end] for start, end in itertools.pairwise(cuts)))
    extractor = await BodyFiles(body, DividedLimit(0, is_divided=False))._extract(body, 1 << 20, len(text))
    assert files_of(extractor) == {digest(IMAGE): IMAGE}
    assert [len(piece) for piece in body.read] == [200, 49_800, 100, 149_900, len(text) - 200_000, 0]
    assert all(any(piece is each for each in body.pieces) for piece in body.read if len(piece) > 1000)
