"""Checks everything that ``serve`` is given before a process starts, so that a mistake costs a second, not a mesh."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from tokenloom.preflight.context import check_context
from tokenloom.preflight.files import check_certificate, check_files
from tokenloom.preflight.listening import check_addresses
from tokenloom.preflight.model import check_checkpoint
from tokenloom.preflight.open_files import check_open_files
from tokenloom.preflight.packages import check_engine_packages
from tokenloom.preflight.platforms import platform_note
from tokenloom.preflight.refusal import Refused
from tokenloom.preflight.run_directory import check_run_directory
from tokenloom.services.runtime.host.options import flag
from tokenloom.supervisor import state_dir
from tokenloom.supervisor.layout import MeshOptions
from tokenloom.supervisor.ports import PortTaken, reserved_ports

from .serve_options import OFFERS

_COORDINATORS = 2
"""At most; as for the supervisor's open files."""


def check_model(path: Path, values: Mapping[str, Any]) -> None:
    """Check the model, and the packages that compute it, for chosen options of ``serve``. Raises ``Refused``."""
    if note := platform_note():
        typer.echo(f"Warning: {note}", err=True)
    if values.get("worker", "model") == "model":  # the others compute no model
        check_engine_packages()
        check_checkpoint(path, str(values.get("model_impl", "auto")), str(values.get("load_format", "auto")))
        length = values.get("max_model_len")
        check_context(path, None if length is None else int(length))


def check_host(options: MeshOptions, values: Mapping[str, Any]) -> None:
    """Check the files, the directory and the ports that a mesh needs. Raises ``Refused``."""
    paths = {name: Path(value) for name, value in values.items() if OFFERS[name].option.type is Path}
    check_files({flag(name): path for name, path in paths.items() if not OFFERS[name].option.extra.get("directory")})
    if "public_tls_cert" in values and "public_tls_key" in values:
        check_certificate(Path(values["public_tls_cert"]), Path(values["public_tls_key"]))
    check_run_directory(state_dir.root())
    check_open_files(sum(_counts(options).values()) + _COORDINATORS)
    _check_ports(options)
    check_addresses(options.flags, _counts(options))


def _check_ports(options: MeshOptions) -> None:
    try:
        with reserved_ports(options.host, options.gateways, options.port, options.grpc_port):
            pass
    except PortTaken as error:
        ours = {mesh.port for mesh in state_dir.running_meshes()}
        stop = f"; `tokenloom stop --port {options.port}` stops your mesh there" if options.port in ours else ""
        raise Refused(f"{error} with --port or --grpc-port{stop}") from None


def _counts(options: MeshOptions) -> dict[str, int]:
    return {
        "engine": len(options.engine_roles),
        "tokenizer": options.tokenizers,
        "output_processor": options.output_processors,
        "gateway": options.gateways,
    }
