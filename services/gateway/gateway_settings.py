"""What a gateway can be told."""

from pathlib import Path
from typing import ClassVar, Literal, Self

import grpc
from pydantic import Field, field_validator, model_validator

from tokenloom.request.errors import InvalidArgument
from tokenloom.services.runtime.host.service_settings import CommaList, ServiceSettings, check_address
from tokenloom.services.runtime.peers import tls
from tokenloom.services.runtime.peers.members import parse_member


class GatewaySettings(ServiceSettings):
    """Flags of ``python -m tokenloom.services.gateway``."""

    service: ClassVar[str] = "gateway"

    http_listen: str = Field("127.0.0.1:8000", description="Where the OpenAI API is served: host:port or unix:/path.")
    tokenizers: CommaList = Field(
        description="Addresses of tokenizers, comma-separated; dns:///name:port: all that DNS has for the name.",
        min_length=1,
    )
    output_processors: CommaList = Field(description="Addresses of output processors, likewise.", min_length=1)
    coordinator: str = Field(description="Address of the coordinator.")
    served_model_name: str = Field("", description="Model name for clients. (default: what the tokenizer serves)")
    api_key: CommaList = Field(
        (), validate_default=False, description="Accepted API keys, comma-separated; unset, no file: none is needed."
    )
    api_key_file: Path | None = Field(None, description="File of accepted keys: one hex SHA-256 of a key a line.")
    admin_api_key: CommaList = Field(
        (), validate_default=False, description="Keys for the admin routes; unset, no file: there are no such routes."
    )
    admin_api_key_file: Path | None = Field(None, description="File of admin keys, as --api-key-file.")
    operator_tls_cert: Path | None = Field(
        None, description="Operator's certificate, which the admin routes show engines in a mesh with certificates."
    )
    operator_tls_key: Path | None = Field(None, description="Its private key.")
    cors_origins: CommaList = Field(
        (), description="Origins of web pages that may call the API from a browser, comma-separated; *: all."
    )
    public_tls_cert: Path | None = Field(
        None, description="Certificate chain shown to clients, over HTTP and gRPC, PEM."
    )
    public_tls_key: Path | None = Field(None, description="Its private key.")
    strict: bool = Field(False, description="Refuse request fields that are not known, instead of ignoring them.")
    tool_call_parser: Literal["auto", "none", "hermes", "llama3_json", "mistral"] = Field(
        "auto", description="How the model writes tool calls; auto: as its chat template does."
    )
    reasoning_parser: Literal["auto", "none", "deepseek_r1", "qwen3"] = Field(
        "auto", description="How the model writes reasoning; auto: as its chat template does."
    )
    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1, description="Largest request, over HTTP and gRPC.")
    max_live_requests: int = Field(
        2048, ge=1, description="Prompts in work at a time; more are refused for the moment."
    )
    most_urgent_priority: int = Field(
        0, ge=-(2**31), lt=2**31, description="Lowest (most urgent) priority that a client gets, whatever it asks for."
    )
    request_timeout: float = Field(
        600.0,
        gt=0,
        description="Seconds that a request may take, at most; a session may wait as long for its next turn.",
    )

    @property
    def is_public(self) -> bool:
        return True

    @property
    def is_open(self) -> bool:
        """A key keeps strangers out, wherever TLS ends."""
        return self.insecure or bool(self.api_key) or self.api_key_file is not None

    def public_credentials(self) -> grpc.ServerCredentials | None:
        if self.public_tls_cert is None or self.public_tls_key is None:
            return None
        return tls.public_credentials(self.public_tls_cert, self.public_tls_key)

    @model_validator(mode="after")
    def _check_public_certificate(self) -> Self:
        if (self.public_tls_cert is None) != (self.public_tls_key is None):
            raise ValueError("public-tls-cert and public-tls-key are given together or not at all")
        return self

    @property
    def has_admin(self) -> bool:
        """Whether there are admin routes."""
        return bool(self.admin_api_key) or self.admin_api_key_file is not None

    @property
    def operator_certificate(self) -> tls.CertificateFiles | None:
        """What engines are shown by the admin routes; None: the mesh has no certificates."""
        if self.tls_ca is None or self.operator_tls_cert is None or self.operator_tls_key is None:
            return None
        return tls.CertificateFiles(self.tls_ca, self.operator_tls_cert, self.operator_tls_key)

    @model_validator(mode="after")
    def _check_operator_certificate(self) -> Self:
        if (self.operator_tls_cert is None) != (self.operator_tls_key is None):
            raise ValueError("operator-tls-cert and operator-tls-key are given together or not at all")
        if self.has_admin and self.certificate is not None and self.operator_certificate is None:
            raise ValueError("admin routes of a mesh with certificates need operator-tls-cert and operator-tls-key")
        return self

    @property
    def max_message_bytes(self) -> int:
        """Whichever edge a request comes through, it may be this large."""
        return self.max_body_bytes

    @field_validator("api_key", "admin_api_key")
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
        try:
            return tuple(map(parse_member, values))
        except InvalidArgument as error:
            raise ValueError(error.message) from None
