"""A mesh answers chats with images as transformers' whole model does: from the encoder's rows, again over the prefix
cache without any, with prefill and decode apart, and when the encoder is killed while its rows are wanted."""

import base64
import io
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
import torch
import transformers
from PIL import Image, ImageDraw

from tests.checkpoints.vision_prompts import KINDS_OF_TOKENS, OF_PROCESSORS, picture
from tests.checkpoints.whole_vision import FAMILIES, token_id, write_whole_vision
from tests.parity.vision_checkpoints import load_vision
from tokenloom.v1.encoder_pb2 import GetEncoderInfoRequest
from tokenloom.v1.encoder_pb2_grpc import EncoderStub

NUM_TOKENS = 24


class Served:
    """A mesh of one model that reads images, and transformers' model of the same checkpoint."""

    def __init__(self, mesh: Any, path: Path, kind: str = "llava") -> None:
        self.mesh, self._kind = mesh, kind
        self._model = load_vision(path)
        self._model.generation_config.eos_token_id = None
        self._images: Any = transformers.AutoImageProcessor.from_pretrained(path)  # type: ignore[no-untyped-call]

    def post(self, path: str, images: Sequence[Image.Image], text: str, **fields: Any) -> Any:
        parts: list[Any] = [{"type": "image_url", "image_url": {"url": _url(image)}} for image in images]
        turn = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
        return httpx.post(f"{self.mesh.url}{path}", json={"messages": [turn], **fields}, timeout=120).json()

    def ids(self, images: Sequence[Image.Image], text: str) -> list[int]:
        ids: list[int] = self.post("/tokenize", images, text)["tokens"]
        return ids

    def answer(self, images: Sequence[Image.Image], text: str) -> tuple[list[int], int]:
        """Return the tokens of an answer, and how many of the prompt were cached."""
        options = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = self.post("/v1/chat/completions", images, text, **options)
        assert "choices" in answer, answer
        return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    @torch.inference_mode()
    def expected(self, images: Sequence[Image.Image], text: str) -> list[int]:
        ids = torch.tensor([self.ids(images, text)])
        made = self._images(list(images), return_tensors="pt")
        inputs = {name: value for name, value in made.items() if name not in OF_PROCESSORS}
        if (name := KINDS_OF_TOKENS.get(self._kind)) is not None:
            inputs[name] = (ids == token_id(FAMILIES[self._kind].image_token)).long()
        output = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
            **inputs,
        )
        tokens: list[int] = output[0, ids.shape[1] :].tolist()
        return tokens

    def encoder(self) -> dict[str, Any]:
        (part,) = [part for part in self.mesh.ps() if part["service"] == "encoder"]
        found: dict[str, Any] = part
        return found

    def num_encoded(self) -> int:
        options = [("grpc.default_authority", "localhost")]
        with grpc.insecure_channel(self.encoder()["address"], options=options) as channel:
            return EncoderStub(channel).GetEncoderInfo(GetEncoderInfoRequest(), timeout=60).encoded


def _url(image: Image.Image) -> str:
    data = io.BytesIO()
    image.save(data, "PNG")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


def test_answers_are_those_of_the_whole_model(serve: Any, tmp_path: Path) -> None:
    path = write_whole_vision("llava", tmp_path)
    served = Served(serve(str(path), "--max-model-len", "1024"), path)
    one, two = [picture(200, 120, 1)], [picture(60, 300, 2), picture(90, 90, 3)]
    asked = "What is this? " * 4
    for images in (one, two):
        assert served.answer(images, asked) == (served.expected(images, asked), 0)
    assert served.ids(two, asked).count(token_id("<image>")) == 32
    assert served.answer(one, asked)[0] != served.answer([picture(200, 120, 9)], asked)[0], "it sees the image"

    before = served.num_encoded()
    tokens, cached = served.answer(one, asked)
    assert tokens == served.expected(one, asked)
    assert cached >= 32
    assert served.num_encoded() == before, "a second turn computes no row"

    # In three calls, of which the second names the image by its digest alone.
    chat = {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": _url(one[0])}}, {"type": "text", "text": asked},
    ]}], "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}  # fmt: skip
    rendered = httpx.post(f"{served.mesh.url}/v1/chat/completions/render", json=chat, timeout=120).json()
    assert [len(each) for each in rendered["features"]["mm_hashes"].values()] == [1]
    generated = httpx.post(f"{served.mesh.url}/inference/v1/generate", json=rendered, timeout=120).json()
    assert generated["choices"][0]["token_ids"] == tokens
    assert served.num_encoded() == before

    # The gateway puts the file at the encoder that has taken the place of the killed one.
    psutil.Process(served.encoder()["pid"]).kill()
    late = [picture(33, 44, 5)]
    assert served.answer(late, asked)[0] == served.expected(late, asked)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3"])
def test_prefill_and_decode_apart(serve: Any, kind: str, tmp_path: Path) -> None:
    path = write_whole_vision(kind, tmp_path)
    apart = ("--prefill", "1", "--decode", "1", "--pd-threshold", "16")
    served = Served(serve(str(path), "--max-model-len", "1024", "--dtype", "float32", *apart), path, kind)
    one, two = [picture(200, 120, 1)], [picture(60, 300, 2), picture(90, 90, 3)]
    asked = "What is this? " * 4
    for images in (one, two):
        assert served.answer(images, asked)[0] == served.expected(images, asked)
    assert served.answer(one, asked)[0] != served.answer([picture(200, 120, 9)], asked)[0], "it sees the image"
    before = served.num_encoded()
    tokens, cached = served.answer(one, asked)
    assert (tokens, cached > 0) == (served.expected(one, asked), True)
    assert served.num_encoded() == before, "neither engine asked for rows"


def test_the_command_line_asks_the_packaged_model_about_a_drawing(serve: Any, tmp_path: Path) -> None:
    mesh = serve("tokenloom-picture")
    drawing = Image.new("RGB", (300, 300), "white")
    ImageDraw.Draw(drawing).rectangle((90, 90, 210, 210), fill="red")
    drawing.save(tmp_path / "drawing.png")
    command = [sys.executable, "-m", "tokenloom.cli.main", "chat", "--base-url", mesh.url, "--temperature", "0"]

    def answer(*arguments: str) -> str:
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL
        )
        return done.stdout.strip()

    shown = ("--image", str(tmp_path / "drawing.png"))
    assert answer("What is in the picture?", *shown) == "There is a red square in the middle."
    assert answer("What colour is the square?", *shown) == "The square is red."
    assert answer("What is in the picture?").startswith("I see no picture.")
