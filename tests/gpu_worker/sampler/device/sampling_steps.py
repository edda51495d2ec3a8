"""Draws several tokens for requests of all kinds, on the host or by what takes the place of a device."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.scheduler_output import (
    CachedRequestData,
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from tokenloom.gpu_worker.batch.input_batch import InputBatch
from tokenloom.gpu_worker.sampler.device.device_sampler import DeviceSampler
from tokenloom.gpu_worker.sampler.host.plugged_processors import LogitsPlugin
from tokenloom.gpu_worker.sampler.step_sampler import StepSampler

VOCAB = 100
PROMPT = [1, 2, 3, 2]


def bitmask(*token_ids: int, vocab: int = VOCAB) -> np.ndarray:
    allowed = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
    allowed[list(token_ids)] = 1
    return np.packbits(allowed, bitorder="little").view(np.int32)[None]


class Steps:
    """Steps in which each of the requests draws one token, from logits that the number of the step chooses."""

    def __init__(
        self,
        requests: list[Mapping[str, Any]],
        sampler: DeviceSampler | None,
        device: str = "cpu",
        vocab: int = VOCAB,
        plugins: Sequence[LogitsPlugin] = (),
        **options: Any,
    ) -> None:
        self._device, self._vocab = device, vocab
        self._names = [f"r{index}" for index in range(len(requests))]
        self._batch = InputBatch(len(requests), 64, 16, plugins=plugins)
        self._sampler = StepSampler(self._batch, sampler, **options)
        self._news = [
            NewRequestData(name, PROMPT, [], CoreSamplingParams(max_tokens=9, seed=index, **values), [index], 0)
            for index, (name, values) in enumerate(zip(self._names, requests, strict=True))
        ]
        self._number = 0

    def run(self, grammar: GrammarOutput | None = None, spoil: Mapping[int, float] | None = None) -> ModelRunnerOutput:
        """``spoil``: values of all logits of single rows."""
        is_first, self._number = not self._number, self._number + 1
        counts = dict.fromkeys(self._names, len(PROMPT) if is_first else 1)
        cached = CachedRequestData([], [], [], {})
        if not is_first:
            nothing: list[list[int]] = [[] for _ in self._names]
            computed = [len(PROMPT) + self._number - 2] * len(self._names)
            cached = CachedRequestData(self._names, nothing, computed, {})
        news = self._news if is_first else []
        self._batch.update(SchedulerOutput(news, cached, counts, sum(counts.values()), [], []))
        inputs = self._batch.prepare(counts)
        rng = np.random.default_rng(self._number)
        logits = torch.from_numpy(rng.normal(0, 2, (len(self._names), self._vocab)).astype(np.float32))
        for row, value in (spoil or {}).items():
            logits[row] = value
        output = ModelRunnerOutput(inputs.req_ids, [])
        self._sampler.sample(inputs, logits.to(self._device), grammar, output)
        return output


def check_equal(found: ModelRunnerOutput, expected: ModelRunnerOutput) -> None:
    """Everything is the same; values of log probabilities within the rounding of float32."""
    assert found.sampled_token_ids == expected.sampled_token_ids
    assert found.without_choice == expected.without_choice
    assert found.without_finite_logit == expected.without_finite_logit
    assert found.num_nans_in_logits == expected.num_nans_in_logits
    assert found.logprobs.keys() == expected.logprobs.keys()
    for name, logprobs in found.logprobs.items():
        wanted = expected.logprobs[name]
        assert (logprobs.rank, logprobs.top, logprobs.token_ids) == (wanted.rank, wanted.top, wanted.token_ids)
        np.testing.assert_allclose(logprobs.sampled + logprobs.logprobs, wanted.sampled + wanted.logprobs, atol=1e-5)
