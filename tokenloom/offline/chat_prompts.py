"""Renders conversations of the offline API to prompts."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from tokenloom.model_files.checkpoint import CheckpointInfo
from tokenloom.request.chat_template import read_chat_template
from tokenloom.services.tokenizer.chat_template import ChatTemplate

from .prompts import Message, TokenizedPrompt, plain_message, whole_text


class ChatPrompts:
    """Renders conversations with the checkpoint's chat template, or with another one."""

    def __init__(self, info: CheckpointInfo, tokenizer: Tokenizer, model_name: str) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._model_name = model_name

    def encode(
        self,
        conversations: Sequence[Sequence[Message]],
        source: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> list[TokenizedPrompt]:
        """Return each conversation's prompt. ``source``: another template, or its file.

        Raises ``ValueError`` without any template, ``InvalidArgument`` for a file that cannot be read.
        """
        template = self._template(source)
        texts = [template.render([*map(plain_message, messages)], tools, **options) for messages in conversations]
        for text in texts:
            whole_text("the conversation", text)
        # The template writes the special tokens itself.
        return [TokenizedPrompt(text, self._tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]

    def _template(self, source: str | None) -> ChatTemplate:
        if source is not None:
            return ChatTemplate(read_chat_template(source), self._info.special_tokens)
        if self._own_template is None:
            raise ValueError(f"model {self._model_name!r} has no chat template: give one as chat_template")
        return self._own_template

    @cached_property
    def _own_template(self) -> ChatTemplate | None:
        return ChatTemplate.from_checkpoint(self._info)
