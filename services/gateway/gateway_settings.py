"""Options of a gateway."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import grpc
from msgspec import Meta

from tokenloom.request.errors import InvalidArgument
from tokenloom.request.reasoning import ReasoningParserName
from tokenloom.services.runtime.host.service_settings import Address, Count, ServiceSettings
from tokenloom.services.runtime.peers import tls
from tokenloom.services.runtime.peers.members import parse_member

from .generation.request_cost import DEFAULT_MAX_VALUES


def _check_members(values: tuple[str, ...]) -> tuple[str, ...]:
    if not values:
        raise ValueError("must hold at least one address")
    try:
        return tuple(map(parse_member, values))
    except InvalidArgument as error:
        raise ValueError(error.message) from None


def _check_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Called only for keys that were given: an empty key must not open the gateway to every client."""
    if not keys:
        raise ValueError("holds no key; leave the option out to serve clients without a key")
    return keys


_Members = Annotated[tuple[str, ...], Meta(extra={"check": _check_members})]
_Keys = Annotated[tuple[str, ...], Meta(extra={"check": _check_keys, "secret": True})]


class GatewaySettings(ServiceSettings, frozen=True, kw_only=True):
    """The public edges: addresses, API keys, certificates, limits and parsers."""

    service: ClassVar[str] = "gateway"

    http_listen: Annotated[Address, "Address of the OpenAI API: host:port or unix:/path."] = "127.0.0.1:8000"
    tokenizers: Annotated[
        _Members,
        "Addresses of tokenizers, separated by commas; dns:///name:port stands for every address that "
        "DNS has for the name.",
    ]
    output_processors: Annotated[_Members, "Addresses of output processors, in the form of --tokenizers."]
    coordinator: Annotated[Address, "Address of the coordinator."]
    served_model_name: Annotated[str, "Model name for clients; by default the name that the tokenizer serves."] = ""
    api_key: Annotated[
        _Keys, "Accepted API keys, separated by commas; without this and --api-key-file no key is needed."
    ] = ()
    api_key_file: Annotated[Path | None, "File with the SHA-256 of an accepted key, in hex, on each line."] = None
    admin_api_key: Annotated[
        _Keys, "Keys for the admin routes; without this and --admin-api-key-file these are not served."
    ] = ()
    admin_api_key_file: Annotated[Path | None, "File of admin keys, as --api-key-file."] = None
    operator_tls_cert: Annotated[
        Path | None, "Certificate that the admin routes present to engines, in a mesh with certificates."
    ] = None
    operator_tls_key: Annotated[Path | None, "Private key of that certificate."] = None
    cors_origins: Annotated[
        tuple[str, ...], "Origins of web pages that may call the API from a browser, separated by commas; *: all."
    ] = ()
    public_tls_cert: Annotated[Path | None, "Certificate chain to present to clients over HTTP and gRPC, PEM."] = None
    public_tls_key: Annotated[Path | None, "Private key of that certificate."] = None
    strict: Annotated[bool, "Refuse unknown request fields instead of ignoring them."] = False
    tool_call_parser: Annotated[
        Literal["auto", "none", "hermes", "llama3_json", "mistral"],
        "How the model writes tool calls; auto: as its chat template indicates.",
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParserName,
        "How the model writes reasoning; auto: as its chat template indicates.",
    ] = "auto"
    max_body_bytes: Annotated[Count, "Largest request, over HTTP and gRPC."] = 8 << 20
    max_live_requests: Annotated[
        Count, "Prompts in work at the same time; further ones are refused with a retryable error."
    ] = 2048
    max_request_values: Annotated[
        Count,
        "Largest n * max_tokens * (1 + logprobs) of a request, for all its prompts; without max_tokens, the default is "
        "lowered to fit.",
    ] = DEFAULT_MAX_VALUES
    most_urgent_priority: Annotated[
        Annotated[int, Meta(ge=-(2**31), lt=2**31)], "Lowest (most urgent) priority value that a client can get."
    ] = 0
    request_timeout: Annotated[
        Annotated[float, Meta(gt=0)],
        "Seconds that a request may take; also the time that a session may wait for its next turn.",
    ] = 600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.public_tls_cert is None) != (self.public_tls_key is None):
            raise ValueError("--public-tls-cert and --public-tls-key must be set together")
        if (self.operator_tls_cert is None) != (self.operator_tls_key is None):
            raise ValueError("--operator-tls-cert and --operator-tls-key must be set together")
        if self.has_admin and self.certificate is not None and self.operator_certificate is None:
            raise ValueError("admin routes of a mesh with certificates need --operator-tls-cert and --operator-tls-key")

    @property
    def is_public(self) -> bool:
        return True

    @property
    def is_open(self) -> bool:
        """API keys keep strangers out, wherever TLS ends."""
        return self.insecure or bool(self.api_key) or self.api_key_file is not None

    def public_credentials(self) -> grpc.ServerCredentials | None:
        if self.public_tls_cert is None or self.public_tls_key is None:
            return None
        return tls.public_credentials(self.public_tls_cert, self.public_tls_key)

    @property
    def has_admin(self) -> bool:
        """Whether the admin routes are served."""
        return bool(self.admin_api_key) or self.admin_api_key_file is not None

    @property
    def operator_certificate(self) -> tls.CertificateFiles | None:
        """What the admin routes present to engines; None: the mesh has no certificates."""
        if self.tls_ca is None or self.operator_tls_cert is None or self.operator_tls_key is None:
            return None
        return tls.CertificateFiles(self.tls_ca, self.operator_tls_cert, self.operator_tls_key)

    @property
    def max_message_bytes(self) -> int:
        """The limit is the same over HTTP and gRPC."""
        return self.max_body_bytes
