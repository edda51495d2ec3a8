"""The experts that the engine reports are those that transformers' routers choose."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.parity.engine import Engine
from tests.parity.reference import save_random
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.request.routed_rows import RoutedRows, to_array

LENGTHS = (90, 33, 150, 17, 120, 64)
NUM_TOKENS = 12
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random("qwen3_moe", tmp_path_factory.mktemp("experts"), head_dim=24, **EXPERTS)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = np.random.default_rng(5)
    return [generator.integers(3, 503, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def generate(
    engine: Engine, prompts: list[list[int]], starts: list[int], *, asks: bool = True
) -> list[tuple[list[int], RoutedRows]]:
    """Run all prompts at once; return the tokens and the joined rows of each."""
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    rows = {str(index): RoutedRows(start) for index, start in enumerate(starts)}
    for index, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
        params = CoreSamplingParams(
            max_tokens=NUM_TOKENS,
            seed=0,
            temperature=0.0,
            return_routed_experts=asks,
            routed_experts_prompt_start=start,
        )
        engine.core.add_request(EngineCoreRequest(str(index), prompt, params))
    while engine.core.has_work():
        outputs = engine.core.step()
        engine.stats = outputs.scheduler_stats or engine.stats
        for output in outputs.outputs:
            tokens[output.request_id] += output.new_token_ids
            if output.routed_experts is not None:
                assert output.routed_experts.start == rows[output.request_id].end, "sent with a gap, or twice"
                rows[output.request_id].add(output.routed_experts)
    return [(tokens[name], rows[name]) for name in tokens]


@torch.inference_mode()
def expected(reference: Any, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """[tokens, layers, top_k], without the last token, which was not computed."""
    output = reference(torch.tensor([prompt + tokens[:-1]]), output_router_logits=True)
    return torch.stack([logits.topk(3).indices for logits in output.router_logits], 1).numpy()


def test_chunks_batches_and_preemption(path: Path, prompts: list[list[int]], reference: Any) -> None:
    engine = Engine(path, budget=64, num_blocks=24, prefix_caching=True, max_model_len=200)
    assert engine.core.ready.experts_per_token == 2 * 3
    results = generate(engine, prompts, [0] * len(prompts))
    assert engine.stats.num_preemptions > 0
    for prompt, (tokens, rows) in zip(prompts, results, strict=True):
        assert np.array_equal(to_array(rows), expected(reference, prompt, tokens))
        assert (rows.start, rows.end) == (0, len(prompt) + NUM_TOKENS - 1)


def test_only_tokens_before_the_start_come_from_the_prefix_cache(
    path: Path, prompts: list[list[int]], reference: Any
) -> None:
    engine = Engine(path, budget=64, num_blocks=200, prefix_caching=True)
    generate(engine, prompts, [0] * len(prompts), asks=False)
    hits = engine.stats.prefix_cache_hits
    generate(engine, prompts, [0] * len(prompts))
    assert engine.stats.prefix_cache_hits == hits
    starts = [40] * len(prompts)
    results = generate(engine, prompts, starts)
    assert engine.stats.prefix_cache_hits - hits == sum(min(40, len(p) - 1) // 16 * 16 for p in prompts)
    for prompt, (tokens, rows) in zip(prompts, results, strict=True):
        whole = expected(reference, prompt, tokens)
        assert np.array_equal(to_array(rows), whole[40:]) if len(whole) > 40 else rows.start == rows.end


def test_loads_are_counted(path: Path, prompts: list[list[int]]) -> None:
    engine = Engine(path)
    generate(engine, prompts, [0] * len(prompts), asks=False)
    loads = engine.core._expert_loads
    assert loads is not None
    assert sum(loads.tokens) == 2 * 3 * sum(length + NUM_TOKENS - 1 for length in LENGTHS)
    assert len(loads.tokens) == 8
    assert all(1 <= ratio <= 8 for ratio in loads.imbalance)
