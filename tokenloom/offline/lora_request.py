"""Names LoRA adapters in calls of the offline API, and loads them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from tokenloom.engine_core.client.core_client import CoreClient
from tokenloom.engine_core.data.lora import LoraAnswer
from tokenloom.model_files.model_path import expanded

from .prompts import TokenizedPrompt


@dataclass(frozen=True)
class LoRARequest:
    """Names an adapter: ``LoRARequest("pirate", "/adapters/pirate")``, or with vLLM's number between name and path."""

    lora_name: str
    """A name for it, which stands for these files until they are unloaded."""
    lora_int_id: int | str | Path = 0
    """A number without effect, or the path."""
    lora_path: str | Path = ""
    """A directory in the layout of the peft library."""

    @property
    def path(self) -> str:
        """Return the absolute path. Raises ``ValueError`` without one."""
        path = self.lora_path or ("" if isinstance(self.lora_int_id, int) else self.lora_int_id)
        if not path:
            raise ValueError(f"lora_path of the LoRA adapter {self.lora_name!r} is empty")
        return str(expanded(path).absolute())


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None
"""One adapter for all prompts, one or none for each, or none."""


class OfflineLoras:
    """Loads the adapters that calls name, each once."""

    def __init__(self, client: CoreClient, *, are_enabled: bool) -> None:
        self._client = client
        self._are_enabled = are_enabled

    def apply(self, prompts: Sequence[TokenizedPrompt], requests: LoRARequests) -> list[TokenizedPrompt]:
        """Return the prompts with their adapters. Raises ``ValueError`` for an adapter that cannot be loaded, or if not
        all of them fit into memory."""
        if requests is None:
            return list(prompts)
        each = [requests] * len(prompts) if isinstance(requests, LoRARequest) else list(requests)
        if len(each) != len(prompts):
            raise ValueError(f"lora_request has {len(each)} entries for {len(prompts)} prompts")
        if not self._are_enabled:
            raise ValueError("lora_request needs LLM(…, enable_lora=True)")
        digests: dict[str, bytes] = {}
        for request in dict.fromkeys(request for request in each if request is not None):
            answer = msgspec.convert(
                self._client.call_utility("load_lora", request.lora_name, request.path), LoraAnswer
            )
            if answer.error:
                raise ValueError(f"LoRA adapter {request.lora_name!r}: {answer.error}")
            digests = {state.name: state.digest for state in answer.adapters}
        if missing := [each.lora_name for each in each if each is not None and each.lora_name not in digests]:
            raise ValueError(f"lora_request names more adapters than fit (max_cpu_loras); {missing[0]!r} does not")
        return [
            prompt if request is None else replace(prompt, adapter=digests[request.lora_name])
            for prompt, request in zip(prompts, each, strict=True)
        ]
