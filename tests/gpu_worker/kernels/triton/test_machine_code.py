"""What the compiler makes of the kernels for A100, H100 and B200: it needs no GPU."""

import functools
import json
import os
import subprocess
import sys

import pytest

# The first test of each capability compiles all kernels for it, which takes minutes on two cores.
pytestmark = pytest.mark.timeout(1800)
# Weights of 4 and 8 bits that become the first factor in registers come 8 bytes at a time, a thread's part of it.
CASES = {
    "decode": {"loads": "LDGSTS.128", "products": "HMMA"},
    "split decode": {"loads": "LDGSTS.128", "products": "HMMA"},
    "prefill": {"loads": "LDGSTS.128", "products": "HGMMA"},
    "prefill, window and softcap": {"loads": "LDGSTS.128", "products": "HGMMA"},
    "sinks": {"loads": "LDGSTS.128", "products": "HGMMA"},
    "heads of 80": {"loads": "LDGSTS.128", "products": "HMMA"},
    "shared keys": {"loads": "LDGSTS.128", "products": "HGMMA"},
    "shared keys, fp8 KV": {"loads": "LDGSTS.128", "products": "HGMMA"},
    "shared keys, heads of 256": {"loads": "LDGSTS.128", "products": "HGMMA"},
    "prefill, heads of 256": {"loads": "LDGSTS.128", "products": "HGMMA"},
    "add and norm": {},
    "rotation": {},
    "gate": {},
    "product": {"loads": "LDGSTS.128", "products": "HMMA"},
    "product with gates": {"loads": "LDGSTS.128", "products": "HMMA"},
    "logits": {"loads": "LDGSTS.128", "products": "HMMA"},
    "product with a norm": {"loads": "LDGSTS.128", "products": "HMMA"},
    "product with a norm and gates": {"loads": "LDGSTS.128", "products": "HMMA"},
    "product that is added": {"loads": "LDGSTS.128", "products": "HMMA"},
    "rows of adapters": {},
    "many rows of adapters": {},
    "few rows of experts": {"loads": "LDGSTS.128", "products": "HMMA"},
    "many rows of experts": {"loads": "LDGSTS.128", "products": "HGMMA"},
    "decode, fp8 KV": {"loads": "LDGSTS.128", "products": "HMMA"},
    "prefill, fp8 KV": {"loads": "LDGSTS.128", "products": "HGMMA"},
    "rotation, fp8 KV": {},
    "fp8 product": {"loads": "LDGSTS.128", "products": "HMMA"},
    "fp8 product with gates": {"loads": "LDGSTS.128", "products": "HMMA"},
    "4-bit product": {"loads": "LDGSTS.64", "products": "HGMMA"},
    "4-bit product with offsets": {"loads": "LDGSTS.64", "products": "HGMMA"},
    "4-bit product in groups of 32": {"loads": "LDGSTS.64", "products": "HGMMA"},
    "4-bit product of many rows": {"loads": "LDGSTS.64", "products": "HGMMA"},
    "4-bit weight written out": {},
    "fp8 product by blocks": {"loads": "LDGSTS.64", "products": "HGMMA"},
    "fp8 product of many rows by blocks": {"loads": "LDGSTS.64", "products": "HGMMA"},
    "fp8 weight written out": {},
    "few rows of fp8 experts": {"loads": "LDGSTS.128", "products": "HMMA"},
    "many rows of fp8 experts": {"loads": "LDGSTS.128", "products": "HGMMA"},
    "rounding rows": {},
    "sampling": {},
    "sampling by parts of rows": {},
    "changed logits": {},
    "log probabilities": {},
    "convolution": {},
    "convolution of a prompt": {},
    "gated delta": {},
    "gated delta by channel": {},
    "mamba-2": {},
    "gated delta in chunks": {},
    "gated delta by channel in chunks": {},
    "mamba-2 in chunks": {},
    "mamba-2 in chunks, wide states": {},
    "gates and norms of states": {},
    "block copy": {},
    "step of rows": {},
}
_SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes that a program may use of a multiprocessor's, by compute capability."""
_WITHOUT_FP8 = {name: wanted for name, wanted in CASES.items() if "fp8" not in name and name != "rounding rows"}
_CASES = {80: _WITHOUT_FP8, 90: CASES, 100: CASES}
"""An A100 has no 8-bit floats; ``platform.check_device`` refuses them by name."""
_BUFFERS = {
    "decode": 2 * 2 * 64 * 128 * 2,
    "split decode": 2 * 2 * 64 * 128 * 2,
    "prefill": 2 * 2 * 64 * 128 * 2,
    "prefill, window and softcap": 2 * 32 * 256 * 2,
    "decode, fp8 KV": 2 * 2 * 64 * 128,
}
"""Bytes of two tiles of keys and two of values, where a program has room for them."""


