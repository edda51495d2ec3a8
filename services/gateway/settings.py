"""What a gateway can be told."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from ..runtime.settings import CommaList, ServiceSettings, check_address


class GatewaySettings(ServiceSettings):
    """Flags of ``python -m tokenloom.services.gateway``."""

    service: ClassVar[str] = "gateway"

    http_listen: str = Field("127.0.0.1:8000", description="Where the OpenAI API is served: host:port or unix:/path.")
    tokenizers: CommaList = Field(description="Addresses of tokenizer replicas, comma-separated.", min_length=1)
    output_processors: CommaList = Field(description="Addresses of output processors, comma-separated.", min_length=1)
    coordinator: str = Field(description="Address of the coordinator.")
    served_model_name: str = Field("", description="Model name for clients. (default: what the tokenizer serves)")
    api_key: CommaList = Field(
        (), validate_default=False, description="Accepted API keys, comma-separated; unset, no file: none is needed."
    )
    api_key_file: Path | None = Field(None, description="File of accepted keys: one hex SHA-256 of a key a line.")
    strict: bool = Field(False, description="Refuse request fields that are not known, instead of ignoring them.")
    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1, description="Largest request, over HTTP and gRPC.")
    max_live_requests: int = Field(
        2048, ge=1, description="Prompts in work at a time; more are refused for the moment."
    )
    request_timeout: float = Field(600.0, gt=0, description="Seconds that a request may take, at most.")

    @property
    def max_message_bytes(self) -> int:
        """Whichever edge a request comes through, it may be this large."""
        return self.max_body_bytes

    @field_validator("api_key")
    @classmethod
    def _check_keys(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        """Not called for the default: whoever gives an empty key meant to close the door."""
        if not keys:
            raise ValueError("no key in it; leave it out to let everybody in")
        return keys

    @field_validator("http_listen", "coordinator")
    @classmethod
    def _check_addresses(cls, value: str) -> str:
        return check_address(value)

    @field_validator("tokenizers", "output_processors")
    @classmethod
    def _check_address_lists(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(check_address, values))
