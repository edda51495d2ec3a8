"""A mesh answers chats with sounds as transformers' whole model does: from the encoder's rows, again over the prefix
cache without any, and with prefill and decode apart."""

import base64
import io
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import openai
import pytest

from tests.checkpoints.sound_prompts import SoundModel
from tests.checkpoints.whole_sound import AUDIO_ID, RATE, sound, write_whole_sound
from tokenloom.v1.encoder_pb2 import GetEncoderInfoRequest
from tokenloom.v1.encoder_pb2_grpc import EncoderStub

NUM_TOKENS = 24
QUESTION = "What is it? " * 4


class Served:
    """A mesh of Qwen2-Audio, and transformers' model of the same checkpoint."""

    def __init__(self, mesh: Any, model: SoundModel) -> None:
        self.mesh = mesh
        self._model = model

    def answer(self, files: Sequence[bytes], text: str = QUESTION) -> tuple[list[int], Any]:
        """Return the tokens of an answer, and the details of the prompt's in its usage."""
        parts: list[Any] = [
            {"type": "input_audio", "input_audio": {"data": base64.b64encode(file).decode(), "format": "wav"}}
            for file in files
        ]
        with openai.OpenAI(base_url=f"{self.mesh.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
            answer: Any = client.chat.completions.create(
                model="qwen2_audio",
                messages=[{"role": "user", "content": [*parts, {"type": "text", "text": text}]}],
                max_tokens=NUM_TOKENS,
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
        return answer.choices[0].token_ids, answer.usage.prompt_tokens_details

    def expected(self, files: Sequence[bytes], text: str = QUESTION) -> tuple[list[int], int]:
        """Return the tokens of transformers' answer, and how many of the prompt stand for sounds."""
        content = [*({"type": "audio"} for _ in files), {"type": "text", "text": text}]
        rendered = self._model.text([{"role": "user", "content": content}])
        prompt = self._model.prompt(rendered, [samples_of(file) for file in files])
        return self._model.generate(prompt, NUM_TOKENS).tokens, prompt.token_ids.count(AUDIO_ID)

    def num_encoded(self) -> int:
        (part,) = [part for part in self.mesh.ps() if part["service"] == "encoder"]
        options = [("grpc.default_authority", "localhost")]
        with grpc.insecure_channel(part["address"], options=options) as channel:
            return EncoderStub(channel).GetEncoderInfo(GetEncoderInfoRequest(), timeout=60).encoded


def wav(seconds: float, seed: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(RATE)
        written.writeframes((sound(seconds, seed) * 32768).astype("<i2").tobytes())
    return file.getvalue()


def samples_of(file: bytes) -> Any:
    with wave.open(io.BytesIO(file)) as read:
        return np.frombuffer(read.readframes(read.getnframes()), "<i2").astype(np.float32) / 32768


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whole_sound("qwen2_audio", tmp_path_factory.mktemp("sounds"))


@pytest.mark.parametrize("layout", [(), ("--prefill", "1", "--decode", "1", "--pd-threshold", "16")])
def test_answers_are_those_of_the_whole_model(serve: Any, path: Path, layout: tuple[str, ...]) -> None:
    served = Served(serve(str(path), "--max-model-len", "1024", "--dtype", "float32", *layout), SoundModel(path))
    one, two, none = [wav(1.0, 0)], [wav(2.345, 1), wav(0.5, 2)], list[bytes]()
    for files in (one, two, none):
        wanted, num_sound_tokens = served.expected(files)
        tokens, details = served.answer(files)
        assert tokens == wanted
        assert (details.audio_tokens or 0) == num_sound_tokens
    assert served.answer(one)[0] != served.answer([wav(1.0, 9)])[0], "it hears the sound"

    before = served.num_encoded()
    tokens, details = served.answer(one)
    assert tokens == served.expected(one)[0]
    assert details.cached_tokens >= 25
    assert served.num_encoded() == before, "a second turn computes no row"

    image = {"type": "image_url", "image_url": "data:image/png;base64,AA=="}
    body = {"messages": [{"role": "user", "content": [image]}]}
    refused = httpx.post(f"{served.mesh.url}/v1/chat/completions", json=body, timeout=120)
    assert "reads text and sounds only" in refused.json()["error"]["message"]
