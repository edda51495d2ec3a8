"""Checks everything that ``serve`` is given before a process starts, so that a mistake costs a second, not a mesh."""

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from msgspec.structs import replace

from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.model_files.checkpoint import reads_sounds
from tokenloom.preflight.host import (
    check_addresses,
    check_certificate,
    check_directories,
    check_encoder_packages,
    check_engine_packages,
    check_files,
    check_open_files,
    check_run_directory,
    platform_note,
)
from tokenloom.preflight.model import check_checkpoint, check_texts
from tokenloom.preflight.small_files import CannotServe
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.coordinator.coordinator_settings import CoordinatorSettings
from tokenloom.services.encoder.encoder_settings import EncoderSettings
from tokenloom.services.engine.records.engine_settings import (
    EngineSettings,
    KVEventsConfig,
    may_have_gpu,
    with_draft_path,
)
from tokenloom.services.gateway.settings.gateway_settings import GatewaySettings
from tokenloom.services.gateway.tenants.api_keys import ApiKeys
from tokenloom.services.gateway.tenants.tenant import CacheSalts
from tokenloom.services.runtime.addresses import Address
from tokenloom.services.runtime.host.options import flag, variable
from tokenloom.supervisor import state_dir
from tokenloom.supervisor.decided import DEALT, WITHHELD
from tokenloom.supervisor.layout import MeshOptions, parts_of, relay_ports
from tokenloom.supervisor.part_spec import PartSpec
from tokenloom.supervisor.ports import GatewayPorts, PortTaken, reserved_ports

from .serve_options import OFFERS, SETTINGS

_MODULE = len(("python", "-m", "tokenloom.services.engine"))
"""Words of a part's command before its flags."""


def check_models(paths: Iterable[Path], options: MeshOptions) -> None:
    """Check the models, and the packages that compute them, for chosen options of ``serve``. Raises ``CannotServe``."""
    if note := platform_note():
        typer.echo(f"Warning: {note}", err=True)
    settings = _engine_settings(options)
    engine = settings.engine
    if any(options.encoder_counts):
        check_encoder_packages()
        _check_towers(options)
    if settings.remote_vllm:  # what it computes, vLLM decides
        for path in paths:
            check_texts(path)
    elif engine.worker.worker == "model":  # the others compute no model
        # A missing package cost up to 32 s and a traceback from each of five parts. Checked here without importing
        # torch, a mistake ends the command after 0.64 s of CPU.
        check_engine_packages()
        for path in paths:
            found = check_checkpoint(path, _with_drafts(engine, path))
            if not found.is_tried:
                typer.echo(
                    f"Warning: {path} is untried with the installed transformers: the engine decides when it loads it",
                    err=True,
                )


def with_standby(options: MeshOptions) -> MeshOptions:
    """Return the options with the choice of a standby for engines. Raises ``CannotServe`` where there is none."""
    settings = _engine_settings(options)
    engine, num_engines = settings.engine, len(options.models) * len(options.engine_roles)
    has_gpu = engine.worker.device != "cpu" and (engine.worker.device != "auto" or may_have_gpu())
    if options.standby and has_gpu:
        raise CannotServe("--standby: engines on a GPU are no forks, whose driver would fail; leave it out")
    if options.standby is not None:
        return options
    # Engines that are forks share 70 MB of torch, and import it once. A lone one takes 18 MB more with a standby.
    imports_torch = engine.worker.worker == "model" and not settings.remote_vllm and engine.parallel.world_size == 1
    return replace(options, standby=num_engines > 1 and imports_torch and not has_gpu)


def _check_towers(options: MeshOptions) -> None:
    """Check that this machine and the models have the graphs that encoders are asked for. Raises ``CannotServe``."""
    try:
        settings = EncoderSettings.read(options.flags.get("encoder", ()), options.environment.get("encoder", {}))
    except ValueError as error:
        raise CannotServe(f"encoder: {error}") from None
    if not settings.tower_graphs:
        return
    if settings.device == "auto" and not may_have_gpu():
        raise CannotServe("encoder: --tower-graphs: torch finds no GPU here, whose graphs they are; leave it out")
    if (sounds := next((model.path for model in options.models if reads_sounds(model.path)), None)) is not None:
        raise CannotServe(f"encoder: --tower-graphs: {sounds} reads sounds, whose towers have no graphs; leave it out")


