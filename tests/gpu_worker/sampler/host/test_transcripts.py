"""The rules of transcripts mask what transformers' processors of Whisper mask."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from tokenloom.engine_core.data.core_params import CoreSamplingParams, TimestampRules, TranscriptRules
from tokenloom.gpu_worker.sampler.host.logits_processors import make_logits_processors

VOCAB, EOS, NO_TIMES, FIRST = 80, 40, 49, 50
SUPPRESSED, AT_BEGIN = (3, 7, 45), (5, EOS)
PROMPT = [44, 46, 48]


def theirs(output: list[int], logits: npt.NDArray[np.float32], most: int | None) -> npt.NDArray[np.float32]:
    config: Any = SimpleNamespace(
        no_timestamps_token_id=NO_TIMES, eos_token_id=EOS, bos_token_id=EOS, max_initial_timestamp_index=most
    )
    ids, scores = torch.tensor([PROMPT + output]), torch.from_numpy(logits.copy())[None]
    scores = SuppressTokensAtBeginLogitsProcessor(list(AT_BEGIN), len(PROMPT))(ids, scores)
    scores = SuppressTokensLogitsProcessor(list(SUPPRESSED))(ids, scores)
    scores = WhisperTimeStampLogitsProcessor(config, len(PROMPT))(ids, scores)
    found: npt.NDArray[np.float32] = scores[0].numpy()
    return found


def ours(
    output: list[int], logits: npt.NDArray[np.float32], most: int | None, num_known: int
) -> npt.NDArray[np.float32]:
    """``num_known``: tokens of the output that the request had when it got its row."""
    rules = TranscriptRules(SUPPRESSED, AT_BEGIN, TimestampRules(FIRST, NO_TIMES, EOS, most))
    params, processors = CoreSamplingParams(max_tokens=99, seed=0, transcript=rules), make_logits_processors()
    processors.add(0, params, PROMPT + output[:num_known], len(PROMPT))
    for token_id in output[num_known:]:
        processors.append(np.array([0]), np.array([token_id]))
    changed = logits.copy()[None]
    processors.apply(changed, np.array([0]))
    return changed[0]


@pytest.mark.parametrize("most", [None, 0, 4])
@pytest.mark.parametrize("lift", [-4.0, 0.0, 2.0])
def test_masks_are_those_of_transformers(most: int | None, lift: float) -> None:
    random, texts = np.random.default_rng(3), set[bool]()
    for _ in range(200):
        output = list[int]()
        for _ in range(int(random.integers(0, 8))):
            logits = random.normal(size=VOCAB).astype(np.float32)
            logits[FIRST:] += lift
            output.append(int(theirs(output, logits, most).argmax()))
        logits = random.normal(size=VOCAB).astype(np.float32)
        logits[FIRST:] += lift
        wanted = theirs(output, logits, most)
        np.testing.assert_array_equal(ours(output, logits, most, int(random.integers(0, len(output) + 1))), wanted)
        texts.add(bool(np.isfinite(wanted[:FIRST]).any()))
    assert texts == {True, False}


def test_lists_alone_mask_their_tokens() -> None:
    params = CoreSamplingParams(max_tokens=9, seed=0, transcript=TranscriptRules((2,), (4,)))
    processors, logits = make_logits_processors(), np.zeros((1, 8), dtype=np.float32)
    processors.add(0, params, PROMPT, len(PROMPT))
    processors.apply(logits, np.array([0]))
    assert np.flatnonzero(np.isinf(logits[0])).tolist() == [2, 4]
    processors.append(np.array([0]), np.array([1]))
    later = np.zeros((1, 8), dtype=np.float32)
    processors.apply(later, np.array([0]))
    assert np.flatnonzero(np.isinf(later[0])).tolist() == [2]
