"""Settings of a service: flags > environment (``TOKENLOOM_…``) > ``--config`` file > default, read once at the edge."""

import argparse
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from tokenloom.process.plugins import check_plugins
from tokenloom.request.errors import InvalidArgument
from tokenloom.request.limits import MAX_MESSAGE_BYTES

from .. import addresses
from ..peers.certificate_files import CertificateFiles
from .foreign_flags import answer_unknown
from .limits import GrpcLimits
from .options import (
    Option,
    OptionError,
    build,
    exposed,
    file_flag,
    find_option,
    flag,
    flattened,
    options_of,
    read_file,
    variable,
)


def check_address(value: str) -> str:
    """Return the address in its one spelling, or raise ``ValueError``."""
    try:
        return str(addresses.parse(value))
    except InvalidArgument as error:
        raise ValueError(error.message) from None


def _check_optional_address(value: str) -> str:
    return check_address(value) if value else value


def _check_endpoint(value: str) -> str:
    if value and not value.startswith(("http://", "https://")):
        raise ValueError("must begin with http:// or https://")
    return value


Address = Annotated[str, Meta(extra={"check": check_address})]
"""``host:port`` or ``unix:/path``."""
OptionalAddress = Annotated[str, Meta(extra={"check": _check_optional_address})]
"""The same, or empty."""
Count = Annotated[int, Meta(ge=1)]
Descriptor = Annotated[int, Meta(ge=3)]