def _with_drafts(engine: EngineConfig, path: Path) -> EngineConfig:
    """Return the options with the directory of what drafts for a model. Raises ``CannotServe`` if there is none."""
    try:
        return replace(engine, speculative=with_draft_path(engine.speculative, path))
    except ValueError as error:
        raise CannotServe(f"engine: {error}") from None


def _engine_settings(options: MeshOptions) -> EngineSettings:
    """Return the options of the first engine, as it will read them. Raises ``CannotServe``."""
    # Its role says whether it exchanges KV without --kv-transports.
    role = () if not options.engine_roles else ("--role", options.engine_roles[0])
    flags = (*options.flags.get("engine", ()), *role)
    try:
        settings = EngineSettings.read(flags, options.environment.get("engine", {}))
        # The supervisor sets the size of a group, over whose engines experts are spread, when it starts each engine.
        parallel = replace(settings.engine.parallel, data_parallel_size=options.ranks.size or 1)
        settings = replace(settings, engine=replace(settings.engine, parallel=parallel, plugins=settings.plugins))
    except ValueError as error:
        raise CannotServe(f"engine: {error}") from None
    _check_kv_events(settings.kv_events_config, options)
    _check_rebalance(settings, options)
    return settings


def _check_rebalance(settings: EngineSettings, options: MeshOptions) -> None:
    """Check that the engines can move requests if the coordinator is to. Raises ``CannotServe``."""
    try:
        coordinator = CoordinatorSettings.read(
            options.flags.get("coordinator", ()), options.environment.get("coordinator", {})
        )
    except ValueError as error:
        raise CannotServe(f"coordinator: {error}") from None
    if coordinator.rebalance and not settings.kv_transports:
        raise CannotServe("--rebalance: requests move between engines that exchange KV; set --kv-transports")


def _check_kv_events(config: KVEventsConfig | None, options: MeshOptions) -> None:
    """Check that each engine has an address to publish its KV events at. Raises ``CannotServe``."""
    num_engines = len(options.models) * (1 if options.ranks.size else len(options.engine_roles))  # ranks count ports up
    if config is None or not config.is_on or num_engines < 2:
        return
    for name in ("endpoint", "replay_endpoint"):
        if (value := getattr(config, name)) is not None and not (value.startswith("tcp://") and value.endswith(":0")):
            reason = f"{num_engines} engines cannot share {value}; use tcp://127.0.0.1:0, which gives each its own"
            raise CannotServe(f"--kv-events-config: {name}: {reason}")


def check_host(options: MeshOptions, values: Mapping[str, Any]) -> None:
    """Check the files, the settings, the directory and the ports that a mesh needs. Raises ``CannotServe``."""
    given = _parsed(values)
    paths = {name: value for name, value in given.items() if isinstance(value, Path)}
    folders = {name: path for name, path in paths.items() if OFFERS[name].option.extra.get("directory")}
    check_files({flag(name): path for name, path in paths.items() if name not in folders})
    check_directories({flag(name): path for name, path in folders.items()})
    if "public_tls_cert" in paths and "public_tls_key" in paths:
        check_certificate(paths["public_tls_cert"], paths["public_tls_key"])
    check_run_directory(state_dir.root())
    counts = _counts(options)
    check_open_files(sum(counts.values()))
    ports, of_relays = _check_ports(options), _check_relay_ports(options)
    _check_settings(parts_of(options, state_dir.root(), ports, of_relays))
    # These ports count too: another part's address that named one of them passed the check, and the start failed.
    held = [
        *_fixed(ports, options.gateway_host, options.port, options.grpc_port, "the gateway's --port or --grpc-port"),
        *_fixed(
            of_relays,
            options.host,
            options.relay_port,
            options.relay_grpc_port,
            "the relay's --relay-port or --relay-grpc-port",
        ),
    ]
    check_addresses(options.flags, counts, held)


def _fixed(
    ports: Sequence[GatewayPorts], host: str, http: int, grpc: int | None, owner: str
) -> Iterator[tuple[Address, str]]:
    """Yield the addresses of ports that the user chose. ``http``, ``grpc``: 0: a free one."""
    for pair in ports:
        for asked, found in ((http, pair.http), (http if grpc is None else grpc, pair.grpc)):
            if asked and found:
                yield Address(host=host, port=found), owner


