"""Long sounds are transcribed as transformers' long-form ``generate`` does.

The pieces and the segments are the gateway's, the prompts the tokenizer's, the tokens of each piece the model's.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.generation.logits_process import (
    LogitsProcessorList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from tests.checkpoints.whole_sound import RATE, sound, write_whole_sound
from tests.services.gateway.fakes import FakeRequest
from tests.services.gateway.openai.ear import Ear, listening, send
from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.request import errors
from tokenloom.services.tokenizer.media.transcript_prompts import TranscriptPrompts
from tokenloom.v1 import output_processor_pb2, types_pb2

FRAMES = 3000


class Whisper:
    """A tiny model, which answers the requests of a gateway piece by piece, and whole sounds by transformers' rules."""

    def __init__(self, path: Path) -> None:
        self.model: Any = transformers.WhisperForConditionalGeneration.from_pretrained(path).eval()
        self.tokenizer: Any = transformers.WhisperTokenizer.from_pretrained(path)
        self._extractor: Any = transformers.WhisperFeatureExtractor.from_pretrained(path)
        prompts = TranscriptPrompts.of_checkpoint(path, load_tokenizer(path))
        assert prompts is not None
        self.prompts = prompts
        self.vocab_size = self.model.config.vocab_size
        self._features: Any = None

    def hear(self, samples: np.ndarray[Any, Any]) -> None:
        """Take the sound of the next requests."""
        self._features = self._extractor(
            samples, sampling_rate=RATE, return_tensors="pt", truncation=False, padding="longest"
        ).input_features

    @torch.inference_mode()
    def segments(self, **options: Any) -> list[dict[str, Any]]:
        found = self.model.generate(self._features, return_timestamps=True, return_segments=True, **options)
        segments: list[dict[str, Any]] = found["segments"][0]
        return segments

    @torch.inference_mode()
    def answer(self, submit: output_processor_pb2.Submit) -> list[int]:
        """Return the tokens of one request."""
        (item,) = submit.prompt.media
        piece = json.loads(item.options_json)
        start, size = piece["start"] // 160, piece["samples"] // 160
        features = self._features[..., start : start + size]
        features = torch.nn.functional.pad(features, (0, FRAMES - features.shape[-1]))
        ids = torch.tensor([list(submit.prompt.token_ids)])
        if submit.sampling_params.allowed_token_ids:
            logits = self.model(features, decoder_input_ids=ids).logits[0, -1]
            allowed = list(submit.sampling_params.allowed_token_ids)
            return [allowed[int(logits[allowed].argmax())]]
        config, begin = self.model.generation_config, ids.shape[1]
        rules: list[Any] = [
            SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, begin),
            SuppressTokensLogitsProcessor(config.suppress_tokens),
        ]
        if int(ids[0, -1]) != config.no_timestamps_token_id:
            rules.append(WhisperTimeStampLogitsProcessor(config, begin_index=begin))
        output = transformers.GenerationMixin.generate(
            self.model,
            features,
            decoder_input_ids=ids,
            logits_processor=LogitsProcessorList(rules),
            max_length=448,
            do_sample=False,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
        tokens: list[int] = output[0, begin:].tolist()
        return tokens

    def text(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Whisper]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more wait for each other on a busy machine
    yield Whisper(write_whole_sound("whisper", tmp_path_factory.mktemp("whisper")))
    torch.set_num_threads(num_threads)


@pytest.fixture
async def ear(socket_dir: Path, whisper: Whisper) -> AsyncIterator[Ear]:
    traits = whisper.prompts.traits
    end, size = traits.first_special_id, whisper.vocab_size
    async with listening(socket_dir, traits, vocab_size=size, end=end, seconds=None) as ear:
        for tokenizer in (ear.mesh.tokenizer, ear.mesh.second_tokenizer):
            tokenizer.make_transcript = whisper.prompts.encode

        async def compute(request: FakeRequest) -> None:
            try:
                ids = await asyncio.to_thread(whisper.answer, request.submit)
                texts = [whisper.tokenizer.decode([each]).encode() for each in ids]
                send(request, ids, texts, types_pb2.Logprobs(sampled=[-1.0] * len(ids), rank=[1] * len(ids)))
                request.finish()
            except Exception as error:
                request.fail(errors.Internal(repr(error)))

        tasks = set[asyncio.Task[None]]()
        ear.answer = lambda request: tasks.add(asyncio.create_task(compute(request)))  # type: ignore[method-assign]
        yield ear


@pytest.mark.parametrize(("seconds", "fields"), [(62.0, {}), (31.0, {"language": "german", "prompt": "Names: Ab"})])
async def test_long_sounds(ear: Ear, whisper: Whisper, seconds: float, fields: dict[str, str]) -> None:
    samples = sound(seconds, 3)
    whisper.hear(samples)
    options: dict[str, Any] = dict(fields)
    if text := options.pop("prompt", ""):
        options["prompt_ids"] = whisper.tokenizer.get_prompt_ids(text, return_tensors="pt")
    theirs = await asyncio.to_thread(whisper.segments, **options)
    theirs = [each for each in theirs if whisper.text(each["tokens"]).strip()]
    response = await ear.post(len(samples), response_format="verbose_json", **fields)
    assert response.status_code == 200, response.text
    ours = response.json()["segments"]
    assert [each["tokens"] for each in ours] == [each["tokens"].tolist() for each in theirs]
    assert [each["text"] for each in ours] == [whisper.text(each["tokens"]) for each in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert (one["start"], one["end"]) == pytest.approx((float(other["start"]), float(other["end"])), abs=1e-3)
    assert len({each["seek"] for each in ours}) > 1
