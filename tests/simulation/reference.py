"""What a request's answer must be: the tokens of the hash worker, and their text up to a stop string."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens
from tokenloom.model_files.checkpoint import CheckpointInfo
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.services.output_processor.output_processor_settings import OutputProcessorSettings
from tokenloom.services.output_processor.service import load_checkpoint
from tokenloom.services.output_processor.text.detokenizer import Detokenizer
from tokenloom.services.output_processor.text.vocabulary import Vocabulary
from tokenloom.v1.types_pb2 import Fingerprint

VOCAB_SIZE: int = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]

Loaded = tuple[CheckpointInfo, Vocabulary, Fingerprint]


@dataclass(frozen=True)
class Expected:
    """Holds the tokens and the text of every sample of an answer, and whether a stop string ended it."""

    tokens: list[int]
    text: str
    is_stopped: bool


@functools.cache
def _load() -> Loaded:
    return load_checkpoint(DEMO_MODEL, OutputProcessorSettings(coordinator="unix:/simulation/none"))


def load_once(path: Path, settings: OutputProcessorSettings) -> Loaded:
    """Return what an output processor reads of the checkpoint; it is read once for all seeds."""
    assert path == DEMO_MODEL, path
    return _load()


@functools.lru_cache(maxsize=256)
def _tokens(prompt: tuple[int, ...], num_tokens: int, state_chunk: int) -> list[int]:
    return expected_tokens(prompt, num_tokens, VOCAB_SIZE, state_chunk=state_chunk)


def expected(
    prompt: tuple[int, ...],
    num_tokens: int,
    stop: tuple[str, ...] = (),
    state_chunk: int = 0,
    hashed: tuple[int, ...] = (),
) -> Expected:
    """Return what every sample of an answer must be. ``state_chunk``: that of the engines' workers. ``hashed``: the
    prompt with what stands for rows of images in a hash; empty: it has none."""
    tokens = _tokens(hashed or prompt, num_tokens, state_chunk)
    detokenizer = Detokenizer(_load()[1], prompt, stop=stop)
    texts: list[str] = []
    for token in tokens:
        text, match = detokenizer.step([token])
        texts.append(text)
        if match is not None:
            return Expected(tokens[: match.num_tokens], "".join(texts), is_stopped=True)
    return Expected(tokens, "".join(texts) + detokenizer.finish(), is_stopped=False)
