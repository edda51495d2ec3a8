"""What the compiler makes of the kernels for an H100: it needs no GPU."""

import json
import os
import subprocess
import sys

import pytest

CASES = {
    "decode": {"loads": "LDGSTS.128", "products": "HMMA"},
    "split decode": {"loads": "LDGSTS.128", "products": "HMMA"},
    "prefill": {"loads": "LDGSTS.128", "products": "HGMMA"},
    "prefill, window and softcap": {"loads": "LDGSTS.128", "products": "HGMMA"},
    "sinks": {"loads": "LDGSTS.128", "products": "HGMMA"},
    "heads of 80": {"loads": "LDGSTS.128", "products": "HMMA"},
    "add and norm": {},
    "rotation": {},
    "gate": {},
    "product": {"loads": "LDGSTS.128", "products": "HMMA"},
    "product with gates": {"loads": "LDGSTS.128", "products": "HMMA"},
    "logits": {"loads": "LDGSTS.128", "products": "HMMA"},
    "few rows of experts": {"loads": "LDGSTS.128", "products": "HMMA"},
    "many rows of experts": {"loads": "LDGSTS.128", "products": "HGMMA"},
    "decode, fp8 KV": {"loads": "LDGSTS.128", "products": "HMMA"},
    "prefill, fp8 KV": {"loads": "LDGSTS.128", "products": "HGMMA"},
    "rotation, fp8 KV": {},
    "fp8 product": {"loads": "LDGSTS.128", "products": "HMMA"},
    "fp8 product with gates": {"loads": "LDGSTS.128", "products": "HMMA"},
    "few rows of fp8 experts": {"loads": "LDGSTS.128", "products": "HMMA"},
    "many rows of fp8 experts": {"loads": "LDGSTS.128", "products": "HGMMA"},
    "rounding rows": {},
    "sampling": {},
    "changed logits": {},
    "log probabilities": {},
    "block copy": {},
    "step of rows": {},
}
_SHARED_MEMORY = 227 << 10
"""Bytes that a program may use of a multiprocessor's."""


@pytest.fixture(scope="module")
def codes():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.gpu_worker.kernels.triton.machine_code", *CASES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_no_register_spills_and_shared_memory_suffices(codes, case):
    for code in codes[case]:
        assert code["stack"] == 0, code
        assert not {"LDL", "STL"} & code["instructions"].keys(), code
        assert code["shared"] <= _SHARED_MEMORY, code


@pytest.mark.parametrize("case", [case for case, wanted in CASES.items() if wanted])
def test_weights_and_kv_are_loaded_16_bytes_at_a_time_and_multiplied_by_tensor_cores(codes, case):
    streaming = [code for code in codes[case] if code["kernel"] in ("attend", "few_rows", "grouped_product")]
    assert streaming
    for code in streaming:
        instructions = code["instructions"]
        assert instructions[CASES[case]["loads"]] >= 8, code
        assert instructions[CASES[case]["products"]] >= 1, code
        assert not {name for name in instructions if name.startswith(("LDG.U", "LDG.8", "LDG.16", "LDGSTS.U"))}, code


@pytest.mark.parametrize("case", ["add and norm", "rotation", "gate", "block copy"])
def test_what_streams_activations_loads_many_bytes_at_a_time(codes, case):
    for code in codes[case]:
        wide = sum(code["instructions"].get(f"LDG.{width}", 0) for width in (64, 128))
        assert wide > 0, code
