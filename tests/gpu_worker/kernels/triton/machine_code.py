"""``python -m …machine_code CAPABILITY NAME…`` compiles launches for GPUs of a compute capability (80: A100, 90: H100,
100: B200) without a GPU, and prints what the code does as JSON; without names a table of all cases.

Each launch is the one that the worker makes for a model of the shape of Llama 3.1 8B: its tensors lie on the device
``meta``, and what would launch a kernel compiles it instead. A process of its own, because Triton's interpreter and its
compiler exclude each other.
"""

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.gpu_worker.attention.steps import shape
from tokenloom.gpu_worker.attention import triton_backend
from tokenloom.gpu_worker.attention.attention_backend import PlanTensors, ScoreRule
from tokenloom.gpu_worker.attention.states import StatePlan
from tokenloom.gpu_worker.attention.triton_backend import TritonBackend
from tokenloom.gpu_worker.checkpoint.files.quantized_weight import FloatWeight, QuantizedWeight
from tokenloom.gpu_worker.checkpoint.mixer_config import STATE_CHUNK
from tokenloom.gpu_worker.cuda import row_kernels
from tokenloom.gpu_worker.cuda.step_tensors import SentStep, StepSize, StepTensors
from tokenloom.gpu_worker.layers import triton_linear
from tokenloom.gpu_worker.layers import triton_linear as triton_experts
from tokenloom.gpu_worker.layers.expert_routes import ExpertRoutes
from tokenloom.gpu_worker.layers.norm import RowNorm
from tokenloom.gpu_worker.layers.triton_linear import ExpertTiles, GroupedLinear, TritonExperts, TritonLinear
from tokenloom.gpu_worker.lora.adapted_linear import GroupedChanges
from tokenloom.gpu_worker.ops import triton_ops
from tokenloom.gpu_worker.ops.ops import HeadNorm
from tokenloom.gpu_worker.ops.state_ops import Convolution, Mamba2Weights
from tokenloom.gpu_worker.ops.triton_ops import TritonOps
from tokenloom.gpu_worker.sampler.device import sampler_kernels
from tokenloom.gpu_worker.sampler.device.sampler_kernels import TritonSamplerKernels

# No machine that tests this repository has a GPU. The interpreter shows whether layouts and masks are right; only the
# machine code shows spilled registers, narrow loads of weights or KV, and prompts without the wide matrix instruction.
META = torch.device("meta")
FP8 = torch.float8_e4m3fn
_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_LAUNCHERS = (
    triton_backend,
    row_kernels,
    sampler_kernels,
    triton_experts,
    triton_linear,
    triton_ops,
)


@dataclass(frozen=True)
class MachineCode:
    """What the code of one kernel does."""

    kernel: str
    registers: int
    stack: int
    """Bytes of spilled registers and local arrays, of each thread."""
    shared: int
    """Bytes of shared memory."""
    instructions: dict[str, int]
    """How often each kind of load, product and matrix instruction stands there, by name and width."""


def compile_launch(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], capability: int) -> MachineCode:
    """As Triton specializes a launch: addresses and sizes that 16 divides, and sizes of 1, are known to the code, but
    those that differ between steps."""
    names, values = kernel.arg_names, dict(constants)
    signature, attributes = {}, {}
    for index, (name, value) in enumerate(zip(names, arguments, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name] = _TYPES[value.dtype]
            if name not in kernel.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and name not in kernel.do_not_specialize:
            signature[name], values[name] = "constexpr", 1
        else:
            signature[name] = "i32" if value < 1 << 31 else "i64"
            if value % 16 == 0 and name not in kernel.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    options = {name: values.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion") if name in values}
    signature |= dict.fromkeys(constants.keys() - options.keys(), "constexpr")
    ordered = {name: signature[name] for name in names}
    source = ASTSource(kernel, ordered, values, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return _read(kernel.__name__, compiled.asm["cubin"], compiled.metadata.shared)


def _read(name: str, cubin: bytes, shared: int) -> MachineCode:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.check_output([_CUOBJDUMP, "-res-usage", file.name], text=True, stderr=subprocess.STDOUT)
        code = subprocess.check_output([_CUOBJDUMP, "-sass", file.name], text=True)
    counts: dict[str, int] = {}
    for operation in re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+)", code, re.MULTILINE):
        kind = operation.split(".")[0]
        if kind in ("LDG", "LDGSTS"):
            width = re.search(r"\.(U?16|U?8|64|128)\b", operation)
            kind += "." + (width[1] if width else "32")
        elif kind not in ("HGMMA", "HMMA", "LDL", "STL", "UTMALDG", "FFMA", "FFMA2", "FMUL", "FMUL2", "DFMA"):
            continue
        counts[kind] = counts.get(kind, 0) + 1
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))
    return MachineCode(name, registers, stack, shared, counts)


