"""Which parts a local mesh has, and how they find each other: unix sockets in the mesh's private directory."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenloom.services.runtime.addresses import Address

from .cores import divide
from .part_spec import PartSpec


@dataclass(frozen=True)
class MeshOptions:
    """What a user chooses about a local mesh as a whole."""

    model: Path
    """A checkpoint directory."""
    served_model_name: str
    engines: int = 1
    tokenizers: int = 1
    output_processors: int = 1
    gateways: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    """HTTP port of the first gateway; the others follow it. 0: free ones."""
    grpc_port: int | None = None
    """The same for public gRPC; None: 1000 above `port`."""
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """More flags for every instance of a service."""
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """More environment for every instance of a service."""
    common_flags: tuple[str, ...] = ()
    """More flags for every part."""
    drain_timeout: float = 30.0
    """Seconds that live requests may go on once the mesh is told to stop."""


def parts_of(options: MeshOptions, directory: Path) -> list[PartSpec]:
    """Every part of the mesh, in the order in which they drain: who takes requests first, who others rely on last."""
    counts = {
        "gateway": options.gateways,
        "output_processor": options.output_processors,
        "engine": options.engines,
        "tokenizer": options.tokenizers,
        "coordinator": 1,
    }
    sockets = {
        service: tuple(str(Address(path=str(directory / f"{service}-{index}.sock"))) for index in range(count))
        for service, count in counts.items()
    }
    return [
        _part(options, directory, sockets, service, index)
        for service, count in counts.items()
        for index in range(count)
    ]


def _part(
    options: MeshOptions, directory: Path, sockets: Mapping[str, tuple[str, ...]], service: str, index: int
) -> PartSpec:
    state_file = directory / f"{service}-{index}.json"
    is_gateway, is_engine = service == "gateway", service == "engine"
    own = {
        "gateway": _gateway_flags,
        "output_processor": _output_processor_flags,
        "engine": _engine_flags,
        "tokenizer": _tokenizer_flags,
        "coordinator": lambda *_: (),
    }[service](options, sockets, index)
    listen = _public_grpc(options, index) if is_gateway else sockets[service][index]
    shares = divide(options.engines)
    return PartSpec(
        service=service,
        index=index,
        role="both" if is_engine else None,
        command=(
            *(sys.executable, "-m", f"tokenloom.services.{service}"),
            *("--instance-id", f"{service}-{index}", "--listen", listen, "--state-file", str(state_file)),
            *("--drain-timeout", str(options.drain_timeout)),
            *options.common_flags,
            *own,
            *options.flags.get(service, ()),
        ),
        state_file=state_file,
        environment={
            **({"OMP_NUM_THREADS": str(shares[index].threads)} if is_engine else {}),
            **options.environment.get(service, {}),
        },
        cpus=shares[index].cpus if is_engine else (),
        leftovers=() if is_gateway else (directory / f"{service}-{index}.sock",),
    )


def _public_grpc(options: MeshOptions, index: int) -> str:
    first = options.grpc_port
    if first is None:
        first = options.port + 1000 if options.port else 0
    return str(Address(host=options.host, port=first + index if first else 0))


def _gateway_flags(options: MeshOptions, sockets: Mapping[str, tuple[str, ...]], index: int) -> tuple[str, ...]:
    http = Address(host=options.host, port=options.port + index if options.port else 0)
    return (
        *("--http-listen", str(http), "--served-model-name", options.served_model_name),
        *("--tokenizers", ",".join(sockets["tokenizer"])),
        *("--output-processors", ",".join(sockets["output_processor"])),
        *("--coordinator", sockets["coordinator"][0]),
    )


def _output_processor_flags(
    options: MeshOptions, sockets: Mapping[str, tuple[str, ...]], index: int
) -> tuple[str, ...]:
    return (
        *("--model", str(options.model), "--served-model-name", options.served_model_name),
        *("--coordinator", sockets["coordinator"][0]),
    )


def _engine_flags(options: MeshOptions, sockets: Mapping[str, tuple[str, ...]], index: int) -> tuple[str, ...]:
    return (
        *("--model", str(options.model), "--served-model-name", options.served_model_name),
        *("--coordinator", sockets["coordinator"][0]),
        *("--engines-on-host", str(options.engines), "--num-threads", str(divide(options.engines)[index].threads)),
    )


def _tokenizer_flags(options: MeshOptions, sockets: Mapping[str, tuple[str, ...]], index: int) -> tuple[str, ...]:
    return "--model", str(options.model), "--served-model-name", options.served_model_name
