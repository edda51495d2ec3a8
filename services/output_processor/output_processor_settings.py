"""Settings of an output processor."""

from typing import ClassVar

from pydantic import Field, field_validator

from tokenloom.checkpoint import DEMO_MODEL_NAME
from tokenloom.services.runtime.host.service_settings import ServiceSettings, check_address


class OutputProcessorSettings(ServiceSettings):
    """Which model's tokens, and who knows the engines."""

    service: ClassVar[str] = "output_processor"

    model: str = Field(DEMO_MODEL_NAME, description="Checkpoint directory or hub id; the tokenizer is read from it.")
    served_model_name: str = Field("", description="Name that clients use; empty: the directory's last part.")
    coordinator: str = Field(description="Where the coordinator listens: host:port or unix:/path.")
    max_requests: int = Field(4096, ge=1, le=1 << 20, description="Live requests; more are refused, to be tried again.")
    engine_hang_timeout: float = Field(
        60.0, gt=0, le=3600, description="Seconds that an engine's step may stand still with work to do."
    )

    @field_validator("coordinator")
    @classmethod
    def _check_coordinator(cls, value: str) -> str:
        return check_address(value)