def check_members(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return addresses, or names with several, in their one spelling, or raise ``ValueError``."""
    try:
        return tuple(map(addresses.parse_member, values))
    except InvalidArgument as error:
        raise ValueError(error.message) from None


class ServiceSettings(Struct, frozen=True, kw_only=True):
    """The options of every service. A service sets ``service`` and adds fields with a text."""

    service: ClassVar[str] = "service"
    """Name of the service's module."""

    config: Annotated[Path | None, "File with settings: .toml, .json or .yaml."] = None
    instance_id: Annotated[str, "Name of this instance; by default the service's name followed by -0."] = ""
    listen: Annotated[Address, "Address for gRPC: host:port or unix:/path."] = "127.0.0.1:0"
    metrics_listen: Annotated[OptionalAddress, "Address (host:port) of Prometheus /metrics; empty: off."] = (
        "127.0.0.1:0"
    )
    state_file: Annotated[Path | None, "JSON file to write once the service listens: name, pid and addresses."] = None
    log_level: Annotated[Literal["debug", "info", "warning", "error"], "Lowest level of log lines to write."] = "info"
    log_format: Annotated[Literal["human", "json"], "Log lines for people or, as JSON, for machines."] = "human"
    otlp_endpoint: Annotated[
        Annotated[str, Meta(extra={"check": _check_endpoint})],
        "OpenTelemetry collector to send traces to over gRPC, http(s)://host:port; empty: no traces.",
    ] = ""
    measure_turns: Annotated[
        bool, "Measure the longest turns of the event loop, which wakes it every millisecond; for benchmarks."
    ] = False
    bill: Annotated[
        bool,
        "Share the CPU time of the processes out to tenants and requests, by the work done for each: in metrics, "
        "timelines and usage.",
    ] = False
    drain_timeout: Annotated[
        Annotated[float, Meta(ge=0, le=86400)], "Seconds that live requests have to finish after a stop signal."
    ] = 30.0
    health_listen: Annotated[
        OptionalAddress, "Address (host:port) that answers only health probes, in plain text; empty: none."
    ] = ""
    tls_ca: Annotated[
        Path | None, "Certificate of the mesh's authority, PEM; set --tls-ca, --tls-cert and --tls-key together."
    ] = None
    tls_cert: Annotated[Path | None, "Certificate of this service; if it is set, peers need theirs to connect."] = None
    tls_key: Annotated[Path | None, "Private key of that certificate."] = None
    plugins: Annotated[
        tuple[str, ...],
        "Installed packages whose plugins may be loaded, separated by commas; a service refuses those that have "
        "nothing for it. By default no code of others runs.",
    ] = ()
    insecure: Annotated[bool, "Allow listening without encryption on addresses that other machines can reach."] = False

    def __post_init__(self) -> None:
        if not self.instance_id:
            force_setattr(self, "instance_id", f"{self.service}-0")
        if len({path is None for path in (self.tls_ca, self.tls_cert, self.tls_key)}) > 1:
            raise ValueError("--tls-ca, --tls-cert and --tls-key must be set together")
        if self.plugins:
            try:
                force_setattr(self, "plugins", check_plugins(self.plugins, self.service))
            except ValueError as error:
                raise ValueError(f"--plugins: {error}") from None

    @property
    def max_message_bytes(self) -> int:
        """Largest gRPC message that is received."""
        return MAX_MESSAGE_BYTES

    @property
    def grpc_limits(self) -> GrpcLimits:
        """The limits of the gRPC server."""
        return GrpcLimits()

    @property
    def is_public(self) -> bool:
        """Whether clients from outside the mesh, which have none of its certificates, call this service."""
        return False

    @property
    def held_listener(self) -> int | None:
        """Descriptor of an inherited socket that listens on ``listen``; None: there is none."""
        return None

    @property
    def is_open(self) -> bool:
        """Whether other machines may reach a public service in plain text."""
        return self.insecure

    @property
    def public_certificate(self) -> CertificateFiles | None:
        """What a public service presents to its clients; None: it serves plain text."""
        return None

    @property
    def certificate(self) -> CertificateFiles | None:
        """This service's certificate; None: the mesh has none."""
        if self.tls_ca is None or self.tls_cert is None or self.tls_key is None:
            return None
        return CertificateFiles(self.tls_ca, self.tls_cert, self.tls_key)

    def __repr__(self) -> str:
        """Show every option, with dots for the secret ones: settings may end up in a log."""
        secret = {option.path[0] for option in options_of(type(self)).values() if option.extra.get("secret")}
        shown = ((name, getattr(self, name)) for name in self.__struct_fields__)
        fields = (f"{name}=…" if name in secret and value else f"{name}={value!r}" for name, value in shown)
        return f"{type(self).__name__}({', '.join(fields)})"

    def for_machine(self, given: Collection[str]) -> Self:
        """Return the settings with the defaults that depend on the machine, of the options that are not ``given``."""
        return self

    @classmethod
    def exposed(cls, argv: Sequence[str] | None = None) -> list[str]:
        """Return a warning for each secret among the flags (those of the process if ``argv`` is None)."""
        options = options_of(cls)
        given = {argument.partition("=")[0] for argument in (sys.argv[1:] if argv is None else argv)}
        return [
            exposed(flag(name), [option.variable], file_flag(name, options))
            for name, option in options.items()
            if option.extra.get("secret") and given & set(map(flag, option.names))
        ]

    @classmethod
    def of(cls, **values: object) -> Self:
        """Make settings from options by flat name. Raises ``ValueError`` as :func:`build`."""
        return build(cls, values).for_machine(values)

    @classmethod
    def load(cls, argv: Sequence[str] | None = None) -> Self:
        """Read flags (those of the process if ``argv`` is None), environment and file. A wrong value prints one line
        and exits with status 2; ``--help`` prints every flag and exits with status 0."""
        try:
            return cls.read(sys.argv[1:] if argv is None else argv, os.environ)
        except ValueError as error:
            reason = " ".join(str(error).split())  # one line, whatever the words of the command hold
            sys.stderr.write(f"python -m tokenloom.services.{cls.service}: error: {reason}\n")
            raise SystemExit(2) from None

    @classmethod
    def read(cls, argv: Sequence[str], environment: Mapping[str, str]) -> Self:
        """Do the same with the given flags and variables. Raises ``ValueError`` for a wrong value."""
        options = options_of(cls)
        parser = _parser(f"python -m tokenloom.services.{cls.service}", options)
        values = {**_in_environment(options, environment), **_flags(parser, options, argv)}
        try:
            if values.get("config"):
                values = {**_in_file(Path(str(values["config"])), options), **values}
            return build(cls, values).for_machine(values)
        except OptionError as error:
            raise ValueError(f"{flag(error.name)}: {error.reason}") from None


class PublicSettings(ServiceSettings, frozen=True, kw_only=True):
    """The options of every service that faces clients."""

    public_tls_cert: Annotated[Path | None, "Certificate chain to present to clients over HTTP and gRPC, PEM."] = None
    public_tls_key: Annotated[Path | None, "Private key of that certificate."] = None
    max_body_bytes: Annotated[Count, "Largest request, over HTTP and gRPC."] = 8 << 20
    max_body_bytes_in_flight: Annotated[
        Count,
        "Bytes of HTTP request bodies held at the same time until they are decoded, and of gRPC messages until they "
        "are answered, each by themselves; further ones are refused with a retryable error.",
    ] = 64 << 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.public_tls_cert is None) != (self.public_tls_key is None):
            raise ValueError("--public-tls-cert and --public-tls-key must be set together")
        if self.max_body_bytes_in_flight < self.max_body_bytes:
            raise ValueError("--max-body-bytes-in-flight must be at least --max-body-bytes")

    @property
    def public_certificate(self) -> CertificateFiles | None:
        if self.public_tls_cert is None or self.public_tls_key is None:
            return None
        return CertificateFiles(None, self.public_tls_cert, self.public_tls_key, "public_tls_cert")

    @property
    def max_message_bytes(self) -> int:
        """The limit is the same over HTTP and gRPC."""
        return self.max_body_bytes


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _parser(prog: str, options: Mapping[str, Option]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=prog, usage="%(prog)s [--option VALUE …]", allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(o.group for o in options.values())}
    for option in options.values():
        default = f" [default: {option.default_text}]" if option.default_text else ""
        arguments: dict[str, Any] = {"dest": option.name, "help": (option.text + default).replace("%", "%%")}
        if option.type is bool:
            arguments["action"] = argparse.BooleanOptionalAction
        elif option.type is tuple:
            arguments |= {"action": "append", "metavar": "LIST"}
        else:
            arguments["metavar"] = "|".join(option.choices) or option.type.__name__.upper()
        groups[option.group].add_argument(*map(flag, option.names), **arguments)
    return parser


def _flags(parser: argparse.ArgumentParser, options: Mapping[str, Option], argv: Sequence[str]) -> dict[str, object]:
    known, unknown = parser.parse_known_args(argv)
    for argument in unknown:
        parser.error(answer_unknown(argument, [flag(each) for each in options]))
    return vars(known)


def _in_environment(options: Mapping[str, Option], environment: Mapping[str, str]) -> dict[str, object]:
    variables = {variable(name): option.name for option in options.values() for name in reversed(option.names)}
    return {variables[key]: environment[key] for key in variables if key in environment}


def _in_file(path: Path, options: Mapping[str, Option]) -> dict[str, object]:
    """Raises ``ValueError`` for a file that cannot be read, `OptionError` for an unknown name in it."""
    tables = {part for option in options.values() for part in option.path[:-1]}
    values = flattened(read_file(path), tables)
    return {find_option(options, name).name: value for name, value in values.items()}
