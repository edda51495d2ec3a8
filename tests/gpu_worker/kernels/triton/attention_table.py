"""``python -m tests.gpu_worker.kernels.triton.attention_table`` compiles every variant of the attention kernel for an
H100, without having one, and writes the registers and shared memory of each into ``docs/understand/decisions.md``.

It takes minutes: a compilation takes seconds.
"""

from pathlib import Path
from typing import Any

import torch

from tests.gpu_worker.attention.steps import shape
from tests.gpu_worker.kernels.triton.machine_code import FP8, META, MachineCode, attention, compile_launch
from tokenloom.gpu_worker.attention import triton_backend
from tokenloom.gpu_worker.attention.triton_backend import TritonBackend

PAGE = Path(__file__).parents[4] / "docs/understand/decisions.md"
BEGIN, END = "<!-- attention variants: begin -->", "<!-- attention variants: end -->"
CAPABILITY = 90
"""That of an H100; ``test_machine_code`` compiles for others, too."""

LLAMA, WIDE = ((32, 8), 128), ((8, 4), 256)
DECODES, PROMPT = ([1] * 32, 512), ([512], 2048)
SINKS = {"sinks": torch.empty(32, device=META)}
Variant = tuple[tuple[list[int], int], tuple[tuple[int, int], int], torch.dtype | None, dict[str, Any]]
VARIANTS: dict[str, Variant] = {
    "decodes": (DECODES, LLAMA, None, {}),
    "decodes, 1 query head for each KV head": (DECODES, ((32, 32), 128), None, {}),
    "decodes, 32 query heads for each KV head": (DECODES, ((64, 2), 128), None, {}),
    "decodes, window": (DECODES, LLAMA, None, {"sliding_window": 1024}),
    "decodes, softcap": (DECODES, LLAMA, None, {"softcap": 50.0}),
    "decodes, sinks and window": (DECODES, LLAMA, None, {"sliding_window": 128, **SINKS}),
    "decodes, heads of 64": (DECODES, ((32, 8), 64), None, {}),
    "decodes, heads of 80": (DECODES, ((32, 32), 80), None, {}),
    "decodes, heads of 256": (DECODES, WIDE, None, {}),
    "decodes, fp8 KV": (DECODES, LLAMA, FP8, {}),
    "prompts": (PROMPT, LLAMA, None, {}),
    "prompts, window": (PROMPT, LLAMA, None, {"sliding_window": 1024}),
    "prompts, softcap": (PROMPT, LLAMA, None, {"softcap": 50.0}),
    "prompts, sinks and window": (PROMPT, LLAMA, None, {"sliding_window": 128, **SINKS}),
    "prompts, heads of 64": (PROMPT, ((32, 8), 64), None, {}),
    "prompts, heads of 256": (PROMPT, WIDE, None, {}),
    "prompts, fp8 KV": (PROMPT, LLAMA, FP8, {}),
}


def compiled(variant: Variant, capability: int) -> MachineCode:
    """Return the code of the widest programs of a variant."""
    (query_lens, length), (heads, head), kv_dtype, rule = variant
    codes: list[MachineCode] = []

    def launch(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        if not codes and grid[0]:
            codes.append(compile_launch(kernel, arguments, constants, capability))

    before, triton_backend.launch = triton_backend.launch, launch
    try:
        attention(query_lens, length, head, heads, kv_dtype, **rule)
    finally:
        triton_backend.launch = before
    return codes[0]


def buffers(variant: Variant) -> tuple[str, int]:
    """Return the shape of a program, and the bytes of two tiles of keys and two of values."""
    (query_lens, _), (heads, head), kv_dtype, _ = variant
    config = shape(heads[1], torch.bfloat16, heads[0], head, kv_dtype)
    chosen = TritonBackend(config, 16, META).shape(max(query_lens))
    pair = 2 * chosen.tile * config.cache_head_size * (kv_dtype or torch.bfloat16).itemsize
    return f"{chosen.rows} x {chosen.tile}, {chosen.warps} warps", 2 * pair


def row(name: str) -> str:
    """Return a line of the table."""
    variant = VARIANTS[name]
    program, wanted = buffers(variant)
    code = compiled(variant, CAPABILITY)
    spilled = f", {code.stack} B spilled" if code.stack else ""
    return f"| {name} | {program} | {wanted:,} B | {code.registers}, {code.shared:,} B{spilled} |"


def table() -> str:
    head = "| variant | rows x keys of a program | two tiles of keys and of values | registers, shared memory |"
    return "\n".join([head, "|---|---|---|---|", *map(row, VARIANTS)])


def written(text: str, lines: str) -> str:
    """Return a page with these lines between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{lines}\n\n{END}{after}"


def main() -> None:
    PAGE.write_text(written(PAGE.read_text(), table()))


if __name__ == "__main__":
    main()
