"""Lays out the parts of a local mesh, which find each other by unix sockets in the mesh's private directory."""

import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, field, structs

from tokenloom.services.runtime.local_streams.sockets import SUFFIX as STREAMS_SUFFIX
from tokenloom.services.runtime.peers.addresses import Address

from .cores import divide
from .part_spec import PartSpec
from .ports import GatewayPorts

_Parts = Annotated[int, Meta(ge=1, le=64)]
_Engines = Annotated[int, Meta(ge=0, le=64)]
_Port = Annotated[int, Meta(ge=0, le=65535)]


class MeshOptions(Struct, frozen=True):
    """What a user chooses for a local mesh as a whole. Fields with a text are options of ``tokenloom serve``."""

    model: Path
    """A checkpoint directory."""
    served_model_name: str
    """The first name for clients, which answers and metrics hold."""
    other_names: tuple[str, ...] = ()
    """Further names that clients may use."""
    engines: Annotated[_Parts, "Engines that compute whole requests; the cores are divided among them."] = 1
    prefill: Annotated[_Engines, "Engines that compute prompts; with --decode, instead of --engines."] = 0
    decode: Annotated[_Engines, "Engines that generate tokens from the KV blocks of prefill engines."] = 0
    data_parallel_size: Annotated[
        _Parts | None,
        "Engines of one data-parallel group, instead of --engines; a request may name its engine with the header "
        "X-data-parallel-rank.",
    ] = None
    data_parallel_size_local: Annotated[
        _Parts | None, "Engines of the group on this machine, with --data-parallel-hybrid-lb; by default all."
    ] = None
    data_parallel_start_rank: Annotated[
        _Engines, "Number of the first engine of the group on this machine, with --data-parallel-hybrid-lb."
    ] = 0
    data_parallel_hybrid_lb: Annotated[
        bool,
        "Place requests on the engines of this machine only: each machine of the group runs a mesh of its own, and a "
        "balancer in front chooses among their gateways. Not for mixture-of-experts models.",
    ] = False
    data_parallel_external_lb: Annotated[
        bool, "As --data-parallel-hybrid-lb, with one engine in each mesh: the balancer chooses the rank."
    ] = False
    tokenizers: Annotated[_Parts, "Tokenizer services."] = 1
    output_processors: Annotated[_Parts, "Output processors."] = 1
    gateways: Annotated[_Parts, "Gateways, on consecutive ports."] = 1
    coordinators: Annotated[_Parts, "Coordinators: one is active, the others stand by to take its place."] = 1
    host: Annotated[str, "Address that the gateways listen on."] = "127.0.0.1"
    port: Annotated[_Port, "HTTP port of the first gateway; 0: a free one."] = 8000
    grpc_port: Annotated[_Port | None, "Public gRPC port of the first gateway; by default 1000 above --port."] = None
    drain_timeout: Annotated[
        Annotated[float, Meta(ge=0)], "Seconds that live requests have to finish after Ctrl-C."
    ] = 30.0
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """More flags for every instance of a service."""
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """More environment for every instance of a service. These variables hold secrets: the other services do not get
    them from the supervisor's environment either."""
    common_flags: tuple[str, ...] = ()
    """More flags for every part."""

    @property
    def engine_roles(self) -> list[str]:
        """The role of each engine, in the order of their indices."""
        engines = self.engines if self.data_parallel_size is None else self.num_local_ranks
        return ["prefill"] * self.prefill + ["decode"] * self.decode or ["both"] * engines

    @property
    def num_local_ranks(self) -> int:
        """Engines of the data-parallel group on this machine; 0 without a group."""
        if self.data_parallel_external_lb:
            return 1
        return self.data_parallel_size_local or self.data_parallel_size or 0

    def check_data_parallel(self) -> None:
        """Raise ``ValueError``, naming the options, if the engines of a data-parallel group do not fit together."""
        size, local = self.data_parallel_size, self.num_local_ranks
        is_split = self.data_parallel_hybrid_lb or self.data_parallel_external_lb
        if size is None:
            if is_split or self.data_parallel_size_local is not None or self.data_parallel_start_rank:
                raise ValueError("the options --data-parallel-… need --data-parallel-size")
            return
        if self.data_parallel_start_rank + local > size:
            raise ValueError(
                f"--data-parallel-start-rank {self.data_parallel_start_rank} and {local} engines here exceed "
                f"--data-parallel-size {size}"
            )
        if local != size and not is_split:
            raise ValueError(
                f"--data-parallel-size-local {local} is less than --data-parallel-size {size}: add "
                "--data-parallel-hybrid-lb to balance in front of the machines, or start the engines of other machines "
                "as services of this mesh (docs/operate/scaling.md)"
            )


def with_names(options: MeshOptions, names: Sequence[str]) -> MeshOptions:
    """Return the options with the names for clients; without any, unchanged."""
    return structs.replace(options, served_model_name=names[0], other_names=tuple(names[1:])) if names else options


def parts_of(options: MeshOptions, directory: Path, ports: Sequence[GatewayPorts]) -> list[PartSpec]:
    """Return every part of the mesh in the order in which they drain: gateways first, the coordinators last."""
    layout = _Layout(options, directory, ports)
    return [
        *map(layout.gateway, range(options.gateways)),
        *map(layout.output_processor, range(options.output_processors)),
        *map(layout.engine, range(len(options.engine_roles))),
        *map(layout.tokenizer, range(options.tokenizers)),
        *map(layout.coordinator, range(options.coordinators)),
    ]


