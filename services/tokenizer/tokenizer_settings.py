"""Options of a tokenizer."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from tokenloom.model_files.model_path import DEMO_MODEL_NAME
from tokenloom.process.plugins import check_named
from tokenloom.request.chat_template import check_chat_template, names_plugin
from tokenloom.services.runtime.host.service_settings import ServiceSettings

_Workers = Annotated[int, Meta(ge=1, le=64)]


class TokenizerSettings(ServiceSettings, frozen=True, kw_only=True):
    """Which model's tokenizer to serve, and the resources it may use."""

    service: ClassVar[str] = "tokenizer"

    model: Annotated[str, "Checkpoint directory, GGUF file or hub id to read the tokenizer from."] = DEMO_MODEL_NAME
    served_model_name: Annotated[str, "Name that clients use; by default the last part of the directory."] = ""
    chat_template: Annotated[
        Annotated[str, Meta(extra={"check": check_chat_template})],
        "Chat template to use instead of the checkpoint's: a file, or Jinja in one line. All tokenizers and engines "
        "of a mesh need the same.",
    ] = ""
    spelled_tokens: Annotated[
        Literal["text", "control"],
        "What becomes of special tokens that a chat's texts spell out: plain text, or the control tokens, with which a "
        "user's turn can begin another one. All tokenizers of a mesh need the same.",
    ] = "text"
    block_size: Annotated[Annotated[int, Meta(ge=1, le=1024)], "Tokens in a KV block; the same as in the engines."] = 16
    threads: Annotated[
        _Workers, "Texts that are encoded at the same time, and as many of more than 64 KiB, each in a process."
    ] = 2
    max_text_bytes: Annotated[Annotated[int, Meta(ge=1, le=1 << 26)], "Longest text to encode, in bytes of UTF-8."] = (
        8 << 20
    )
    chunk_cache_bytes: Annotated[
        Annotated[int, Meta(ge=0)],
        "Room in memory for the ids of chunks of long texts, so that a conversation's next turn is encoded only where "
        "it is new; 0: none are kept.",
    ] = 64 << 20
    render_workers: Annotated[_Workers, "Processes that render chat templates."] = 2
    render_timeout: Annotated[
        Annotated[float, Meta(gt=0, le=60)], "Seconds of processor time that rendering a conversation may take."
    ] = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if names_plugin(self.chat_template):
            check_named(self.plugins, chat_template=self.chat_template)