def warn_of_variables() -> None:
    """Say which variables of Tokenloom this command does not read, though they are set."""
    # Parts inherited from the user's shell the addresses and certificates that only the supervisor may decide, and did
    # not start. It holds them back now, which must not happen silently.
    for name in sorted(WITHHELD.intersection(os.environ) - set(map(variable, DEALT))):
        typer.echo(
            f"Warning: {name} is not read: `tokenloom serve` decides it for each part, or the part's table in --config",
            err=True,
        )
    for name, reason in _unknown_variables(os.environ).items():
        typer.echo(f"Warning: {name} is not read: {reason}", err=True)


_OTHER_VARIABLES = {"TOKENLOOM_URL"}
"""Read by the programs of ``examples/``."""
_OF_A_POD = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$")
"""Names that Kubernetes sets in every pod for each service of its namespace."""


def _unknown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are named like options and belong to none, each with the reason."""
    prefix = variable("")
    known = {name for offer in OFFERS.values() if offer.services for name in offer.option.names}
    of_mesh = {name for name, offer in OFFERS.items() if not offer.services}
    others = _OTHER_VARIABLES | WITHHELD | set(map(variable, known))
    reasons = {}
    for name in sorted(name for name in environment.keys() - others if name.startswith(prefix)):
        if _OF_A_POD.search(name) or "://" in environment[name][:6]:
            continue
        option = name.removeprefix(prefix).lower()
        nearest = difflib.get_close_matches(option, known | of_mesh, n=1)
        meant = [flag(each) if each in of_mesh else variable(each) for each in nearest]
        reasons[name] = "no option has this name" + "".join(f"; did you mean {each}?" for each in meant)
        if option in of_mesh:
            reasons[name] = f"only {flag(option)} sets this option"
    return reasons


def _parsed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chosen options in their types, without those that are None, which users write as ``none``."""
    parsed = {name: OFFERS[name].option.parse(value) for name, value in values.items()}
    return {name: value for name, value in parsed.items() if value is not None}


def _check_settings(parts: Sequence[PartSpec]) -> None:
    """Let a part of each service read its flags and its files of secrets as it will when it starts."""
    for spec in {part.service: part for part in parts}.values():
        try:
            # By the code that the part will run, and not by rules of its own, which would go stale.
            settings = SETTINGS[spec.service].read(spec.command[_MODULE:], spec.environment)
            if isinstance(settings, GatewaySettings):
                salts = CacheSalts.load(settings.cache_salt_secret, settings.cache_salt_secret_file)
                ApiKeys.load(settings.api_key, settings.api_key_file, salts)
                ApiKeys.load_admin(settings.admin_api_key, settings.admin_api_key_file)
        except ValueError as error:
            raise CannotServe(f"{spec.service}: {error}") from None
        except InvalidArgument as error:
            raise CannotServe(f"{spec.service}: {error.message}") from None


def _check_ports(options: MeshOptions) -> list[GatewayPorts]:
    try:
        with reserved_ports(options.gateway_host, options.gateways, options.port, options.grpc_port) as ports:
            return ports
    except PortTaken as error:
        ours = {mesh.port for mesh in state_dir.running_meshes()}
        stop = f"; `tokenloom stop --port {options.port}` stops your mesh there" if options.port in ours else ""
        raise CannotServe(f"{error} with --port or --grpc-port{stop}") from None


def _check_relay_ports(options: MeshOptions) -> list[GatewayPorts]:
    try:
        with relay_ports(options, is_check=True) as ports:
            return ports
    except PortTaken as error:
        raise CannotServe(f"{error} with --relay-port or --relay-grpc-port") from None


def _counts(options: MeshOptions) -> dict[str, int]:
    models = len(options.models)
    return {
        "engine": models * len(options.engine_roles),
        "encoder": sum(options.encoder_counts),
        "tokenizer": models * options.tokenizers,
        "output_processor": models * options.output_processors,
        "gateway": options.gateways,
        "relay": options.relays,
        "coordinator": models * options.coordinators,
    }
