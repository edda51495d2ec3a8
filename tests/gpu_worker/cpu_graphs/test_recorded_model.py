"""Recorded steps give the same tokens and the same log probabilities, bit by bit, as computing each operation."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu_worker.checkpoint.quantization import formats
from tests.gpu_worker.cpu_graphs.steps import generate, have_logits, load, make_runner
from tokenloom import demo_model
from tokenloom.gpu_worker.call_recording.recorder import CallRecorder
from tokenloom.gpu_worker.cpu_graphs.recorded_model import RecordedModel
from tokenloom.gpu_worker.kernels.threads import kernel_threads, set_kernel_threads

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")

DEMO_MODEL = Path(demo_model.__file__).parent
MIXED_LAYERS = ["full_attention", "sliding_attention", "full_attention"]
WHOLE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama, int4": ("llama", {}, {"quantization": "int4"}),
    "llama, int8": ("llama", {}, {"quantization": "int8-dynamic"}),
    "qwen3": ("qwen3", {"head_dim": 32}, {}),
    "qwen3, float32": ("qwen3", {"head_dim": 32, "vocab_size": 256, "intermediate_size": 128}, {"dtype": "float32"}),
    "mistral, window": ("mistral", {"sliding_window": 20}, {}),
    "gemma3": ("gemma3_text", {"layer_types": MIXED_LAYERS}, {}),
    "olmo2": ("olmo2", {}, {}),
    "phi3": ("phi3", {}, {}),
}
"""Every operation of these is a kernel, or one that a kernel replaces."""


def count(recorded: RecordedModel | None) -> int:
    assert recorded is not None
    return recorded.num_recordings


@pytest.mark.parametrize("name", WHOLE)
def test_families_give_the_same_bits(save_checkpoint: Callable[..., Path], name: str) -> None:
    family, entries, options = WHOLE[name]
    model = load(save_checkpoint(family, dtype=torch.bfloat16, **entries), **{"dtype": "bfloat16", **options})
    expected = generate(make_runner(model, records=False)[0])
    runner, recorded = make_runner(model, records=True)
    assert generate(runner) == expected
    assert count(recorded) == 2, "for steps of two and of three tokens"
    assert recorded is not None
    assert have_logits(recorded)


def test_weights_of_8_bit_floats_give_the_same_bits(tmp_path: Path, save_checkpoint: Callable[..., Path]) -> None:
    entries = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic", "fmt": "e4m3"}
    source = save_checkpoint("llama")
    path, _ = formats.write(tmp_path / "fp8", formats.fp8("block", "scale_inv", block=32), entries, source=source)
    model = load(path, "bfloat16")
    expected = generate(make_runner(model, records=False)[0])
    runner, recorded = make_runner(model, records=True)
    assert generate(runner) == expected
    assert count(recorded) == 2, "for steps of two and of three tokens"


def test_what_is_no_kernel_is_computed_as_ever(save_checkpoint: Callable[..., Path]) -> None:
    """Gemma 2 limits its logits with PyTorch, GPT-2 normalizes with it."""
    gemma = load(save_checkpoint("gemma2", dtype=torch.bfloat16), "bfloat16")
    runner, recorded = make_runner(gemma, records=True)
    assert generate(runner) == generate(make_runner(gemma, records=False)[0])
    assert count(recorded) == 2
    assert recorded is not None
    assert not have_logits(recorded)
    gpt2 = load(save_checkpoint("gpt2", dtype=torch.bfloat16), "bfloat16")
    runner, recorded = make_runner(gpt2, records=True)
    assert generate(runner) == generate(make_runner(gpt2, records=False)[0])
    assert count(recorded) == 0


@pytest.fixture(scope="module")
def demo() -> Any:
    return load(DEMO_MODEL, "bfloat16")


def test_other_weights_and_other_caches_drop_the_recordings(demo: Any, save_checkpoint: Callable[..., Path]) -> None:
    expected = generate(make_runner(demo, records=False)[0])
    runner, recorded = make_runner(demo, records=True)
    assert generate(runner) == expected
    runner.set_model(demo, None)
    assert count(recorded) == 0
    runner.drop_kv_caches()
    runner.make_kv_caches()
    runner._batch.clear()
    assert generate(runner) == expected
    assert count(recorded) == 2


def test_a_recording_that_computes_something_else_is_not_used(demo: Any) -> None:
    class Forgetful:
        """Multiplies the hidden states outside of what the recorder sees."""

        config = demo.config
        forward = demo.forward

        def compute_logits(self, hidden: Tensor) -> Tensor:
            logits: Tensor = demo.compute_logits(hidden)
            logits.numpy()[:] += 1.0
            return logits

    expected = generate(make_runner(Forgetful(), records=False)[0])
    runner, recorded = make_runner(Forgetful(), records=True)
    assert generate(runner) == expected
    assert count(recorded) == 0


def test_recording_imports_no_compiler() -> None:
    """PyTorch wraps this method of modes in a function that imports ``torch._dynamo`` at the first operation."""
    assert not hasattr(CallRecorder.__torch_dispatch__, "__wrapped__")


def test_another_number_of_threads_gets_its_own_recording(demo: Any) -> None:
    runner, recorded = make_runner(demo, records=True)
    expected = generate(runner)
    set_kernel_threads(kernel_threads() + 1)
    try:
        runner._batch.clear()
        assert generate(runner) == expected
    finally:
        set_kernel_threads(0)
    assert count(recorded) == 4


def test_recordings_are_bounded(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenloom.gpu_worker.cpu_graphs.recorded_model._MOST_RECORDINGS", 1)
    runner, recorded = make_runner(demo, records=True)
    assert generate(runner) == generate(make_runner(demo, records=False)[0])
    assert count(recorded) == 1
