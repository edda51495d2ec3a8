"""``tokenloom config``: prints what ``tokenloom serve`` would run with, and where each value comes from."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tokenloom.model_files.model_path import DEMO_MODEL_NAME
from tokenloom.services.runtime.host.options import Option, options_of
from tokenloom.supervisor.layout import MeshOptions

from ..options import offers
from ..tables import print_tables
from .serve_options import OFFERS, as_defaults, service_flags

_HIDDEN = "…"


@dataclass(frozen=True)
class Setting:
    """One value, as ``--json`` prints it."""

    option: str
    value: str
    source: str
    """``flag``, ``environment NAME``, ``file PATH`` or ``default``."""


@offers((offer.option for offer in OFFERS.values() if offer.services), variables=True)
@offers(options_of(MeshOptions).values())
def config(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Checkpoint directory, GGUF file or hub id.")] = DEMO_MODEL_NAME,
    more_names: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    served_model_name: Annotated[list[str] | None, typer.Option(help="Names that clients use, as for serve.")] = None,
    config: Annotated[
        Path | None, typer.Option(callback=as_defaults, is_eager=True, help="File with these options, as for serve.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print an array of objects instead of a table.")] = False,
    changed: Annotated[bool, typer.Option("--changed", help="Leave out the defaults.")] = False,
    **chosen: Any,
) -> None:
    """Print the configuration with which `tokenloom serve` would run for the same arguments, and nothing else."""
    from .prechecks import warn_of_variables  # here, because it takes what checks a model, which the help does not need

    warn_of_variables()
    rows = [
        Setting("model", model, _source(context, "model", config)),
        Setting(
            "served_model_name",
            ",".join([*(served_model_name or ()), *(more_names or ())]),
            _source(context, "served_model_name", config),
        ),
        *(_setting(context, offer.option, chosen.get(name), config) for name, offer in OFFERS.items()),
        *_of_services(config),
    ]
    rows = [row for row in rows if not changed or row.source != "default"]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print_tables(_table(rows))


def _setting(context: typer.Context, option: Option, value: object, file: Path | None) -> Setting:
    if value is None:
        on_gpu = f" ({option.extra['on_gpu']} on a GPU)" if "on_gpu" in option.extra else ""
        return Setting(option.name, option.default_text + on_gpu, "default")
    shown = _HIDDEN if option.extra.get("secret") else str(value).lower() if isinstance(value, bool) else str(value)
    return Setting(option.name, shown, _source(context, option.name, file, option.variable))


def _source(context: typer.Context, name: str, file: Path | None, variable: str = "") -> str:
    source = context.get_parameter_source(name)
    match source.name if source is not None else "DEFAULT":
        case "COMMANDLINE":
            return "flag"
        case "ENVIRONMENT":
            return f"environment {variable}"
        case "DEFAULT_MAP":
            return f"file {file}"
    return "default"


def _of_services(file: Path | None) -> Iterator[Setting]:
    """Yield what the file's tables set for one service only."""
    for service, flags in service_flags(file).items():
        for each in flags:
            name, _, value = each.removeprefix("--").partition("=")
            yield Setting(f"{service}.{name.replace('-', '_')}", value, f"file {file}")


def _table(rows: list[Setting]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("OPTION", "VALUE", "FROM"):
        table.add_column(title, no_wrap=True)
    for row in rows:
        table.add_row(row.option, row.value or "-", row.source)
    return table
