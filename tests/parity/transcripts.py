"""Transcripts for an engine, with rows from transformers' tower of Whisper, and the tokens that its decoder draws."""

import functools
import hashlib
import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from tests.checkpoints.whisper_checkpoint import RATE, whisper_id
from tests.checkpoints.whole_sound import sound, write_whole_sound
from tests.parity.engine import Engine
from tokenloom.engine_core.data.core_params import CorePoolingParams, CoreSamplingParams
from tokenloom.engine_core.data.embedding_rows import MediaSpan, RowsKey
from tokenloom.engine_core.data.messages import ArrivedRows, EngineCoreRequest

NUM_TOKENS = 24
BEGIN = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
_PREVIOUS = [whisper_id("<|startofprev|>"), *range(60, 97)]
PROMPTS: list[tuple[float, int, list[int]]] = [
    (2.0, 0, []),
    (5.0, 1, []),
    (2.0, 0, _PREVIOUS),
    (9.0, 2, _PREVIOUS),
    (30.0, 3, []),
    (5.0, 1, _PREVIOUS[:20]),
]
"""The seconds and the seed of a prompt's sound, and what stands before the beginning of its transcript."""
ROWS = 1500


@dataclass(frozen=True)
class Transcript:
    """A prompt with the rows of its sound, and the tokens that follow."""

    prompt: list[int]
    rows: npt.NDArray[np.float32]
    tokens: list[int]

    @property
    def key(self) -> bytes:
        return hashlib.sha256(self.rows.tobytes()).digest()


@dataclass(frozen=True)
class TranscriptReference:
    """A whole checkpoint, and what transformers makes of prompts."""

    path: Path
    model: Any
    extractor: Any
    cases: list[Transcript]

    def features(self, seconds: float, seed: int) -> torch.Tensor:
        """Return what the tower reads of a sound, [1, mels, frames]."""
        found = self.extractor(sound(seconds, seed), sampling_rate=RATE)["input_features"]
        return torch.from_numpy(np.asarray(found))


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []  # of this process, which removes them at its end


@functools.cache
def transcript_reference() -> TranscriptReference:
    """Return the reference, made once for all tests of a process."""
    _FOLDERS.append(tempfile.TemporaryDirectory(prefix="transcripts-"))
    path = write_whole_sound("whisper", Path(_FOLDERS[-1].name))
    model: Any = transformers.WhisperForConditionalGeneration.from_pretrained(path, attn_implementation="eager")
    reference = TranscriptReference(path, model.eval(), transformers.WhisperFeatureExtractor.from_pretrained(path), [])
    for seconds, seed, previous in PROMPTS:
        prompt = previous + list(map(whisper_id, BEGIN))
        features = reference.features(seconds, seed)
        with torch.inference_mode():
            rows = model.model.encoder(features).last_hidden_state[0].numpy()
        reference.cases.append(Transcript(prompt, rows, _continue(model, rows, prompt)))
    return reference


@torch.inference_mode()
def _continue(model: Any, rows: npt.NDArray[np.float32], prompt: list[int]) -> list[int]:
    """Return the greedy tokens of the decoder alone, up to the end of the transcript. ``generate`` adds rules to them,
    which have tests of their own."""
    encoded, tokens = torch.from_numpy(rows)[None], list[int]()
    while len(tokens) < NUM_TOKENS and whisper_id("<|endoftext|>") not in tokens:
        ids = torch.tensor([prompt + tokens])
        hidden = model.model.decoder(input_ids=ids, encoder_hidden_states=encoded, use_cache=False).last_hidden_state
        tokens.append(int(model.proj_out(hidden[0, -1]).argmax()))
    return tokens


class TranscriptEngine(Engine):
    """An engine that gets the rows of sounds when it asks for them."""

    def __init__(self, reference: TranscriptReference, *, one_key: bool = False, **options: Any) -> None:
        """``one_key``: all sounds have the same key, which makes tokens wrong."""
        options.setdefault("max_model_len", 448)
        super().__init__(reference.path, **options)
        self._one_key = one_key
        self._rows: dict[RowsKey, npt.NDArray[np.float32]] = {}
        self.pooled: dict[str, npt.NDArray[np.float32]] = {}
        self._numbers = map(str, itertools.count())

    @property
    def num_asked(self) -> int:
        """Return how many sounds were asked for."""
        assert self.core.scheduler.media is not None
        return self.core.scheduler.media.num_asked

    def transcribe(
        self,
        cases: Sequence[Transcript],
        max_tokens: int = NUM_TOKENS,
        pooling: CorePoolingParams | None = None,
        **sampling: Any,
    ) -> list[list[int]]:
        """Return the tokens of all cases at once; greedy unless ``sampling`` says otherwise."""
        names = [self.add(case, max_tokens, pooling, **sampling) for case in cases]
        return self.run(names)

    def add(
        self,
        case: Transcript,
        max_tokens: int = NUM_TOKENS,
        pooling: CorePoolingParams | None = None,
        seed: int = 0,
        **sampling: Any,
    ) -> str:
        """Add a request, and return its id."""
        name = f"transcript-{next(self._numbers)}"
        params = CoreSamplingParams(
            max_tokens=max_tokens,
            seed=seed,
            stop_token_ids=(whisper_id("<|endoftext|>"),),
            **{"temperature": 0.0, **sampling},
        )
        span = MediaSpan(0, 0, 0, bytes(32) if self._one_key else case.key, ROWS)
        self._rows.setdefault(span.rows_key, case.rows)
        self.core.add_request(EngineCoreRequest(name, list(case.prompt), params, media=[span], pooling_params=pooling))
        return name

    def run(self, names: Sequence[str]) -> list[list[int]]:
        """Step until all requests have ended, and return the tokens of these."""
        tokens: dict[str, list[int]] = {name: [] for name in names}
        while self.core.has_work():
            outputs = self.core.step()
            for output in outputs.outputs:
                assert not output.error, output.error
                tokens[output.request_id] += output.new_token_ids
                if output.pooled is not None:
                    self.pooled[output.request_id] = output.pooled
            self.stats = outputs.scheduler_stats or self.stats
            for wanted in outputs.rows_wanted:
                self.core.scheduler.take_rows(ArrivedRows(wanted.key, wanted.number, 0, self._rows[wanted.key]))
        assert self.stats.kv_usage == 0.0, "a block leaked"
        return [tokens[name] for name in names]
