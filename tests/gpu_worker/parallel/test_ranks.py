"""Tests engines of several ranks, each on a thread, and that an engine of one rank pays nothing for them."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_worker.parallel.rank_threads import RankThreads, parallel
from tests.parity.engine import Engine
from tokenloom import demo_model
from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.executor.executor import Executor

DEMO = Path(demo_model.__file__).parent
PROMPTS = [[(i * i * 7 + length) % 400 + 5 for i in range(length)] for length in (1, 17, 60)]
LIMITS = [10, 14, 6]

MODULES = """
import sys
import torch
before = {name for name in sys.modules if name.startswith("torch.distributed")}
from pathlib import Path
from tests.parity.engine import Engine
from tokenloom import demo_model
engine = Engine(Path(demo_model.__file__).parent, num_blocks=40, max_num_seqs=2, budget=32)
assert len(engine.generate([[5, 6, 7]], [4])[0]) == 4
after = {name for name in sys.modules if name.startswith("torch.distributed")}
assert after == before, after - before
assert "tokenloom.gpu_worker.parallel.torch_group" not in sys.modules
assert "ray" not in sys.modules
"""


def engine_of(shape: tuple[int, ...], directory: Path) -> Engine:
    def executor(config: EngineConfig) -> Executor:
        return RankThreads(config, directory)

    return Engine(DEMO, num_blocks=40, budget=64, executor=executor, parallel=parallel(*shape))


@pytest.mark.parametrize("shape", [(4,), (2, 2), (2, 1, 2)])
def test_ranks_give_the_tokens_of_one(shape: tuple[int, ...], tmp_path: Path) -> None:
    alone, engine = Engine(DEMO, num_blocks=40, budget=64), engine_of(shape, tmp_path)
    assert engine.generate(PROMPTS, LIMITS) == alone.generate(PROMPTS, LIMITS)
    drawn = {"temperature": 1.0, "top_p": 0.9}
    assert engine.generate(PROMPTS, LIMITS, **drawn) == alone.generate(PROMPTS, LIMITS, **drawn)
    theirs, ours = (set(each.next_logprobs(PROMPTS[1], [5])) for each in (alone, engine))
    assert len(theirs & ours) >= 19
    engine.core.shutdown()


def test_a_layout_names_the_part_of_every_rank(tmp_path: Path) -> None:
    engine = engine_of((2,), tmp_path)
    assert engine.core.ready.kv_layout == "HND/fp32/4x2x64/16", "what engines compare names the whole"
    layouts = [worker._pool_layers.layout(16) for worker in engine.core.executor.workers]
    assert layouts == [f"HND/fp32/4x1x64/16@0.{head}.0:4x2x16" for head in (0, 1)]
    assert engine.core.ready.numerics.endswith("/tp-2")
    engine.core.shutdown()


def test_context_parallel_ranks_keep_their_tokens_of_a_block(tmp_path: Path) -> None:
    engine = engine_of((4, 1, 4), tmp_path)
    layouts = [worker._pool_layers.layout(16) for worker in engine.core.executor.workers]
    assert layouts == [f"HND/fp32/4x2x64/4@0.0.{first}:4x2x16" for first in (0, 4, 8, 12)]
    engine.core.shutdown()


def test_one_rank_imports_nothing_to_exchange_tensors() -> None:
    subprocess.run([sys.executable, "-c", MODULES], check=True)
