"""``tokenloom serve``: keeps a local mesh up; ``tokenloom relay`` stands before gateways."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenloom.model_files.model_path import DEMO_MODEL_NAME, expanded
from tokenloom.process.uncollected_imports import uncollected_imports
from tokenloom.services.relay.relay_settings import RelaySettings
from tokenloom.services.runtime.host.options import options_of
from tokenloom.supervisor.layout import MeshOptions

from ..command import WRITTEN
from ..options import given, offers
from .serve_options import ALIASES, OFFERS, as_defaults


def _check_place(context: typer.Context, model: str) -> str:
    """Return the model; refuse a word that may be one more name, as in ``serve --served-model-name A B``."""
    words = context.meta.get(WRITTEN, [])
    # vLLM's users write more than one name behind the option. Here the second one became the model, and the hub was
    # searched for it.
    after_names = any(words[at : at + 3 : 2] == ["--served-model-name", model] for at in range(len(words)))
    if after_names and model != DEMO_MODEL_NAME and not os.path.exists(expanded(model)):
        raise typer.BadParameter(
            f"{model!r} stands behind the names and is no directory or file here; write the model first: "
            f"tokenloom serve MODEL --served-model-name NAME {model}"
        )
    return model


@offers((offer.option for offer in OFFERS.values() if offer.services), variables=True)
@offers(options_of(MeshOptions).values())
def serve(
    model: Annotated[
        str, typer.Argument(help="Checkpoint directory, GGUF file or hub id.", callback=_check_place)
    ] = DEMO_MODEL_NAME,
    more_names: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Names that clients use, the first one also in answers and metrics; by default the last part of the "
            "directory. May be repeated."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(callback=as_defaults, is_eager=True, help="File with these options: .toml, .json or .yaml."),
    ] = None,
    **chosen: Any,
) -> None:
    """Serve MODEL (by default the demo model) on this machine until Ctrl-C; a second Ctrl-C kills."""
    # Imported here because the help needs the options only: what runs a mesh takes gRPC, asyncio and more.
    with uncollected_imports():
        from .serving import serve_model

    serve_model(model, served_model_name or [], more_names or [], config, given(**chosen))


_OF_RELAY = (
    *("grpc_listen", "grpc_gateways", "https_listen", "http_gateways", "public_tls_cert", "public_tls_key"),
    *("max_body_bytes", "max_body_bytes_in_flight", "max_client_connections", "max_client_connections_per_peer"),
    *("drain_timeout", "insecure"),
    *("metrics_listen", "health_listen"),
)
"""Options of a relay that has no supervisor."""


@offers(OFFERS[name].option if name in ALIASES else options_of(RelaySettings)[name] for name in _OF_RELAY)
def relay(**chosen: Any) -> None:
    """End gRPC and TLS of clients in a process that outlives gateways: answers go on when a gateway is killed."""
    with uncollected_imports():
        from tokenloom.services.relay.service import RelayService
        from tokenloom.services.runtime.host.service import run

    try:
        settings = RelaySettings.of(log_level="warning", **given(**chosen))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    ready = "relaying to gateways; Ctrl-C ends it"
    raise typer.Exit(run(lambda: RelayService(settings, lambda: typer.echo(ready)), settings))
