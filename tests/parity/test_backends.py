"""Tokens are those of transformers with every attention backend, in shapes that force each one, in both dtypes.

What the machine cannot run is skipped with the reason; pytest prints it.
"""

import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.parity.engine import Engine
from tests.parity.identical import Case, assert_identical
from tests.parity.reference import compute_case, save_random

NUM_TOKENS = 12
LENGTHS = [1, 2, 7, 8, 9, 16, 17, 31, 33, 48, 100, 190]
CPU_FLAGS = Path("/proc/cpuinfo").read_text().split() if platform.system() == "Linux" else []


@dataclass(frozen=True)
class Shape:
    """A decoder whose attention is computed in a way of its own."""

    head_size: int
    num_heads: int
    num_kv_heads: int
    family: str = "llama"
    has_kernels: bool = True
    """Whether the C++ kernels support it, in blocks of whole 16s."""


SHAPES = {
    "heads of 16": Shape(16, 4, 2),
    "heads of 24, padded": Shape(24, 4, 2),
    "heads of 32, a KV head each": Shape(32, 2, 2),
    "heads of 48, three to a KV head": Shape(48, 3, 1),
    "heads of 64, two to a KV head, windows": Shape(64, 4, 2, family="mistral"),
    "heads of 32, six to a KV head": Shape(32, 6, 1),
    "33 heads to a KV head": Shape(16, 33, 1, has_kernels=False),
}
NEWER = [
    ("heads of 32, a KV head each", "avx512_bf16"),
    ("heads of 64, two to a KV head, windows", "avx512_bf16"),
    ("heads of 64, two to a KV head, windows", "amx_bf16"),
    ("heads of 32, six to a KV head", "amx_bf16"),
]
"""Shapes for which the kernels have another way in bfloat16, and the processor's flag that it needs."""
LIMITS = {"float32": (1e-4, 0.0), "bfloat16": (0.2, 0.1)}
"""Of the near ties (see identical.py): the largest gap of the reference's logits, and the share of all positions.
A bfloat16 has 8 bits: a layer's rounding moves logits of about 5 by some hundredths."""
RUNS = [("auto", 8), ("auto", 16), ("auto", 48), ("torch", 16), ("reference", 16)]


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    cases: list[Case]


@pytest.fixture(scope="module")
def shape(request: pytest.FixtureRequest) -> Shape:
    return SHAPES[request.param]


@pytest.fixture(scope="module")
def checkpoint(shape: Shape, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Its weights are bfloat16 numbers, so that both dtypes compute the same model."""
    entries = {
        "hidden_size": shape.num_heads * (16 if shape.num_heads < 8 else 2),
        "head_dim": shape.head_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        **({"sliding_window": 50} if shape.family == "mistral" else {}),
    }
    path = save_random(shape.family, tmp_path_factory.mktemp("checkpoints"), torch.bfloat16, **entries)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    generator = np.random.default_rng(5)
    prompts = [generator.integers(3, model.config.vocab_size, length).tolist() for length in LENGTHS]
    prompts.append(prompts[-1][:96] + prompts[0])  # it shares the beginning of the longest
    return Checkpoint(path, [compute_case(model, prompt, NUM_TOKENS) for prompt in prompts])


def check_tokens(checkpoint: Checkpoint, found: str, backend: str, block_size: int, dtype: str) -> None:
    """Fail unless ``backend`` becomes ``found`` and gives the tokens of transformers."""
    if found == "cpu" and not shutil.which("g++"):
        pytest.skip("the C++ kernels were not run: there is no compiler (g++)")
    engine = Engine(
        checkpoint.path,
        attention_backend=backend,
        block_size=block_size,
        dtype=dtype,
        num_blocks=4000 // block_size,
        budget=64,
        max_num_seqs=8,
        prefix_caching=True,
    )
    assert engine.attention_backend == found
    assert_identical(checkpoint.cases, engine.generate, *LIMITS[dtype])
    assert engine.most_scheduled >= 4
    assert engine.stats.prefix_cache_hits > 0


@pytest.mark.parametrize("shape", SHAPES, indirect=True)
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("backend", "block_size"), RUNS)
def test_tokens(shape: Shape, checkpoint: Checkpoint, backend: str, block_size: int, dtype: str) -> None:
    found = backend
    if backend == "auto":
        found = "cpu" if shape.has_kernels and block_size % 16 == 0 else "torch"
    check_tokens(checkpoint, found, backend, block_size, dtype)


@pytest.mark.parametrize(("shape", "flag"), NEWER, indirect=["shape"])
def test_tokens_with_the_kernels_of_newer_processors(shape: Shape, checkpoint: Checkpoint, flag: str) -> None:
    if flag not in CPU_FLAGS:
        pytest.skip(f"attention in bfloat16 by {flag} was not run: this processor does not have it")
    check_tokens(checkpoint, "cpu", "cpu", 32, "bfloat16")
