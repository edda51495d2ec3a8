"""Makes the JSON bodies of requests, for completions and for chat."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tokenizers import Tokenizer

from .datasets import Prompt


class Backend(StrEnum):
    """Names one of OpenAI's endpoints."""

    OPENAI = "openai"
    OPENAI_CHAT = "openai-chat"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is Backend.OPENAI_CHAT else "/v1/completions"


@dataclass(frozen=True)
class CompletionBody:
    """Sends plain token ids, so that no server spends time on a tokenizer."""

    model: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Further members, such as ``{"temperature": 0}``."""

    def __call__(self, prompt: Prompt) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt.token_ids,
            "max_tokens": prompt.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.sampling,
        }


@dataclass(frozen=True)
class ChatBody:
    """Sends one user turn whose text consists of the prompt's tokens."""

    model: str
    tokenizer: Tokenizer
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, prompt: Prompt) -> dict[str, Any]:
        text = self.tokenizer.decode(prompt.token_ids)
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "max_completion_tokens": prompt.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.sampling,
        }
