"""Tests attention over tokens that are spread over ranks, against the plain computation of one."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from tokenloom.gpu_worker.attention.attention_backend import ScoreRule
from tokenloom.gpu_worker.attention.context_backend import ContextBackend
from tokenloom.gpu_worker.attention.torch_backend import ReferenceBackend
from tokenloom.gpu_worker.checkpoint.model_config import ModelConfig

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 16, 4, 2, 24
SINKS = torch.linspace(-2, 4, NUM_HEADS)
RULES = [
    ScoreRule(0.3),
    ScoreRule(0.3, sliding_window=5),
    ScoreRule(0.3, softcap=2.0),
    ScoreRule(0.3, sliding_window=5, sinks=SINKS),
]


class ThreadGroup:
    """Fulfils ``Group`` for ranks that are threads."""

    def __init__(self, rank: int, places: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(places)
        self._places, self._barrier = places, barrier

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self._places[self.rank] = x
        self._barrier.wait(60)
        gathered = torch.stack(self._places)
        self._barrier.wait(60)
        return gathered

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self.all_gather(x).sum(0)

    def all_max(self, x: torch.Tensor) -> torch.Tensor:
        return self.all_gather(x).amax(0)


def make_config() -> ModelConfig:
    return ModelConfig(
        family="llama",
        dtype_name="float32",
        vocab_size=10,
        hidden_size=64,
        intermediate_size=64,
        num_layers=1,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_size=HEAD_SIZE,
        max_model_len=256,
        norm_eps=1e-6,
        hidden_act="silu",
        tie_word_embeddings=False,
        attention_scales=(0.3,),
        sliding_windows=(None,),
    )


def steps() -> list[tuple[list[np.ndarray], np.ndarray]]:
    """A prompt in two chunks beside another request, then a token of each: what a plan gets, and the table."""
    tables = np.array([[3, 0, 5], [1, 4, 2]])
    found, done = [], [0, 0]
    for lengths in ((20, 1), (13, 6), (1, 1)):
        ends = [d + n for d, n in zip(done, lengths, strict=True)]
        spans = zip(tables, done, ends, strict=True)
        slots = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for table, a, b in spans for p in range(a, b)]
        found.append(([np.cumsum([0, *lengths]), np.array(ends), tables, np.array(slots)], np.array(lengths)))
        done = ends
    return found


def compute(backend, heads: slice, kv_heads: slice, rule: ScoreRule) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    (cache,) = backend.allocate(6)
    results = []
    for arrays, lengths in steps():
        size = (3, int(lengths.sum()), NUM_HEADS, HEAD_SIZE)
        query, key, value = torch.randn(size, generator=generator)
        plan = backend.plan(*arrays)
        plan.write_kv(key[:, kv_heads], value[:, kv_heads], cache)
        results.append(plan.attend(query[:, heads], cache, rule))
    return results


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [2, 4])
def test_parts_of_a_sequence_are_merged(size: int, rule: ScoreRule) -> None:
    expected = compute(ReferenceBackend(make_config(), BLOCK_SIZE, CPU), slice(None), slice(NUM_KV_HEADS), rule)
    found: dict[int, list[torch.Tensor]] = {}
    places, barrier = [torch.empty(0)] * size, threading.Barrier(size)

    def run(rank: int) -> None:
        group = ThreadGroup(rank, places, barrier)
        backend = ContextBackend(make_config(), BLOCK_SIZE, CPU, group)
        num_heads, head = NUM_HEADS // size, rank * NUM_KV_HEADS // size
        heads = slice(rank * num_heads, (rank + 1) * num_heads)
        own = replace(rule, sinks=None if rule.sinks is None else rule.sinks[heads])
        found[rank] = compute(backend, heads, slice(head, head + max(1, NUM_KV_HEADS // size)), own)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for step, result in enumerate(expected):
        together = torch.cat([found[rank][step] for rank in range(size)], dim=1)
        torch.testing.assert_close(together, result, rtol=1e-5, atol=1e-5)