class _Layout:
    """Makes the specification of each part: its addresses, and the flags by which it finds the others."""

    def __init__(self, options: MeshOptions, directory: Path, ports: Sequence[GatewayPorts]) -> None:
        self._options = options
        self._directory = directory
        self._ports = ports
        self._roles = options.engine_roles
        self._shares = divide(len(self._roles))
        self._model = ("--model", str(options.model), "--served-model-name", options.served_model_name)
        self._coordinator = ("--coordinator", self._listen("coordinator", 0))
        # All gateways of the mesh share it, so each finds the prefixes that another one's requests have left.
        self._secrets = {"gateway": {"TOKENLOOM_CACHE_SALT_SECRET": secrets.token_hex(32)}}

    def gateway(self, index: int) -> PartSpec:
        options, ports = self._options, self._ports[index]
        held = {"--http-listen-fd": ports.http_descriptor, "--listen-fd": ports.grpc_descriptor}
        descriptors = {flag: number for flag, number in held.items() if number is not None}
        flags = (
            *("--http-listen", str(Address(host=options.host, port=ports.http))),
            *("--served-model-name", ",".join((options.served_model_name, *options.other_names))),
            *("--tokenizers", self._all("tokenizer", options.tokenizers)),
            *("--output-processors", self._all("output_processor", options.output_processors)),
            *self._coordinator,
            *(word for flag, number in descriptors.items() for word in (flag, str(number))),
        )
        part = self._part("gateway", index, flags, listen=str(Address(host=options.host, port=ports.grpc)))
        return replace(part, descriptors=tuple(descriptors.values()))

    def output_processor(self, index: int) -> PartSpec:
        return self._part("output_processor", index, (*self._model, *self._coordinator))

    def engine(self, index: int) -> PartSpec:
        share, role, kv_socket = self._shares[index], self._roles[index], self._socket("engine", index, "-kv")
        flags: tuple[str, ...] = ("--role", role)
        if role != "both":  # only these exchange KV blocks
            flags += ("--kv-listen", str(Address(path=str(kv_socket))))
        flags += ("--engines-on-host", str(len(self._roles)), "--num-threads", str(share.threads))
        if share.cpus:  # of the worker only: the engine's own process answers while the worker computes
            flags += ("--cpus", ",".join(map(str, share.cpus)))
        flags += self._data_parallel(index)
        part = self._part("engine", index, (*self._model, *self._coordinator, *flags))
        return replace(part, role=role, leftovers=(*part.leftovers, kv_socket))

    def _data_parallel(self, index: int) -> tuple[str, ...]:
        options = self._options
        if options.data_parallel_size is None:
            return ()
        flags: tuple[str, ...] = ("--data-parallel-rank", str(options.data_parallel_start_rank + index))
        if (
            options.num_local_ranks == options.data_parallel_size
        ):  # ranks of other meshes could not be asked to begin waves
            flags += ("--data-parallel-address", str(Address(path=str(self._directory / "data-parallel.sock"))))
        return ("--data-parallel-group", "data-parallel", *flags)

    def tokenizer(self, index: int) -> PartSpec:
        return self._part("tokenizer", index, self._model)

    def coordinator(self, index: int) -> PartSpec:
        """Several coordinators have one address, at which the active one listens: the one that has locked a file."""
        if self._options.coordinators == 1:
            return self._part("coordinator", index, ())
        health, lock = self._socket("coordinator", index, "-health"), self._directory / "coordinator.lock"
        flags = ("--lease", f"file:{lock}", "--health-listen", str(Address(path=str(health))))
        part = self._part("coordinator", index, flags, listen=self._listen("coordinator", 0))
        return replace(part, leftovers=(health,))  # the other sockets may be those of the active one

    def _part(self, service: str, index: int, flags: tuple[str, ...], listen: str | None = None) -> PartSpec:
        name, options = f"{service}-{index}", self._options
        state_file, socket = self._directory / f"{name}.json", self._socket(service, index)
        command = (
            *(sys.executable, "-m", f"tokenloom.services.{service}"),
            *("--instance-id", name, "--listen", listen or self._listen(service, index)),
            *("--state-file", str(state_file), "--drain-timeout", str(options.drain_timeout)),
            *options.common_flags,
            *flags,
            *options.flags.get(service, ()),
        )
        return PartSpec(
            service=service,
            index=index,
            command=command,
            state_file=state_file,
            # The files that a killed part leaves are removed with the directory.
            environment={
                "TMPDIR": str(self._directory),
                **self._secrets.get(service, {}),
                **options.environment.get(service, {}),
            },
            withheld=frozenset(
                name for given in (self._secrets, options.environment) for each in given.values() for name in each
            ),
            leftovers=(socket, socket.with_name(socket.name + STREAMS_SUFFIX)),
        )

    def _socket(self, service: str, index: int, port: str = "") -> Path:
        return self._directory / f"{service}-{index}{port}.sock"

    def _listen(self, service: str, index: int) -> str:
        return str(Address(path=str(self._socket(service, index))))

    def _all(self, service: str, count: int) -> str:
        return ",".join(self._listen(service, index) for index in range(count))
