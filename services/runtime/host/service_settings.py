"""Settings of a service: flags > environment (``TOKENLOOM_…``) > ``--config`` file > default, read once at the edge."""

import json
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import grpc
from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from tokenloom.request.errors import InvalidArgument

from ..peers import addresses
from ..peers.channels import MAX_MESSAGE_BYTES
from ..peers.tls import CertificateFiles


def _split(value: object) -> object:
    if isinstance(value, str):
        value = [value]
    if isinstance(value, (list, tuple)):
        return tuple(part.strip() for item in value for part in str(item).split(",") if part.strip())
    return value


CommaList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""``a,b`` in a flag or variable (a flag may also be repeated), a list in a file."""


class ServiceSettings(BaseSettings):
    """What every service can be told. A service sets ``service`` and adds fields, each described for ``--help``."""

    model_config = SettingsConfigDict(
        env_prefix="TOKENLOOM_",
        extra="forbid",
        frozen=True,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_exit_on_error=False,
        protected_namespaces=(),
    )
    service: ClassVar[str] = "service"
    """Name of the service's module."""

    config: Path | None = Field(None, description="File with settings: .toml, .json or .yaml.")
    instance_id: str = Field("", description="Name of this instance; empty: the service's name and -0.")
    listen: str = Field("127.0.0.1:0", description="Where gRPC is served: host:port or unix:/path.")
    metrics_listen: str = Field("127.0.0.1:0", description="host:port of Prometheus /metrics; empty: off.")
    state_file: Path | None = Field(None, description="JSON file to write once bound: name, pid and addresses.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe lines to log.")
    log_format: Literal["human", "json"] = Field("human", description="Lines for people or for machines.")
    otlp_endpoint: str = Field(
        "", description="OpenTelemetry collector that gets traces, over gRPC: http(s)://host:port; empty: no traces."
    )
    drain_timeout: float = Field(30.0, ge=0, le=86400, description="Seconds that work may go on after a stop signal.")
    health_listen: str = Field("", description="host:port that only answers health probes, in plain text; empty: none.")
    tls_ca: Path | None = Field(None, description="Certificate of the mesh's authority, PEM; the three go together.")
    tls_cert: Path | None = Field(None, description="This part's certificate: with it, other parts need theirs.")
    tls_key: Path | None = Field(None, description="The certificate's private key.")
    insecure: bool = Field(False, description="Allow listening, unencrypted, where other machines can connect.")

    @property
    def max_message_bytes(self) -> int:
        """Largest gRPC message that is received."""
        return MAX_MESSAGE_BYTES

    @property
    def is_public(self) -> bool:
        """Whether clients from outside the mesh, which have no certificate of it, call this part."""
        return False

    @property
    def is_open(self) -> bool:
        """Of a public part: whether it may be reached in plain text from other machines."""
        return self.insecure

    def public_credentials(self) -> grpc.ServerCredentials | None:
        """Of a public part: what it shows its clients; None: it talks in plain text."""
        return None

    @property
    def certificate(self) -> CertificateFiles | None:
        """This part's certificate; None: the mesh has none."""
        if self.tls_ca is None or self.tls_cert is None or self.tls_key is None:
            return None
        return CertificateFiles(self.tls_ca, self.tls_cert, self.tls_key)

    @classmethod
    def load(cls, argv: Sequence[str] | None = None) -> Self:
        """Reads flags (of the process when ``argv`` is None), environment and file. A bad value prints one line and
        exits with status 2; ``--help`` prints every flag and exits with 0."""
        prog = f"python -m tokenloom.services.{cls.service}"
        arguments = list(sys.argv[1:] if argv is None else argv)
        try:
            return cls(_cli_parse_args=arguments, _cli_prog_name=prog)  # type: ignore[call-arg]
        except ValidationError as error:
            reason = _first_line(error)
        except (SettingsError, OSError, ValueError) as error:
            reason = str(error).removeprefix("error parsing CLI: ")
        sys.stderr.write(f"{prog}: error: {reason}\n")
        raise SystemExit(2)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, _FileSource(settings_cls)  # flags come before all of them

    @model_validator(mode="before")
    @classmethod
    def _default_name(cls, values: dict[str, Any]) -> dict[str, Any]:
        return values if values.get("instance_id") else {**values, "instance_id": f"{cls.service}-0"}

    @model_validator(mode="after")
    def _check_certificate(self) -> Self:
        given = [path is not None for path in (self.tls_ca, self.tls_cert, self.tls_key)]
        if any(given) and not all(given):
            raise ValueError("tls-ca, tls-cert and tls-key are given together or not at all")
        return self

    @field_validator("otlp_endpoint")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("must begin with http:// or https://")
        return value

    @field_validator("listen", "metrics_listen", "health_listen")
    @classmethod
    def _check_address(cls, value: str, info: ValidationInfo) -> str:
        if not value and info.field_name != "listen":
            return value
        return check_address(value)


def check_address(value: str) -> str:
    """For field validators: the address in its one spelling, or ``ValueError``."""
    try:
        return str(addresses.parse(value))
    except InvalidArgument as error:
        raise ValueError(error.message) from None


class _FileSource(PydanticBaseSettingsSource):
    """The file that a source above names as ``config``."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        raise NotImplementedError("the file is read whole")

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config")
        return read_file(Path(path)) if path else {}


def read_file(path: Path) -> dict[str, Any]:
    """Settings of a .toml, .json or .yaml file, names with underscores. Raises ``ValueError``."""
    parse = _PARSERS.get(path.suffix)
    if parse is None:
        raise ValueError(f"--config: expected a .toml, .json or .yaml file, not {path.name!r}")
    try:
        values = parse(path.read_text())
    except OSError as error:
        raise ValueError(f"--config: cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--config: {path.name} cannot be parsed: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"--config: {path.name} holds no table of settings")
    return {str(key).replace("-", "_"): value for key, value in values.items()}


def _read_yaml(text: str) -> object:
    try:
        import yaml
    except ImportError:
        raise ValueError("it needs PyYAML; use .toml or .json") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


_PARSERS: dict[str, Callable[[str], object]] = {
    ".toml": tomllib.loads,
    ".json": json.loads,
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
}


def _first_line(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0]).replace("_", "-") if first["loc"] else "settings"
    if first["type"] == "extra_forbidden":
        return f"--{name}: no such setting"
    if first["type"] == "missing":
        return f"--{name}: is required"
    return f"--{name}: {first['msg'].removeprefix('Value error, ')} (got {first['input']!r:.80})"
