"""``tokenloom serve --config FILE``: options from a file, which flags and environment variables override.

At the top stand options of ``serve``. They may also stand in a table named after their group (``[scheduler]``) or their
service (``[gateway]``). The table of a service may also hold options that each service has for itself, such as
``metrics_listen``.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from tokenloom.services.runtime.host.options import OptionError, find_option, options_of
from tokenloom.services.runtime.host.settings_file import read_file
from tokenloom.supervisor.decided import DECIDED

from .serve_options import OFFERS, SETTINGS, setting_flag

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