def _empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=META)


def attention(
    query_lens: list[int],
    length: int,
    head: int = 128,
    heads: tuple[int, int] = (32, 8),
    kv_dtype: torch.dtype | None = None,
    **rule: Any,
) -> None:
    num_heads, num_kv_heads = heads
    config = shape(num_kv_heads, torch.bfloat16, num_heads, head, kv_dtype)
    count, blocks = len(query_lens), -(-length // 16)
    backend = TritonBackend(config, 16, META)
    plan = backend.plan(
        np.cumsum([0, *query_lens]),
        np.full(count, length),
        np.zeros((count, blocks), dtype=np.int32),
        np.zeros(sum(query_lens), dtype=np.int64),
    )
    rows = _empty(sum(query_lens), num_heads + 2 * num_kv_heads, head)
    cache = _empty(2, 64, num_kv_heads, 16, config.cache_head_size, dtype=config.kv_dtype)
    plan.attend(rows[:, :num_heads], cache, ScoreRule(head**-0.5, **rule))


def shared_keys(head: int = 128, heads: tuple[int, int] = (32, 8), kv_dtype: torch.dtype | None = None) -> None:
    """Attend in a step of 32 decodes that read keys together."""
    config = shape(heads[1], torch.bfloat16, heads[0], head, kv_dtype)
    backend, count = TritonBackend(config, 16, META), 32
    room = backend.shared_room(count)
    assert room is not None, "these are enough"
    ints = partial(_empty, dtype=torch.int32)
    lists = ints(sum(room) + sum(backend.room(1, count)), 4), ints(count + 1), ints(count), ints(count, 64)
    plan = backend.shared_plan_of(PlanTensors(_empty(count, dtype=torch.int64), *lists), room)
    rows = _empty(count, heads[0] + 2 * heads[1], head)
    cache = _empty(2, 64, heads[1], 16, config.cache_head_size, dtype=config.kv_dtype)
    plan.attend(rows[:, : heads[0]], cache, ScoreRule(head**-0.5))


def rotation(kv_dtype: torch.dtype = torch.bfloat16) -> None:
    plan = SimpleNamespace(slots_of=lambda cache: _empty(4, dtype=torch.int64))
    norm = HeadNorm(_empty(40, 128), 1e-6)
    angles = _empty(4, 1, 64, dtype=torch.float32)
    cache = _empty(2, 64, 8, 16, 128, dtype=kv_dtype)
    TritonOps().rotate_and_write(_empty(4, 48, 128), norm, (angles, angles), cache, plan)


def experts(tokens: int) -> None:
    layer = TritonExperts(_empty(8, 2 * 1024, 2048), _empty(8, 2048, 1024), "silu")
    _compute_experts(layer, tokens)


def _compute_experts(layer: TritonExperts, tokens: int) -> None:
    logits, routes = _empty(tokens, 8, dtype=torch.float32), ExpertRoutes(8, 2, 1)
    weights, chosen = triton_linear.choose_experts(logits, 2, normalizes=True)
    layer(_empty(tokens, 2048), weights, chosen, *routes.layers[0].places(chosen))


def fp8_experts(tokens: int) -> None:
    matrices = _empty(8, 2 * 1024, 2048, dtype=FP8), _empty(8, 2048, 1024, dtype=FP8)
    scales = _empty(8, 2 * 1024, dtype=torch.float32), _empty(8, 2048, dtype=torch.float32)
    _compute_experts(TritonExperts(*matrices, "silu", *scales), tokens)


def normed(rows: int, outputs: int, inputs: int, kind: str) -> None:
    norm = RowNorm(_empty(inputs), 1e-6, 0.0)
    triton_linear.multiply_few(_empty(rows, inputs), _empty(outputs, inputs), None, None, kind, norm=norm)


def added(rows: int, outputs: int, inputs: int) -> None:
    stream = _empty(rows, outputs)
    triton_linear.multiply_few(_empty(rows, inputs), _empty(outputs, inputs), None, None, into=stream)


def adapters(rows: int) -> None:
    changes = GroupedChanges(4096, (4096, 1024, 1024), 4, 16, torch.bfloat16, META)
    counts, num_rows = _empty(4, dtype=torch.int64), _empty(1, dtype=torch.int32)
    tiles = ExpertTiles.sort(_empty(rows, 1, dtype=torch.int64), 4, counts, num_rows)
    triton_linear.change_rows(_empty(rows, 4096), _empty(rows, 6144), changes._changes, tiles)


def fp8_product(rows: int, outputs: int, inputs: int, kind: str = "none") -> None:
    weight, scales = _empty(outputs, inputs, dtype=FP8), _empty(outputs, dtype=torch.float32)
    triton_linear.multiply_few(_empty(rows, inputs), weight, scales, None, kind)


def packed_product(rows: int, outputs: int, inputs: int, group: int = 128, *, has_offsets: bool = False) -> None:
    floats = partial(_empty, outputs, inputs // group, dtype=torch.float32)
    values = _empty(outputs, inputs, dtype=torch.int8)
    weight = QuantizedWeight(values, floats(), floats() if has_offsets else None, group)
    GroupedLinear(weight, None, META)(_empty(rows, inputs))


def fp8_blocks(rows: int, outputs: int, inputs: int) -> None:
    weight = FloatWeight(_empty(outputs, inputs, dtype=FP8), _empty(outputs, inputs // 128, dtype=torch.float32), 128)
    GroupedLinear(weight, None, META)(_empty(rows, inputs))


def sampling(count: int, *, divides: bool) -> None:
    columns = [_empty(count, dtype=torch.float64) for _ in range(4)]
    rows = _empty(count, dtype=torch.int32), _empty(count, dtype=torch.int64)
    sampler_kernels.draw(_empty(count, 151_936, dtype=torch.float32), [*columns, *rows], divides=divides)


def rows_of_a_step() -> None:
    def ints(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return _empty(*size, dtype=dtype)

    kernels, count, size = row_kernels.TritonRowKernels(), 100, StepSize(128, 128, 128)
    sent = SentStep(ints(count), ints(count + 1), ints(count), ints(count), ints(count, 2))
    made = StepTensors.allocate(size, 1, 512, META)
    kernels.prepare(sent, ints(128, 512), *(ints(128, dtype=torch.int64) for _ in range(2)), made, size, 16)
    kernels.scatter(ints(128, 512), ints(count, dtype=torch.int64), ints(count))


def changes() -> None:
    ints, doubles = partial(_empty, dtype=torch.int32), [_empty(8, dtype=torch.float64) for _ in range(3)]
    listed = (ints(9), ints(20), _empty(20, dtype=torch.float32))
    edits = [ints(8), *listed, ints(8), ints(2, 4748), ints(8), *doubles, ints(8)]
    kernels, seen = TritonSamplerKernels(), ints(8, 151_936)
    kernels.change(_empty(128, 151_936, dtype=torch.float32), edits, seen)
    kernels.count(seen, edits, _empty(128, dtype=torch.int64))


def log_probabilities() -> None:
    wanted = [_empty(size, dtype=torch.int32) for size in (16, 17, 3)]
    logits, tokens = _empty(16, 151_936, dtype=torch.float32), _empty(16, dtype=torch.int64)
    TritonSamplerKernels().find_logprobs(logits, wanted, tokens, 20)


def states(tokens: int, chunk: int = 1) -> tuple[torch.Tensor, StatePlan]:
    """Return rows of the 8,192 channels of Qwen3-Next and Qwen3.5 4B before its convolution, and their plan."""
    return _empty(tokens, 8192), StatePlan.make([tokens], [0], [1], [], chunk).send(META)


def convolution(tokens: int) -> None:
    rows, plan = states(tokens)
    TritonOps().states.short_conv(rows, Convolution(_empty(4, 8192), None, True), _empty(2, 3, 8192), plan)


def delta(tokens: int = 4, chunk: int = 1, *, by_channel: bool) -> None:
    floats = partial(_empty, dtype=torch.float32)
    rows, plan = states(tokens, chunk)
    query, key = rows[:, :2048].view(tokens, 16, 128), rows[:, 2048:4096].view(tokens, 16, 128)
    gates = floats(tokens, 32, 128) if by_channel else floats(tokens, 32), floats(tokens, 32)
    value = rows[:, 4096:].view(tokens, 32, 128)
    TritonOps().states.gated_delta(query, key, value, gates, floats(2, 32, 128, 128), plan)


def mamba2(tokens: int = 4, chunk: int = 1, size: int = 128) -> None:
    """Of the sizes of Granite 4.0 H Small, or with states of as many elements a row as those of Falcon-H1."""
    floats = partial(_empty, dtype=torch.float32)
    rows, plan = _empty(tokens, 8192 + 2 * size), StatePlan.make([tokens], [0], [1], [], chunk).send(META)
    x = rows[:, :8192].view(tokens, 128, 64)
    b, c = (part.view(tokens, 1, size) for part in rows[:, 8192:].chunk(2, 1))
    weights = Mamba2Weights(floats(128), floats(128), floats(128))
    TritonOps().states.mamba2(x, b, c, _empty(tokens, 128), weights, floats(2, 128, 64, size), plan)


def gates_of_states() -> None:
    ops, both = TritonOps().states, _empty(4, 64)
    ops.delta_gates(both[:, :32], both[:, 32:], *(_empty(32, dtype=torch.float32) for _ in range(2)))
    ops.gated_norm(_empty(4, 32, 128), _empty(4, 32, 128), _empty(128), 1e-6, norm_first=True)


def block_copies() -> None:
    pool = _empty(64, 100, 2048, dtype=torch.int64)
    row_kernels.copy_pool_blocks(pool, pool, _empty(9, dtype=torch.int64), _empty(9, dtype=torch.int64))


CASES: dict[str, Callable[[], object]] = {
    "decode": lambda: attention([1] * 32, 512),
    "split decode": lambda: attention([1], 4096),
    "prefill": lambda: attention([512, 1], 2048),
    "prefill, window and softcap": lambda: attention([512], 2048, 256, (8, 4), sliding_window=1024, softcap=50.0),
    "sinks": lambda: attention([300], 2048, 64, (64, 8), sliding_window=128, sinks=_empty(64, dtype=torch.float32)),
    "heads of 80": lambda: attention([1] * 32, 512, 80, (32, 32)),
    "shared keys": shared_keys,
    "shared keys, fp8 KV": lambda: shared_keys(kv_dtype=FP8),
    "shared keys, heads of 256": lambda: shared_keys(256, (8, 4)),
    "prefill, heads of 256": lambda: attention([512], 2048, 256, (8, 4)),
    "add and norm": lambda: TritonOps().add_norm(_empty(4, 4096), _empty(4, 4096), _empty(4096), 1e-6),
    "rotation": rotation,
    "gate": lambda: TritonOps().gate(_empty(4, 2 * 14336), "silu"),
    "product": lambda: TritonLinear(_empty(4096, 14336))(_empty(1, 14336)),
    "product with gates": lambda: TritonLinear(_empty(2 * 14336, 4096)).gated(_empty(8, 4096), "silu"),
    "logits": lambda: TritonLinear(_empty(128_256, 4096))(_empty(16, 4096), torch.float32),
    "product with a norm": lambda: normed(1, 6144, 4096, "none"),
    "product with a norm and gates": lambda: normed(16, 2 * 14336, 4096, "silu"),
    "product that is added": lambda: added(16, 4096, 14336),
    "rows of adapters": lambda: adapters(40),
    "many rows of adapters": lambda: adapters(400),
    "few rows of experts": lambda: experts(4),
    "many rows of experts": lambda: experts(512),
    "decode, fp8 KV": lambda: attention([1] * 32, 512, kv_dtype=FP8),
    "prefill, fp8 KV": lambda: attention([512, 1], 2048, kv_dtype=FP8),
    "rotation, fp8 KV": lambda: rotation(FP8),
    "fp8 product": lambda: fp8_product(1, 4096, 14336),
    "fp8 product with gates": lambda: fp8_product(8, 2 * 14336, 4096, "silu"),
    "4-bit product": lambda: packed_product(1, 4096, 14336),
    "4-bit product with offsets": lambda: packed_product(16, 6144, 4096, has_offsets=True),
    "4-bit product in groups of 32": lambda: packed_product(16, 28672, 4096, 32),
    "4-bit product of many rows": lambda: packed_product(256, 28672, 4096),
    "4-bit weight written out": lambda: packed_product(300, 4096, 4096, has_offsets=True),
    "fp8 product by blocks": lambda: fp8_blocks(16, 4096, 14336),
    "fp8 product of many rows by blocks": lambda: fp8_blocks(256, 28672, 4096),
    "fp8 weight written out": lambda: fp8_blocks(300, 4096, 4096),
    "few rows of fp8 experts": lambda: fp8_experts(4),
    "many rows of fp8 experts": lambda: fp8_experts(512),
    "rounding rows": lambda: triton_linear.round_rows_at_once(_empty(512, 4096)),
    "sampling": lambda: sampling(128, divides=False),
    "sampling by parts of rows": lambda: sampling(2, divides=True),
    "changed logits": changes,
    "log probabilities": log_probabilities,
    "convolution": lambda: convolution(4),
    "convolution of a prompt": lambda: convolution(512),
    "gated delta": lambda: delta(by_channel=False),
    "gated delta by channel": lambda: delta(by_channel=True),
    "mamba-2": mamba2,
    "gated delta in chunks": lambda: delta(512, STATE_CHUNK, by_channel=False),
    "gated delta by channel in chunks": lambda: delta(512, STATE_CHUNK, by_channel=True),
    "mamba-2 in chunks": lambda: mamba2(512, STATE_CHUNK),
    "mamba-2 in chunks, wide states": lambda: mamba2(512, STATE_CHUNK, 256),
    "gates and norms of states": gates_of_states,
    "block copy": block_copies,
    "step of rows": rows_of_a_step,
}


def main() -> None:
    capability, *names = sys.argv[1:]
    found: dict[str, list[dict[str, Any]]] = {}
    for name in names or CASES:
        codes: list[MachineCode] = []

        def launch(kernel: Any, grid: Any, *arguments: Any, codes: list[MachineCode] = codes, **constants: Any) -> None:
            codes.append(compile_launch(kernel, arguments, constants, int(capability)))

        for module in _LAUNCHERS:
            module.launch = launch
        triton_backend.generation_of = lambda device: int(capability) // 10
        CASES[name]()
        found[name] = [dataclasses.asdict(code) for code in codes]
        if not names:
            for code in codes:
                loads = {kind: count for kind, count in code.instructions.items() if kind.startswith("LDGSTS")}
                print(
                    f"{name}: {code.kernel}, {code.registers} registers, {code.shared:,} B shared, {loads}", flush=True
                )
    if names:
        json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
