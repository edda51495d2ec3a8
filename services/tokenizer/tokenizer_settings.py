"""Settings of a tokenizer."""

from typing import ClassVar

from pydantic import Field

from tokenloom.checkpoint import DEMO_MODEL_NAME
from tokenloom.services.runtime.host.service_settings import ServiceSettings


class TokenizerSettings(ServiceSettings):
    """Which model's tokenizer, and how much of the machine it may take."""

    service: ClassVar[str] = "tokenizer"

    model: str = Field(DEMO_MODEL_NAME, description="Checkpoint directory or hub id; the tokenizer is read from it.")
    served_model_name: str = Field("", description="Name that clients use; empty: the directory's last part.")
    block_size: int = Field(16, ge=1, le=1024, description="Tokens in a KV block, as the engines have it.")
    threads: int = Field(2, ge=1, le=64, description="Texts encoded at the same time.")
    max_text_bytes: int = Field(8 << 20, ge=1, le=1 << 26, description="Longest text to encode, UTF-8 bytes.")
    render_workers: int = Field(2, ge=1, le=64, description="Processes that render chat templates.")
    render_timeout: float = Field(2.0, gt=0, le=60, description="Seconds that rendering a conversation may take.")