_STREAMING = ("attend", "attend_shared", "few_rows", "grouped_product", "packed_product")


@functools.cache
def codes_of(capability):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    names = [str(capability), *_CASES[capability]]
    command = [sys.executable, "-m", "tests.gpu_worker.kernels.triton.machine_code", *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def codes():
    return codes_of(90)


@pytest.mark.parametrize(("capability", "case"), [(each, case) for each in _CASES for case in _CASES[each]])
def test_no_register_spills_and_shared_memory_suffices(capability, case):
    for code in codes_of(capability)[case]:
        assert code["stack"] == 0, code
        assert not {"LDL", "STL"} & code["instructions"].keys(), code
        assert code["shared"] <= _SHARED_MEMORY[capability], code


@pytest.mark.parametrize("case", _BUFFERS)
def test_the_next_keys_and_values_are_on_their_way_while_these_are_used(codes, case):
    for code in codes[case]:
        assert code["kernel"] != "attend" or code["shared"] >= _BUFFERS[case], code


@pytest.mark.parametrize("case", [case for case, wanted in CASES.items() if wanted])
def test_weights_and_kv_are_loaded_16_bytes_at_a_time_and_multiplied_by_tensor_cores(codes, case):
    streaming = [code for code in codes[case] if code["kernel"] in _STREAMING]
    assert streaming
    for code in streaming:
        instructions = code["instructions"]
        assert instructions[CASES[case]["loads"]] >= 8, code
        assert instructions.keys() & {"HMMA", "HGMMA"}, code
        narrow = {name for name in instructions if name.startswith(("LDG.U", "LDG.8", "LDG.16", "LDGSTS.U"))}
        # A turn reads 128 weights of a norm, one for each thread.
        assert narrow <= ({"LDG.U16"} if "with a norm" in case else set()), code
    # The first programs of a step with prompts compute these, or shared keys, and others its decodes, by the narrow
    # instruction.
    assert streaming[0]["instructions"][CASES[case]["products"]] >= 1, streaming[0]


@pytest.mark.parametrize("case", ["add and norm", "rotation", "gate", "block copy"])
def test_what_streams_activations_loads_many_bytes_at_a_time(codes, case):
    for code in codes[case]:
        wide = sum(code["instructions"].get(f"LDG.{width}", 0) for width in (64, 128))
        assert wide > 0, code


@pytest.mark.parametrize("case", ["gated delta", "gated delta by channel", "mamba-2"])
def test_the_inputs_of_the_next_tokens_are_on_their_way_while_one_is_computed(codes, case):
    for code in codes[case]:
        assert sum(count for name, count in code["instructions"].items() if name.startswith("LDGSTS")) >= 6, code


_IN_CHUNKS = [case for case in CASES if "in chunks" in case]


@pytest.mark.parametrize("case", _IN_CHUNKS)
def test_chunks_have_room_in_the_smallest_gpus(case):
    """Those of compute capability 8.6 and 8.9, for which the code is that for 8.0."""
    assert all(code["shared"] <= 99 << 10 for code in codes_of(80)[case])


@pytest.mark.parametrize("case", _IN_CHUNKS)
def test_chunks_are_multiplied_by_tensor_cores(codes, case):
    found = {code["kernel"]: code["instructions"] for code in codes[case]}
    kernels = ["mamba2_pairs", "mamba2_chunks"] if "mamba" in case else ["delta_pairs", "delta_solve", "delta_chunks"]
    for kernel in kernels:
        assert found[kernel].get("HGMMA", 0) + found[kernel].get("HMMA", 0) >= 4, kernel


@pytest.mark.parametrize("capability", _CASES)
def test_weights_of_tokens_are_made_of_operations_that_are_not_fused(capability):
    """Fused ones would make other weights than a CPU's. The divisions of a row have fused operations of their own."""
    (code,) = codes_of(capability)["sampling"]
    count = code["instructions"].get
    assert count("FMUL", 0) + 2 * count("FMUL2", 0) > 200, code
    assert count("FFMA", 0) + 2 * count("FFMA2", 0) < 5, code
    assert count("DFMA", 0) < 40, "no exponentials in float64"
