"""Options of LoRA adapters."""

import json
from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta, Struct

from tokenloom.request.adapter_names import check_adapter_name
from tokenloom.request.errors import InvalidArgument

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
        "LoRA adapters to load at start: name=path, separated by commas, or vLLM's JSON objects with name and path; a "
        "path is a directory of the peft library.",
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
        return list(_read_modules(",".join(self.modules)))


def _read_modules(text: str) -> Iterator[tuple[str, str]]:
    """Yield names and paths from ``name=path`` or vLLM's JSON objects with ``name`` and ``path``, joined by commas."""
    while text:
        if text.startswith("{"):
            try:
                module, end = json.JSONDecoder().raw_decode(text)
            except ValueError as error:
                raise ValueError(f"lora_modules: not JSON: {error}") from None
            item, text = text[:end], text[end:].lstrip(", ")
            name, path = str(module.get("name", "")), str(module.get("path", ""))
        else:
            item, _, text = text.partition(",")
            name, _, path = item.partition("=")
        if not path or "," in path:
            raise ValueError(f'lora_modules: {item!r} must be name=path or {{"name": …, "path": …}}, without commas')
        try:
            yield check_adapter_name(name, "lora_modules: the name"), path
        except InvalidArgument as error:
            raise ValueError(error.message) from None
