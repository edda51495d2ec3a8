"""Checks what ``tokenloom serve`` was given, and runs the mesh."""

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from msgspec import structs

from tokenloom.request.chat_template import names_plugin, read_chat_template
from tokenloom.supervisor.layout import MeshOptions, ServedModel, with_names
from tokenloom.supervisor.mesh import Mesh, run_mesh
from tokenloom.supervisor.output import LineCopier, bare, prefixed, unbuffered

from ..failures import reported
from ..model_directory import model_directory
from ..options import built
from .prechecks import check_host, check_models, warn_of_variables, with_standby
from .serve_options import OFFERS, service_arguments, service_flags

_CERTIFICATE = ("public_tls_cert", "public_tls_key")


def serve_model(
    model: str, names: Sequence[str], more_names: Sequence[str], config: Path | None, values: Mapping[str, Any]
) -> None:
    """Serve a model until Ctrl-C, and exit with the status of the mesh.

    Args:
        names: Those that clients use.
        more_names: The words behind the model on the command line.
        config: The file with options.
        values: The chosen options by name.
    """
    _check_template(values.get("chat_template"))
    path, name = model_directory(model, None, weights=values.get("load_format", "auto") == "auto")
    options = _mesh_options(path, name, values, service_flags(config))
    options = _with_more_models(with_names(options, _names(names, more_names)))
    warn_of_variables()
    with reported():
        check_models((each.path for each in options.models), options)
        options = with_standby(options)
    write_line = (bare if values.get("log_format") == "json" else prefixed)(unbuffered(sys.stderr))
    scheme = "https" if "public_tls_cert" in values else "http"
    with reported():
        check_host(options, values)
        outcome = run_mesh(
            options,
            LineCopier(write_line),
            lambda mesh: _announce_and_wait(mesh, [model.name for model in options.models], scheme),
        )
    raise typer.Exit(0 if outcome.clean else 1)


def _names(given: Sequence[str], more: Sequence[str]) -> list[str]:
    """Return the names for clients. ``more``: the words behind the model, which are names as in
    ``serve MODEL --served-model-name A B``."""
    if more and not given:
        raise typer.BadParameter(f"unexpected extra argument {more[0]!r}", param_hint="MODEL")
    names = [name.strip() for each in (*given, *more) for name in each.split(",")]
    if "" in names:
        raise typer.BadParameter("a name is empty", param_hint="--served-model-name")
    return list(dict.fromkeys(names))


def _with_more_models(options: MeshOptions) -> MeshOptions:
    """Return the options with the models of ``--also``. Exits with a usage error for one that is not found, or a name
    that two of them have."""
    if options.also and any(word.startswith("--meshes=") for word in options.flags.get("gateway", ())):
        raise typer.BadParameter("cannot be combined with --meshes: list these models there too", param_hint="--also")
    more = [_further_model(word.strip()) for word in options.also]
    names = [options.served_model_name, *options.other_names, *(model.name for model in more)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise typer.BadParameter(f"the model name {twice[0]!r} is given twice; use NAME=MODEL", param_hint="--also")
    return structs.replace(options, more_models=tuple(more))


def _further_model(word: str) -> ServedModel:
    """Return the model of a word such as ``./model`` or ``name=./model``."""
    name, _, model = word.rpartition("=") if not Path(word).exists() else ("", "", word)
    if not model or (not name and word.startswith("=")):
        raise typer.BadParameter(f"{word!r} must be MODEL or NAME=MODEL", param_hint="--also")
    return ServedModel(*model_directory(model, name or None, "--also"))


def _check_template(given: str | None) -> None:
    """Exits with a usage error if the chat template is not Jinja, before any part starts."""
    if given is None or names_plugin(given):  # a plugin's is read where it is used
        return
    from tokenloom.services.tokenizer.chat_template import ChatTemplate  # here, because Jinja costs time

    try:
        ChatTemplate(read_chat_template(given))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--chat-template") from None


def _mesh_options(
    path: Path, name: str, values: Mapping[str, Any], in_file: Mapping[str, tuple[str, ...]]
) -> MeshOptions:
    """Exits with a usage error unless engines are of one kind, and none of the pair is missing."""
    if ("prefill" in values) != ("decode" in values):
        raise typer.BadParameter("each needs the other", param_hint="--prefill, --decode")
    if "engines" in values and "prefill" in values:
        raise typer.BadParameter("cannot be combined with --prefill and --decode", param_hint="--engines")
    if {"data_parallel_size", "engines"} <= values.keys():
        raise typer.BadParameter("cannot be combined with --engines", param_hint="--data-parallel-size")
    if "batch_dir" in values and int(values.get("gateways", 1)) > 1:
        raise typer.BadParameter("belongs to one gateway; set --gateways 1", param_hint="--batch-dir")
    flags, environment = service_arguments(values)
    has_relays = int(values.get("relays", 0)) > 0
    if not has_relays and {"relay_port", "relay_grpc_port"} & values.keys():
        raise typer.BadParameter("is of relays, and there are none; set --relays 1", param_hint="--relay-port")
    if "public_tls_cert" in values and has_relays:  # they present it, and gateways serve plain text behind them
        flags["gateway"] = tuple(each for each in flags["gateway"] if not each.startswith("--public-tls-"))
        # A variable of one service reaches no other one: as the supervisor's, gateways would present the certificate.
        own = {OFFERS[name].option.variable: str(values[name]) for name in _CERTIFICATE if name in values}
        environment.setdefault("relay", {}).update(own)
    elif "public_tls_cert" in values:  # the supervisor has no certificate with which to ask for the gateway's health
        flags["gateway"] += ("--health-listen=127.0.0.1:0",)
    flags = {service: (*in_file.get(service, ()), *flags.get(service, ())) for service in {*flags, *in_file}}
    options = built(MeshOptions(model=path, served_model_name=name, flags=flags, environment=environment), values)
    try:
        options.ranks.check()
        options.ranks.check_roles(options.prefill, options.decode)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--data-parallel-size") from None
    return options


async def _announce_and_wait(mesh: Mesh, names: Sequence[str], scheme: str) -> None:
    await mesh.wait_serving()
    engines = [engine.max_model_len for engine in mesh.states("engine")]
    each = len(engines) // len(names)
    lengths = [min(filter(None, engines[at * each : (at + 1) * each]), default=None) for at in range(len(names))]
    context = f", context: {' and '.join(map(str, lengths))} tokens" if all(lengths) else ""
    await mesh.output_settled()  # so that the lines below are the last ones
    without = "".join(f" Fall-back of engines: {each}." for each in mesh.fall_backs("engine"))
    verb, relays = "is" if len(names) == 1 else "are", mesh.states("relay")
    of_grpc = ", ".join(relay.address for relay in relays)
    for front in [relay for relay in relays if relay.http] or mesh.gateways:
        url = f"{scheme}://{front.http}"
        address = front.address if front in relays else of_grpc or front.address
        line = f"{' and '.join(names)} {verb} served at {url} (page: {url}/, gRPC: {address}{context})."
        with contextlib.suppress(OSError):  # an output that cannot be written ends no mesh
            print(f"{line}{without} Ctrl-C stops it.", flush=True)
    await mesh.wait_failed()
