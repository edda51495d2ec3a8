"""A mesh answers chats with videos as transformers' whole model does: from the encoder's rows, again over the prefix
cache without any, and with prefill and decode apart."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import grpc
import httpx
import numpy as np
import openai
import pytest

from tests.checkpoints import frame_prompts
from tests.checkpoints.frame_prompts import FrameModel
from tests.checkpoints.video_prompts import Shown, VideoModel
from tests.checkpoints.whole_vision import write_whole_vision
from tests.gpu_worker.towers.video_files import shades, video
from tests.parity.vision_checkpoints import load_vision
from tokenloom.client import Client
from tokenloom.v1.encoder_pb2 import GetEncoderInfoRequest
from tokenloom.v1.encoder_pb2_grpc import EncoderStub

NUM_TOKENS = 24
QUESTION = "What happens? " * 3


class Served:
    """A mesh of a model, and transformers' model of the same checkpoint."""

    def __init__(self, mesh: Any, model: VideoModel | FrameModel) -> None:
        self.mesh = mesh
        self._model = model

    def answer(self, urls: Sequence[str], **options: Any) -> tuple[list[int], Any]:
        """Return the tokens of an answer, and its usage."""
        parts: list[Any] = [{"type": "video_url", "video_url": {"url": url}} for url in urls]
        with openai.OpenAI(base_url=f"{self.mesh.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
            answer: Any = client.chat.completions.create(
                model=self._model.kind,
                messages=[{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}],
                max_tokens=NUM_TOKENS,
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True} | options,
            )
        return answer.choices[0].token_ids, answer.usage

    def expected(self, videos: Sequence[Shown], **options: Any) -> tuple[list[int], int]:
        """Return the tokens of transformers' answer, and how many the prompt has."""
        prompt = self._model.chat(videos, QUESTION, **options)
        return self._model.generate(prompt, NUM_TOKENS).tokens, len(prompt.token_ids)

    def num_encoded(self) -> int:
        (part,) = [part for part in self.mesh.ps() if part["service"] == "encoder"]
        options = [("grpc.default_authority", "localhost")]
        with grpc.insecure_channel(part["address"], options=options) as channel:
            return EncoderStub(channel).GetEncoderInfo(GetEncoderInfoRequest(), timeout=60).encoded


def url_of(file: bytes, kind: str = "mp4") -> str:
    return f"data:video/{kind};base64,{base64.b64encode(file).decode()}"


def shown(file: bytes) -> Shown:
    """Return a file's frames as FFmpeg decodes them."""
    with av.open(io.BytesIO(file)) as container:
        rate = container.streams.video[0].average_rate
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert rate is not None
    return Shown(np.stack(frames), float(rate))


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("qwen3_vl", ()),
        ("qwen2_5_vl", ("--prefill", "1", "--decode", "1", "--pd-threshold", "16")),
        ("smolvlm", ()),
        ("llava_onevision", ("--prefill", "1", "--decode", "1", "--pd-threshold", "16")),
    ],
)
def test_answers_are_those_of_the_whole_model(serve: Any, tmp_path: Path, kind: str, layout: tuple[str, ...]) -> None:
    entries = {"vision_config": {"tokens_per_second": 2}} if kind == "qwen2_5_vl" else {}
    path = write_whole_vision(kind, tmp_path, **entries)
    model = (FrameModel if kind in frame_prompts.KINDS else VideoModel)(kind, path, load_vision(path))
    served = Served(serve(str(path), "--max-model-len", "1500", "--dtype", "float32", *layout), model)
    one, other = video(shades(23, 200, 180)), video(shades(23, 200, 180, 2))
    second = video(shades(9, 120, 200, 1), "webm", 4)
    for files in ([one], [other], [one, second], []):
        wanted, num_tokens = served.expected([shown(file) for file in files])
        tokens, usage = served.answer([url_of(file) for file in files])
        assert (tokens, usage.prompt_tokens) == (wanted, num_tokens)
    assert served.answer([url_of(one)])[0] != served.answer([url_of(other)])[0], "it sees the video"

    before = served.num_encoded()
    tokens, usage = served.answer([url_of(one)])
    assert tokens == served.expected([shown(one)])[0]
    assert usage.prompt_tokens_details.cached_tokens >= 64
    assert served.num_encoded() == before, "a second turn computes no row"

    options, theirs = {"num_frames": 2}, dict[str, Any](num_frames=2)
    if isinstance(model, VideoModel):
        options |= {"max_pixels": 40_000}
        theirs |= {"size": model.size(max_pixels=40_000)}
    wanted, num_tokens = served.expected([shown(one)], **theirs)
    tokens, usage = served.answer([url_of(one)], mm_processor_kwargs=options)
    assert (tokens, usage.prompt_tokens) == (wanted, num_tokens)
    assert served.num_encoded() > before

    part = {"type": "video_url", "video_url": {"url": url_of(one[:500])}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    refused = httpx.post(f"{served.mesh.url}/v1/chat/completions", json=body, timeout=120)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[0].content[0].video_url")

    gateway = next(part["address"] for part in served.mesh.ps() if part["service"] == "gateway")
    with Client(gateway) as client:  # whose parts travel as bytes
        parts = [{"type": "video_url", "video_url": url_of(one)}, QUESTION]
        output = client.chat(
            [{"role": "user", "content": parts}], max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True
        )
    assert list(output.outputs[0].token_ids) == served.expected([shown(one)])[0]
