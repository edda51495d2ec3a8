"""The options of ``tokenloom serve``: those of the mesh, and of its services except what the supervisor decides."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from tokenloom.process.plugins import check_plugins, find_package, used_by
from tokenloom.services.coordinator.coordinator_settings import CoordinatorSettings
from tokenloom.services.encoder.encoder_settings import EncoderSettings
from tokenloom.services.engine.records.engine_settings import EngineSettings
from tokenloom.services.gateway.settings.gateway_settings import GatewaySettings
from tokenloom.services.output_processor.output_processor_settings import OutputProcessorSettings
from tokenloom.services.relay.relay_settings import RelaySettings
from tokenloom.services.runtime.host.options import Option, OptionError, find_option, flag, options_of, read_file
from tokenloom.services.runtime.host.service_settings import ServiceSettings
from tokenloom.services.tokenizer.tokenizer_settings import TokenizerSettings
from tokenloom.supervisor.decided import COMMON, DEALT, DECIDED
from tokenloom.supervisor.layout import MeshOptions

SETTINGS: Mapping[str, type[ServiceSettings]] = {
    each.service: each
    for each in (
        *(EngineSettings, GatewaySettings, TokenizerSettings, OutputProcessorSettings, CoordinatorSettings),
        *(EncoderSettings, RelaySettings),
    )
}
ALIASES = {"public_tls_cert": ("tls_cert",), "public_tls_key": ("tls_key",)}


@dataclass(frozen=True)
class Offer:
    """An option of ``serve`` and the services that get it; none: the supervisor does."""

    option: Option
    services: tuple[str, ...] = ()


def service_arguments(
    chosen: Mapping[str, Any],
) -> tuple[dict[str, tuple[str, ...]], dict[str, dict[str, str]]]:
    """Return the flags and the environment of each service from chosen options by name."""
    flags: dict[str, tuple[str, ...]] = {}
    environment: dict[str, dict[str, str]] = {}
    for name, value in chosen.items():
        dealt: Mapping[str, Any] = _dealt(value) if name in DEALT else dict.fromkeys(OFFERS[name].services, value)
        for service, own in dealt.items():
            if OFFERS[name].option.extra.get("secret"):  # every user of the machine can read flags
                environment.setdefault(service, {})[OFFERS[name].option.variable] = own
            else:
                flags[service] = (*flags.get(service, ()), setting_flag(name, own))
    return flags, environment


def _dealt(value: Any) -> dict[str, list[str]]:
    """Return for each service the packages whose plugins it uses, without importing them. Exits with a usage error for
    a package that none uses, or that is not installed."""
    names: tuple[str, ...] = OFFERS["plugins"].option.parse(value)
    try:
        for name in names:
            if not any(find_package(name).is_used_by(service) for service in (*SETTINGS, "cli")):
                raise ValueError(f"no part of a mesh uses {find_package(name)}")
        dealt = {service: list(check_plugins(used_by(names, service), service)) for service in SETTINGS}
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--plugins") from None
    return {service: own for service, own in dealt.items() if own}


def setting_flag(name: str, value: object) -> str:
    """``("max_model_len", 512)`` → ``--max-model-len=512``; False → ``--no-…``; a list is joined by commas."""
    if isinstance(value, bool):
        return flag(name if value else f"no_{name}")
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"{flag(name)}={text}"


def _offers() -> Iterator[Offer]:
    yield from map(Offer, options_of(MeshOptions).values())
    common = options_of(ServiceSettings)
    for service, settings in SETTINGS.items():
        for name, option in options_of(settings).items():
            if name not in DECIDED and name not in common:
                yield Offer(option, (service,))
    yield from (Offer(common[name], tuple(SETTINGS)) for name in (*COMMON, *DEALT))


def _merged(offers: Iterable[Offer]) -> dict[str, Offer]:
    """Options of several services with one name become one; an alias that is the name of another option is dropped."""
    merged: dict[str, Offer] = {}
    for offer in offers:
        known = merged.get(offer.option.name, Offer(offer.option))
        merged[offer.option.name] = Offer(known.option, (*known.services, *offer.services))
    for name, offer in merged.items():
        aliases = tuple(alias for alias in (*offer.option.names[1:], *ALIASES.get(name, ())) if alias not in merged)
        merged[name] = Offer(replace(offer.option, extra={**offer.option.extra, "aliases": aliases}), offer.services)
    return merged


OFFERS: Mapping[str, Offer] = _merged(_offers())


_OPTIONS = {name: offer.option for name, offer in OFFERS.items()}
_GROUPS = {part for option in _OPTIONS.values() for part in option.path[:-1]}
_MORE = ("model", "served_model_name")
"""Options of ``serve`` that are no options of a service."""


def as_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """Use the options in the file as the command's defaults. Exits with a usage error that names what is wrong."""
    if path is not None and not context.resilient_parsing:
        chosen = {name: value for service, name, value in _entries(path) if service is None}
        if isinstance(name := chosen.get("served_model_name"), str):
            chosen["served_model_name"] = [name]
        context.default_map = {**(context.default_map or {}), **chosen}
    return path


def service_flags(path: Path | None) -> dict[str, tuple[str, ...]]:
    """Return the flags for each service from the file's tables."""
    flags: dict[str, tuple[str, ...]] = {}
    for service, name, value in _entries(path) if path is not None else ():
        if service is not None:
            flags[service] = (*flags.get(service, ()), setting_flag(name, value))
    return flags


def _entries(path: Path) -> Iterator[tuple[str | None, str, Any]]:
    """Yield each option as its service (None: an option of ``serve``), its name and its value."""
    try:
        for key, value in read_file(path).items():
            if key in SETTINGS:
                yield from _in_service(key, value)
            elif key in _GROUPS and isinstance(value, Mapping):
                yield from ((None, find_option(_OPTIONS, name).name, item) for name, item in value.items())
            else:
                yield None, key if key in _MORE else find_option(_OPTIONS, key).name, value
    except OptionError as error:
        raise _wrong(str(error)) from None
    except ValueError as error:
        raise _wrong(str(error).removeprefix("--config: ")) from None


def _in_service(service: str, table: object) -> Iterator[tuple[str | None, str, Any]]:
    if not isinstance(table, Mapping):
        raise _wrong(f"{service} must be a table of options")
    options = options_of(SETTINGS[service])
    for name, value in table.items():
        try:
            option = find_option(options, name)
        except OptionError as error:
            raise _wrong(f"[{service}] {error}") from None
        if option.name in DECIDED:
            raise _wrong(f"[{service}] {name} cannot be set: `tokenloom serve` sets it for each part")
        offered = option.name in OFFERS and service in OFFERS[option.name].services
        yield None if offered else service, option.name, value


def _wrong(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint="--config")
