"""The kernels that draw tokens, change logits and find log probabilities, against the host's rule."""

from typing import Any

import numpy as np
import torch

from tests.gpu_check.rows import Rows
from tests.gpu_check.target import Target
from tests.gpu_worker.sampler.device.sampling_steps import Steps, bitmask, check_equal
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.scheduler_output import GrammarOutput
from tokenloom.gpu_worker.sampler.device.device_sampler import DeviceSampler
from tokenloom.gpu_worker.sampler.device.sampler_kernels import TritonSamplerKernels
from tokenloom.gpu_worker.sampler.host.sampler import Sampler

_ROWS = 1 << 15
"""Drawn at a time: each has memory for candidates."""


def check_draws(rows: Rows, target: Target) -> list[str]:
    kinds = (
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 50},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 100, "top_p": 0.95, "min_p": 0.02},
    )
    wrong = []
    for name, vocab, count in (
        ("sampler", target.pick(151_936, 1000), target.pick(256, 5)),
        ("sampler, few rows", target.pick(151_936, 1000), target.pick(64, 1)),
        ("sampler, many draws", 100, target.pick(1_000_000, 10)),
    ):
        # Few of the many rows have filters, for which the host takes a turn each.
        chosen = [kinds[row % len(kinds)] if vocab > 100 or row % 17 == 0 else kinds[1] for row in range(count)]
        params = [CoreSamplingParams(max_tokens=4, seed=row, **kind) for row, kind in enumerate(chosen)]
        logits = np.random.default_rng(3).normal(0.0, 3.0, (count, vocab)).astype(np.float32)
        indices = np.arange(count)
        sampler, found = DeviceSampler(TritonSamplerKernels()), list[int]()
        for part in np.array_split(indices, -(-count // _ROWS)):
            some = slice(part[0], part[-1] + 1)
            found += sampler.sample(torch.from_numpy(logits[some]).to(target.device), params[some], part)
        expected = Sampler().sample(logits, params, indices)
        different = sum(a != b for a, b in zip(found, expected, strict=True))
        rows.add(name, rows_drawn=count, different=different)
        wrong += [name] if different else []
    return wrong


def check_asking_rows(rows: Rows, target: Target) -> list[str]:
    """Penalties, biases, masks and log probabilities of rows beside each other, several steps long."""
    vocab = target.pick(151_936, 1000)
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    listed = {
        "logit_bias": {7: 3.0, vocab - 50: -2.0},
        "bad_words": ((8,), (2, 7)),
        "min_tokens": 2,
        "stop_token_ids": (1,),
    }
    requests: list[dict[str, Any]] = [
        {"temperature": 0.0} | penalties,
        {"temperature": 1.0, "logprobs": 20, "logprob_token_ids": (5,)} | penalties | listed,
        {"temperature": 1.0, "allowed_token_ids": tuple(range(0, vocab, 100))},
        {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "logprobs": 0},
    ]
    device = Steps(requests, DeviceSampler(TritonSamplerKernels()), target.device.type, vocab)
    host = Steps(requests, None, vocab=vocab)
    for step in range(target.pick(6, 2)):
        grammar = GrammarOutput(["r0"], bitmask(*range(100, vocab // 2), vocab=vocab)) if step % 2 else None
        try:
            check_equal(device.run(grammar), host.run(grammar))
        except AssertionError as error:
            rows.add("rows that ask for more", different=1, error=str(error)[:200])
            return ["rows that ask for more"]
    rows.add("rows that ask for more", different=0)
    return []
