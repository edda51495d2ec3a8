"""Options of LoRA adapters."""

from typing import Annotated

from msgspec import Meta, Struct

_Slots = Annotated[int, Meta(ge=1)]
_Rank = Annotated[int, Meta(ge=1, le=256)]


class LoraConfig(Struct, frozen=True):
    """LoRA adapters, of which each request may name one."""

    enable: Annotated[bool, "Let requests name LoRA adapters as their model.", Meta(extra={"name": "enable_lora"})] = (
        False
    )
    max_loras: Annotated[_Slots, "LoRA adapters in a batch."] = 8
    max_lora_rank: Annotated[_Rank, "Largest rank of a LoRA adapter."] = 64
    max_cpu_loras: Annotated[
        _Slots | None, "LoRA adapters that an engine keeps in memory; by default 32, or --max-loras if that is more."
    ] = None
    modules: Annotated[
        tuple[str, ...],
        "LoRA adapters to load at start: name=path, separated by commas; a path is a directory of the peft library.",
        Meta(extra={"name": "lora_modules"}),
    ] = ()

    @property
    def max_loaded(self) -> int:
        """Return how many adapters may be in memory."""
        return self.max_cpu_loras or max(32, self.max_loras)

    def named_paths(self) -> list[tuple[str, str]]:
        """Return the names and paths of ``modules``. Raises ``ValueError`` naming an option that does not work."""
        if self.modules and not self.enable:
            raise ValueError("lora_modules needs enable_lora")
        if self.max_loaded < self.max_loras:
            raise ValueError(f"max_cpu_loras is {self.max_loaded}; it must be at least max_loras, {self.max_loras}")
        pairs = [(name, path) for name, _, path in (module.partition("=") for module in self.modules)]
        for (name, path), module in zip(pairs, self.modules, strict=True):
            if not name or not path:
                raise ValueError(f"lora_modules: {module!r} must be name=path")
        return pairs
