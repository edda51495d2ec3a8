"""A mesh hears sounds as transformers' Whisper does: short and long ones, with segments, and when its engine or its
encoder is killed while it hears."""

import io
import math
import threading
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import openai
import psutil
import pytest
import torch
import transformers

from tests.checkpoints.whole_sound import RATE, sound, write_whole_sound
from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.services.gateway.records.transcript import HeardToken, Word, words_of
from tokenloom.services.output_processor.text.vocabulary import Vocabulary
from tokenloom.services.tokenizer.media.transcript_prompts import TranscriptPrompts

LONG_SECONDS = 70


class Reference:
    """Transformers' model of a checkpoint, with what its mesh has to answer."""

    def __init__(self, path: Path) -> None:
        self.model = transformers.WhisperForConditionalGeneration.from_pretrained(
            path, attn_implementation="eager"
        ).eval()
        self.tokenizer = transformers.WhisperTokenizer.from_pretrained(path)
        self._extractor: Any = transformers.WhisperFeatureExtractor.from_pretrained(path)

    @torch.inference_mode()
    def segments(self, samples: npt.NDArray[np.float32], **options: Any) -> list[dict[str, Any]]:
        """Return the segments of a long sound."""
        features = self._extractor(
            samples,
            sampling_rate=RATE,
            return_tensors="pt",
            truncation=False,
            padding="longest",
            return_attention_mask=True,
        )
        found = self.model.generate(**features, return_timestamps=True, return_segments=True, **options)
        segments: list[dict[str, Any]] = found["segments"][0]
        return segments

    @torch.inference_mode()
    def text(self, samples: npt.NDArray[np.float32], **options: Any) -> str:
        """Return the transcript of a sound of at most 30 seconds."""
        features = self._extractor(samples, sampling_rate=RATE, return_tensors="pt")
        ids = self.model.generate(features.input_features, **options)[0]
        return self.decoded(ids)

    def decoded(self, ids: Any) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


def wav(samples: npt.NDArray[np.float32]) -> tuple[str, bytes]:
    """Return the file of a form."""
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setparams((1, 2, RATE, len(samples), "NONE", ""))
        file.writeframes((samples * 32767).astype("<i2").tobytes())
    return "a.wav", data.getvalue()


def heard(samples: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the samples that the file holds."""
    return ((samples * 32767).astype("<i2") / 32768).astype(np.float32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whole_sound("whisper", tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def reference(path: Path) -> Iterator[Reference]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more wait for each other on a busy machine
    yield Reference(path)
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def mesh(serve: Any, path: Path) -> Any:
    return serve(str(path))


def post(mesh: Any, samples: npt.NDArray[np.float32], route: str = "transcriptions", **fields: Any) -> httpx.Response:
    response = httpx.post(f"{mesh.url}/v1/audio/{route}", data=fields, files={"file": wav(samples)}, timeout=300)
    assert response.status_code == 200, response.text
    return response


def test_short_sounds(mesh: Any, reference: Reference) -> None:
    texts = set()
    for seconds, seed in ((3.0, 1), (12.5, 2), (30.0, 3)):
        samples = sound(seconds, seed)
        expected = reference.text(heard(samples))
        assert post(mesh, samples).json()["text"] == expected.strip()
        assert post(mesh, samples, language="de", response_format="text").text == (
            reference.text(heard(samples), language="de").strip() + "\n"
        )
        texts.add(expected)
    assert len(texts) == 3, "it hears the sound"
    samples = sound(3.0, 1)
    translated = post(mesh, samples, "translations", language="en").json()["text"]
    assert translated == reference.text(heard(samples), language="en", task="translate").strip()


def test_long_sounds(mesh: Any, reference: Reference) -> None:
    samples = sound(LONG_SECONDS, 4)
    answer = post(mesh, samples, response_format="verbose_json").json()
    theirs = [each for each in reference.segments(heard(samples)) if reference.decoded(each["tokens"]).strip()]
    assert [each["tokens"] for each in answer["segments"]] == [each["tokens"].tolist() for each in theirs]
    for ours, other in zip(answer["segments"], theirs, strict=True):
        assert (ours["start"], ours["end"]) == pytest.approx((float(other["start"]), float(other["end"])), abs=1e-3)
        assert ours["text"] == reference.decoded(other["tokens"])
    assert len({each["seek"] for each in answer["segments"]}) > 1
    assert answer["duration"] == LONG_SECONDS


def test_words(mesh: Any, path: Path, reference: Reference) -> None:
    samples = sound(LONG_SECONDS, 5)
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": "word", "language": "en"}
    ours = post(mesh, samples, **fields).json()["words"]
    theirs = reference.segments(heard(samples), language="en", task="transcribe", return_token_timestamps=True)
    tokenizer = load_tokenizer(path)
    prompts, vocabulary = TranscriptPrompts.of_checkpoint(path, tokenizer), Vocabulary(tokenizer)
    assert prompts is not None
    expected: list[Word] = []
    for each in theirs:
        tokens = [HeardToken(token, vocabulary.token_bytes(token), 0.0) for token in each["tokens"].tolist()]
        times = [math.nan, *each["token_timestamps"].tolist()]  # when the first one begins, the segment does not say
        expected += words_of(tokens, times, "en", prompts.traits)
    assert [(each["word"], each["end"]) for each in ours] == [(each.text, round(each.end, 2)) for each in expected]
    for one, other in zip(ours, expected, strict=True):
        assert math.isnan(other.start) or one["start"] == round(other.start, 2)
    assert len({each["end"] for each in ours}) > 3


def test_openai_client_streams(mesh: Any, reference: Reference) -> None:
    samples = sound(12.5, 2)
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="-") as client:
        model = client.models.list().data[0].id
        events = list(client.audio.transcriptions.create(file=wav(samples), model=model, stream=True))
    done = events[-1]
    assert done.type == "transcript.text.done"
    assert "".join(each.delta for each in events[:-1] if each.type == "transcript.text.delta") == done.text
    assert done.text.strip() == reference.text(heard(samples)).strip()


def test_it_reads_nothing_else(mesh: Any) -> None:
    turns = [{"role": "user", "content": "hi"}]
    response = httpx.post(f"{mesh.url}/v1/chat/completions", json={"messages": turns}, timeout=60)
    assert (response.status_code, "/v1/audio/transcriptions" in response.text) == (400, True)


@pytest.mark.parametrize("service", ["engine", "encoder"])
def test_the_answer_is_the_same_when_a_part_is_killed(mesh: Any, reference: Reference, service: str) -> None:
    samples = sound(LONG_SECONDS, 6 if service == "engine" else 7)  # nothing of it is cached
    answers: list[Any] = []
    call = threading.Thread(target=lambda: answers.append(post(mesh, samples, response_format="verbose_json").json()))
    call.start()
    psutil.Process(next(part["pid"] for part in mesh.ps() if part["service"] == service)).kill()
    call.join()
    theirs = [each for each in reference.segments(heard(samples)) if reference.decoded(each["tokens"]).strip()]
    assert [each["tokens"] for each in answers[0]["segments"]] == [each["tokens"].tolist() for each in theirs]
