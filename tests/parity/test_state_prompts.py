"""Engines whose built-in layers compute prompts in chunks, as on a GPU: they cut prompts between chunks, hit what was
computed of prompts only, and give transformers' tokens."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from tests.parity.state_checkpoints import write_model
from tests.parity.test_states import Reference, draw, make_engine
from tokenloom.gpu_worker import model_worker
from tokenloom.gpu_worker.attention.states import StatePlan
from tokenloom.gpu_worker.checkpoint.mixer_config import STATE_CHUNK, StatePrompts
from tokenloom.gpu_worker.ops.state_ops import StateOps
from tokenloom.gpu_worker.ops.torch_ops import TorchOps


class Chunks(StateOps):
    """Stands for the kernels of a GPU: computes a scan, whose values are the same, and notes the plans."""

    prompts: StatePrompts = "chunks"

    def __init__(self) -> None:
        self.plans: list[StatePlan] = []

    def _noted(self, compute: Callable[..., Tensor], *arguments: object) -> Tensor:
        plan = arguments[-1]
        assert isinstance(plan, StatePlan)
        self.plans.append(plan)
        return compute(*arguments)

    def gated_delta(self, *arguments: object) -> Tensor:  # type: ignore[override]
        return self._noted(super().gated_delta, *arguments)

    def mamba2(self, *arguments: object) -> Tensor:  # type: ignore[override]
        return self._noted(super().mamba2, *arguments)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "kimi_linear", "nemotron_h"])
def test_an_engine_cuts_prompts_between_chunks(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = Chunks()
    monkeypatch.setattr(model_worker, "state_prompts", lambda *_: "chunks")
    monkeypatch.setattr(model_worker, "make_ops", lambda *_: TorchOps(states=chunks))
    engine, reference = make_engine(write_model(kind, tmp_path), model_impl="native", budget=101), Reference(kind)
    states = engine.core.scheduler.kv.states
    assert states is not None
    assert (states.chunk, states.is_strict) == (STATE_CHUNK, True)
    assert "-chunk64-strict/" in engine.core.ready.numerics
    profiled = max((plan.cu_lens.diff().tolist() for plan in chunks.plans), key=sum)
    assert sum(profiled) == 101
    assert min(profiled) == 2, "each request of the largest step has a chunk, which takes memory beside its tokens"
    chunks.plans.clear()

    prompts = [draw(length, seed) for seed, length in enumerate((150, 3, 66))]
    expected = reference.answers(prompts, 5)
    assert engine.generate(prompts, [5] * 3) == expected
    steps = [(plan.chunk, plan.cu_lens.diff().tolist()) for plan in chunks.plans]
    assert {chunk for chunk, lengths in steps if max(lengths) > 1} == {STATE_CHUNK}
    lengths = {length for _, lengths in steps for length in lengths}
    assert lengths == {1, 2, 3, 22, 64}, "whole chunks, what is left at the end of a prompt, and decoded tokens"

    before = engine.stats.prefix_cache_hits
    turns = [prompt + answer + draw(20, seed=9) for prompt, answer in zip(prompts, expected, strict=True)]
    assert engine.generate(turns, [5] * 3) == reference.answers(turns, 5)
    assert engine.stats.prefix_cache_hits - before == 128 + 64, "nothing that decoding has made is hit"
