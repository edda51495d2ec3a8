"""Compares the processor seconds of grouped experts with those of transformers' loop, in turns, with one thread.

python -m tests.gpu_worker.models.expert_cpu
"""

import copy
import functools
import time
from collections.abc import Callable

import torch
import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tokenloom.gpu_worker.models.transformers.modules import replace_modules
from tokenloom.gpu_worker.ops.torch_ops import TorchOps

HIDDEN, INNER, EXPERTS, TOP_K = 1024, 384, 64, 8
ROWS = (1, 8, 32, 256)
TURNS = 7


def seconds(compute: Callable[[], object], repeat: int) -> float:
    """Return the processor seconds of a call."""
    started = time.process_time()
    for _ in range(repeat):
        compute()
    return (time.process_time() - started) / repeat


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = "eager"
    loop = Qwen3MoeExperts(config).to(torch.bfloat16)
    for parameter in loop.parameters():
        parameter.normal_(0, 0.02)
    grouped = copy.deepcopy(loop)
    replace_modules(grouped, None, TorchOps(), None)
    for rows in ROWS:
        x = torch.randn(rows, HIDDEN, dtype=torch.bfloat16)
        chosen = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(rows)])
        weights = torch.rand(rows, TOP_K).to(torch.bfloat16)
        repeat = max(1, 64 // rows)
        calls = [functools.partial(module, x, chosen, weights) for module in (loop, grouped)]
        taken = [[seconds(call, repeat) for call in calls] for _ in range(TURNS)]
        least = [min(column) for column in zip(*taken, strict=True)]
        before, after = least
        print(f"{rows:4} rows: loop {before * 1e3:.2f} ms, grouped {after * 1e3:.2f} ms, {before / after:.2f}x")


if __name__ == "__main__":
    main()
