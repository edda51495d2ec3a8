"""``python -m tests.gpu_worker.kernels.triton.attention_table`` compiles every variant of the attention kernels for an
A100, an H100 and a B200, without having one, and writes the registers and shared memory of each into
``docs/understand/decisions.md``.

It takes minutes: a compilation takes seconds.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu_worker.attention.steps import shape
from tests.gpu_worker.kernels.triton.machine_code import (
    FP8,
    META,
    MachineCode,
    attention,
    compile_launch,
    shared_keys,
)
from tokenloom.gpu_worker.attention import triton_backend
from tokenloom.gpu_worker.attention.triton_backend import TritonBackend

PAGE = Path(__file__).parents[4] / "docs/understand/decisions.md"
BEGIN, END = "<!-- attention variants: begin -->", "<!-- attention variants: end -->"
CAPABILITIES = {80: "A100", 90: "H100", 100: "B200"}
"""The GPUs of the table, by compute capability."""
NONE = "no 8-bit floats"


@dataclass(frozen=True)
class Variant:
    """A kernel as a step of a model launches it."""

    step: tuple[list[int], int] | None
    """Queries of each request, and the length of all; None: decodes that read keys together."""
    heads: tuple[int, int] = (32, 8)
    head: int = 128
    kv_dtype: torch.dtype | None = None
    rule: dict[str, Any] = field(default_factory=dict)
    kernel: str = "attend"

    def compiled(self, capability: int) -> MachineCode:
        """Return the code of the widest programs."""
        codes: list[MachineCode] = []

        def launch(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
            if not codes and grid[0] and kernel.__name__ == self.kernel:
                codes.append(compile_launch(kernel, arguments, constants, capability))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_backend, "launch", launch)
            patch.setattr(triton_backend, "generation_of", lambda device: capability // 10)
            if self.step is None:
                shared_keys(self.head, self.heads, self.kv_dtype)
            else:
                attention(*self.step, self.head, self.heads, self.kv_dtype, **self.rule)
        return codes[0]

    def buffers(self) -> tuple[str, int]:
        """Return the shape of a program, and the bytes of two tiles of keys and two of values, the same on all GPUs."""
        config = shape(self.heads[1], torch.bfloat16, self.heads[0], self.head, self.kv_dtype)
        backend = TritonBackend(config, 16, META)
        chosen = backend.shape(1 if self.step is None else max(self.step[0]))
        if self.kernel == "attend_shared":
            chosen = backend.shared_shape
        pair = 2 * chosen.tile * config.cache_head_size * (self.kv_dtype or torch.bfloat16).itemsize
        return f"{chosen.rows} x {chosen.tile}", 2 * pair


WIDE = (8, 4)
DECODES, PROMPT = ([1] * 32, 512), ([512], 2048)
SINKS = {"sinks": torch.empty(32, device=META)}
VARIANTS = {
    "decodes": Variant(DECODES),
    "decodes, 1 query head for each KV head": Variant(DECODES, (32, 32)),
    "decodes, 32 query heads for each KV head": Variant(DECODES, (64, 2)),
    "decodes, window": Variant(DECODES, rule={"sliding_window": 1024}),
    "decodes, softcap": Variant(DECODES, rule={"softcap": 50.0}),
    "decodes, sinks and window": Variant(DECODES, rule={"sliding_window": 128, **SINKS}),
    "decodes, heads of 64": Variant(DECODES, head=64),
    "decodes, heads of 80": Variant(DECODES, (32, 32), 80),
    "decodes, heads of 256": Variant(DECODES, WIDE, 256),
    "decodes, fp8 KV": Variant(DECODES, kv_dtype=FP8),
    "prompts": Variant(PROMPT),
    "prompts, window": Variant(PROMPT, rule={"sliding_window": 1024}),
    "prompts, softcap": Variant(PROMPT, rule={"softcap": 50.0}),
    "prompts, sinks and window": Variant(PROMPT, rule={"sliding_window": 128, **SINKS}),
    "prompts, heads of 64": Variant(PROMPT, head=64),
    "prompts, heads of 64, sinks and window": Variant(PROMPT, head=64, rule={"sliding_window": 128, **SINKS}),
    "prompts, heads of 256": Variant(PROMPT, WIDE, 256),
    "prompts, fp8 KV": Variant(PROMPT, kv_dtype=FP8),
    "keys that decodes share": Variant(None, kernel="attend_shared"),
    "decodes behind shared keys": Variant(None),
}


def cell(name: str, capability: int) -> str:
    """Return what a variant takes of a GPU."""
    if VARIANTS[name].kv_dtype is not None and capability == 80:
        return NONE
    code = VARIANTS[name].compiled(capability)
    return f"{code.registers}, {code.shared:,} B" + (f", {code.stack} B spilled" if code.stack else "")


def row(name: str) -> str:
    """Return a line of the table."""
    program, wanted = VARIANTS[name].buffers()
    return " | ".join(("| " + name, program, f"{wanted:,} B", *(cell(name, each) for each in CAPABILITIES))) + " |"


def table() -> str:
    head = "| variant | rows x keys of a program | two tiles of keys and of values | "
    head += " | ".join(f"registers, shared memory: {name}" for name in CAPABILITIES.values()) + " |"
    return "\n".join([head, "|---" * (3 + len(CAPABILITIES)) + "|", *map(row, VARIANTS)])


def written(text: str, lines: str) -> str:
    """Return a page with these lines between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{lines}\n\n{END}{after}"


def main() -> None:
    PAGE.write_text(written(PAGE.read_text(), table()))


if __name__ == "__main__":
    main()
