"""The seam: who is told of what, and in which order kinds apply."""

import numpy as np
import pytest

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.gpu_worker.sampler.host.logits_processor import LogitsProcessors
from tokenloom.gpu_worker.sampler.host.logits_processors import make_logits_processors

PLAIN = CoreSamplingParams(max_tokens=9, seed=1)
BIASED = CoreSamplingParams(max_tokens=9, seed=1, logit_bias={2: 1.5})
EVERYTHING = CoreSamplingParams(
    max_tokens=9,
    seed=1,
    min_tokens=2,
    stop_token_ids=(1,),
    logit_bias={1: 100.0, 2: 10.0, 3: 1.0},
    allowed_token_ids=(1, 2, 3, 4),
    bad_words=((2,), (3, 4)),
    frequency_penalty=2.0,
)


class Recorder:
    """Notes what it is told."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    parameters = ("logit_bias",)

    def add(self, row, params, prompt_token_ids, output_token_ids):
        self.log.append((self.name, "add", row, list(prompt_token_ids), list(output_token_ids)))

    def remove(self, row):
        self.log.append((self.name, "remove", row))

    def append(self, row, token_id):
        self.log.append((self.name, "append", row, token_id))

    def apply(self, logits, index_of):
        self.log.append((self.name, "apply", dict(index_of)))


@pytest.fixture
def log():
    return []


@pytest.fixture
def processors(log):
    return LogitsProcessors([Recorder(log, "first"), Recorder(log, "second")])


LOGITS = np.zeros((3, 5), dtype=np.float32)


def test_rows_that_do_not_ask_are_never_mentioned(processors, log):
    processors.add(0, PLAIN, [1, 2], 1)
    processors.append(np.array([0]), np.array([4]))
    processors.apply(LOGITS[:1], np.array([0]))
    processors.remove(0)
    assert log == []


def test_each_kind_hears_of_a_rows_life_in_order(processors, log):
    processors.add(7, BIASED, [1, 2, 3], 2)
    processors.add(1, PLAIN, [1], 1)
    processors.apply(LOGITS, np.array([1, 7, 4]))
    processors.append(np.array([1, 7, 4]), np.array([5, 6, 7]))
    processors.remove(7)
    processors.remove(7)
    processors.apply(LOGITS, np.array([1, 7, 4]))
    told = [("add", 7, [1, 2], [3]), ("apply", {7: 1}), ("append", 7, 6), ("remove", 7)]
    assert log == [(name, *event) for event in told for name in ("first", "second")]


def test_a_step_without_any_of_their_rows_asks_nobody(processors, log):
    processors.add(7, BIASED, [1], 1)
    log.clear()
    processors.apply(LOGITS[:1], np.array([2]))
    assert log == []


def test_masks_first_then_bias_then_penalties():
    """As vLLM V1 orders them: what a mask took away no bias brings back."""
    processors = make_logits_processors()
    processors.add(0, EVERYTHING, [0, 3], 1)
    logits = np.zeros((1, 6), dtype=np.float32)
    processors.apply(logits, np.array([0]))
    assert logits.tolist() == [[-np.inf, -np.inf, -np.inf, -1.0, -np.inf, -np.inf]]
    processors.append(np.array([0]), np.array([3]))
    logits = np.zeros((1, 6), dtype=np.float32)
    processors.apply(logits, np.array([0]))
    assert logits.tolist() == [[-np.inf, 100.0, -np.inf, -3.0, -np.inf, -np.inf]]
