"""``tokenloom serve --config FILE``: options from a file, which flags and environment override.

At the top are options of ``serve``; a table named after a service (``[engine]``, ``[gateway]`` …) holds settings of
that service for which ``serve`` has no option.
"""

import difflib
import importlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import typer

from tokenloom.services.runtime.host.service_settings import read_file

from .flags import setting_flags

SERVICES = ("coordinator", "engine", "gateway", "output_processor", "tokenizer")
_SUPERVISORS = frozenset(
    {
        "config",
        "instance_id",
        "listen",
        "http_listen",
        "state_file",
        "coordinator",
        "tokenizers",
        "output_processors",
        "role",
        "kv_listen",
        "engines_on_host",
        "num_threads",
    }
)
"""Settings that say where parts find each other: the supervisor's to decide."""


def as_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """The option's callback: what the file holds becomes defaults. Exits with a usage error naming what is wrong."""
    if path is not None and not context.resilient_parsing:
        options = {parameter.name for parameter in context.command.params if parameter.name}
        values = _read(path)
        for name, value in values.items():
            if name in SERVICES:
                _check_table(name, value, options)
            elif name not in options or name == "config":
                raise _unknown(name, {*options, *SERVICES})
        chosen = {name: value for name, value in values.items() if name not in SERVICES}
        context.default_map = {**(context.default_map or {}), **chosen}
    return path


def service_flags(path: Path | None) -> dict[str, tuple[str, ...]]:
    """What the file's tables tell each service."""
    values = {} if path is None else _read(path)
    return {name: setting_flags(values.get(name, {})) for name in SERVICES}


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_file(path)
    except ValueError as error:
        raise typer.BadParameter(str(error).removeprefix("--config: "), param_hint="--config") from None


def _check_table(service: str, table: object, options: Collection[str]) -> None:
    if not isinstance(table, Mapping):
        raise typer.BadParameter(f"{service} must be a table of settings", param_hint="--config")
    module = importlib.import_module(f"tokenloom.services.{service}.{service}_settings")
    settings = getattr(module, "".join(word.title() for word in service.split("_")) + "Settings").model_fields
    for key in table:
        name = key.replace("-", "_")
        if name in options:
            raise typer.BadParameter(
                f"[{service}] {key} is an option of serve: it belongs at the top of the file", param_hint="--config"
            )
        if name in _SUPERVISORS:
            raise typer.BadParameter(f"[{service}] {key} is not yours to set in a local mesh", param_hint="--config")
        if name not in settings:
            raise _unknown(key, settings, f"[{service}] ")


def _unknown(name: str, known: Collection[str], where: str = "") -> typer.BadParameter:
    near = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return typer.BadParameter(f"{where}{name}: no such setting{hint}", param_hint="--config")
