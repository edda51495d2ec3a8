"""Feeds runners over one model with the same steps: one computes each operation, the other one runs recordings."""

from pathlib import Path
from typing import Any

import torch

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import Logprobs
from tokenloom.engine_core.data.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend
from tokenloom.gpu_worker.batch.input_batch import InputBatch
from tokenloom.gpu_worker.cpu_graphs.fixed_plan import make_fixed_plan
from tokenloom.gpu_worker.cpu_graphs.recorded_model import RecordedModel
from tokenloom.gpu_worker.model_runner import ModelRunner, RunnerParts
from tokenloom.gpu_worker.models.load_model import load_model
from tokenloom.gpu_worker.models.model import LanguageModel
from tokenloom.gpu_worker.ops.cpu_ops import CPUOps

CPU = torch.device("cpu")
BLOCK = 16
PROMPTS = {"a": [7, 30, 12, 45, 99, 8, 102, 5, 64, 31, 77], "b": [40, 2], "c": list(range(50, 90))}
BLOCKS = {"a": [3, 1], "b": [6, 8], "c": [5, 0, 7, 4]}
PARAMS = {
    "a": CoreSamplingParams(max_tokens=50, seed=1, temperature=0.0, logprobs=3),
    "b": CoreSamplingParams(max_tokens=50, seed=2, temperature=1.0, top_p=0.9, logprobs=3),
    "c": CoreSamplingParams(max_tokens=50, seed=3, temperature=0.7, top_k=20, frequency_penalty=0.5, logprobs=3),
}
Drawn = dict[str, tuple[list[int], Logprobs]]


def load(path: Path, dtype: str, **options: Any) -> LanguageModel:
    return load_model(path, dtype, ops=CPUOps(), **options)


def make_runner(model: LanguageModel, *, records: bool, **config: Any) -> tuple[ModelRunner, RecordedModel | None]:
    backend = make_attention_backend("cpu", model.config, BLOCK, CPU)
    batch = InputBatch(4, 256, BLOCK)
    plan = make_fixed_plan(backend, 8, 32, batch.gathered)
    assert plan is not None
    recorded = RecordedModel(plan) if records else None
    return ModelRunner(model, backend, batch, num_blocks=12, parts=RunnerParts(recordings=recorded), **config), recorded


def step(runner: ModelRunner, counts: dict[str, int], computed: dict[str, int]) -> Drawn:
    """Compute so many tokens of each request; one that ``computed`` does not name is new."""
    new = [NewRequestData(each, PROMPTS[each], [], PARAMS[each], BLOCKS[each], 0) for each in counts.keys() - computed]
    new.sort(key=lambda each: each.req_id)
    cached = CachedRequestData(list(computed), [[] for _ in computed], list(computed.values()), {})
    runner.execute(SchedulerOutput(new, cached, counts, sum(counts.values()), [], []))
    output = runner.sample()
    tokens = zip(output.req_ids, output.sampled_token_ids, strict=True)
    return {each: (drawn, output.logprobs[each]) for each, drawn in tokens if drawn}


def generate(runner: ModelRunner, num_steps: int = 5) -> list[Drawn]:
    """Compute three prompts, then decode all of them, two of them, and all again."""
    lengths = {each: len(tokens) for each, tokens in PROMPTS.items()}
    found = [step(runner, lengths, {})]
    done = dict(lengths)
    for number in range(3 * num_steps):
        members = [each for each in done if number // num_steps != 1 or each != "b"]
        found.append(step(runner, dict.fromkeys(members, 1), {each: done[each] for each in members}))
        for each in members:
            done[each] += 1
    return found


def have_logits(recorded: RecordedModel) -> bool:
    """Return whether every recording computes the logits, too."""
    return all(step.logits is not None for step in recorded._steps.values())
