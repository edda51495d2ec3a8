"""No kernel is compiled while requests wait: whatever a step needs was compiled before the first of them."""

import json
import os
import subprocess
import sys

import pytest

CASES = [
    "llama",
    "qwen3, without graphs",
    "qwen3, small steps",
    "gemma3_text",
    "qwen3_moe",
    "qwen3_moe, without graphs",
    "llama, adapters",
    "qwen3_5_text",
    "nemotron_h, without graphs",
    "qwen3_5_text, chunks",
    "nemotron_h, chunks",
    "llama, shared keys",
]
EVERYWHERE = {"add_norm", "attend", "few_rows", "prepare_step", "scatter"}
ASKED = {"add_listed", "change_rows", "count_drawn", "logprobs", "sample", "scan_parts", "list_parts", "draw_listed"}
OF_CASES = {
    # A part of each head is rotated, which PyTorch does.
    "qwen3_5_text": {"short_conv", "keep_inputs", "delta_gates", "gated_delta", "gated_norm", "write_kv"},
    "nemotron_h, without graphs": {"short_conv", "keep_inputs", "mamba2", "gated_norm", "rotate_and_write"},
    "qwen3_5_text, chunks": {"delta_pairs", "delta_solve", "delta_chunks", "gated_delta", "short_conv"},
    "nemotron_h, chunks": {"mamba2_pairs", "mamba2_chunks", "mamba2", "short_conv"},
    "llama, shared keys": {"attend_shared", "copy_blocks", "rotate_and_write"},
}
OF_OTHERS = {"copy_blocks", "rotate_and_write"}

# One process compiles what all cases need, within the first case's time: a minute on a free core, and more than the
# suite's limit beside a load of ten on each.
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def counts():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.gpu_worker.kernels.triton.compiles", *CASES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_compiled_after_the_warm_up(counts, case):
    found = counts[case]
    expected = EVERYWHERE | ASKED | OF_CASES.get(case, OF_OTHERS)
    assert {name.rpartition(".")[2] for name in found["kernels"]} >= expected
    assert found["steps"] > 60
    assert found["before"] >= len(expected)
    assert found["after"] == []
    assert (found["shared"] > 0) == case.endswith("shared keys")
