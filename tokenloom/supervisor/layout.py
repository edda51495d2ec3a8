"""Lays out the parts of a local mesh, which find each other by unix sockets in the mesh's private directory.

Each model has parts of its own: those of the first one have the lowest indices. The gateways are those of all models.
The machine's cores are divided among the engines, because two engines on one core slow each other down.
"""

import contextlib
import itertools
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, field, json, structs

from tokenloom.services.runtime.addresses import STREAMS_SUFFIX, Address

from .part_spec import PartSpec
from .ports import GRPC_OFFSET, GatewayPorts, held_ports, reserved_ports
from .state_dir import CONTROL_SOCKET


@dataclass(frozen=True, slots=True)
class LocalRanks:
    """Says which ranks of a group run here.

    Attributes:
        size: Ranks of the group; None: there is no group.
        local: Ranks on this machine; None: all.
        start: The number of the first one.
        is_split: Whether other meshes run the other ranks, and something in front balances.
        address: Where rank 0 of a mixture-of-experts model listens; empty: at a socket of this machine.
    """

    size: int | None
    local: int | None
    start: int
    is_split: bool
    address: str = ""

    @property
    def count(self) -> int:
        """Ranks on this machine; 0 without a group."""
        return self.local or self.size or 0

    def check(self) -> None:
        """Raise ``ValueError``, naming the options, if they do not fit together."""
        if self.size is None:
            if self.is_split or self.local is not None or self.start or self.address:
                raise ValueError("the options --data-parallel-… need --data-parallel-size")
        elif self.start + self.count > self.size:
            raise ValueError(
                f"--data-parallel-start-rank {self.start} and {self.count} engines here exceed "
                f"--data-parallel-size {self.size}"
            )
        elif self.count != self.size and not self.is_split:
            raise ValueError(
                f"--data-parallel-size-local {self.count} is less than --data-parallel-size {self.size}: add "
                "--data-parallel-hybrid-lb to balance in front of the machines, or start the engines of other machines "
                "as services of this mesh (docs/operate/scaling.md)"
            )

    def check_roles(self, prefill: int, decode: int) -> None:
        """Raise ``ValueError``, naming the options, unless the engines of each role form whole groups here."""
        if self.size is None or not prefill:
            return
        if self.is_split or self.local is not None or self.start or self.address:
            raise ValueError("beside --prefill and --decode all engines of a group run here: leave out the other ones")
        if prefill % self.size or decode % self.size:
            raise ValueError(
                f"--prefill {prefill} and --decode {decode} must be multiples of {self.size}: the engines of each form "
                "groups of so many"
            )

    def flags(self, place: int, socket: Path, group: str = "data-parallel") -> tuple[str, ...]:
        """Return the flags of an engine. ``place``: its number on this machine. ``socket``: where rank 0 listens if all
        ranks are here and no address says otherwise. ``group``: the name of the group."""
        if self.size is None:
            return ()
        flags = (
            *("--data-parallel-group", group, "--data-parallel-size", str(self.size)),
            *("--data-parallel-rank", str(self.start + place)),
        )
        address = self.address or ("" if self.is_split else str(Address(path=str(socket))))
        return (*flags, "--data-parallel-address", address) if address else flags


_LOOPBACK = "127.0.0.1"
_BEHIND_RELAYS = ("--max-connections-per-peer", "16384")
"""Flags of gateways to which the connections of all clients come from one address."""
MESHES = "meshes.json"
"""Describes the meshes of further models to the gateways."""

_MOST_PARTS = 64
_Parts = Annotated[int, Meta(ge=1, le=_MOST_PARTS)]
_Engines = Annotated[int, Meta(ge=0, le=_MOST_PARTS)]
_Port = Annotated[int, Meta(ge=0, le=65535)]


class ServedModel(Struct, frozen=True):
    """One more model behind the gateways."""

    path: Path
    """A checkpoint directory."""
    name: str
    """The name for clients."""


class MeshOptions(Struct, frozen=True):
    """What a user chooses for a local mesh as a whole. Fields with a text are options of ``tokenloom serve``."""

    model: Path
    """A checkpoint directory."""
    served_model_name: str
    """The first name for clients, which answers and metrics hold."""
    other_names: tuple[str, ...] = ()
    """Further names that clients may use."""
    more_models: tuple[ServedModel, ...] = ()
    also: Annotated[
        tuple[str, ...],
        "Further models behind the same gateways, separated by commas: a directory, a GGUF file or a hub id, or "
        "NAME=MODEL. Each gets parts of its own, as many as the first model, with the same options.",
    ] = ()
    engines: Annotated[_Parts, "Engines that compute whole requests; the cores are divided among them."] = 1
    prefill: Annotated[_Engines, "Engines that compute prompts; with --decode, instead of --engines."] = 0
    decode: Annotated[_Engines, "Engines that generate tokens from the KV blocks of prefill engines."] = 0
    data_parallel_size: Annotated[
        _Parts | None,
        "Engines of a data-parallel group, instead of --engines, or of each of --prefill and --decode. The header "
        "X-data-parallel-rank names one for a request.",
    ] = None
    data_parallel_size_local: Annotated[
        _Parts | None, "Engines of the group on this machine, with --data-parallel-hybrid-lb; by default all."
    ] = None
    data_parallel_start_rank: Annotated[
        _Engines, "Number of the first engine of the group on this machine, with --data-parallel-hybrid-lb."
    ] = 0
    data_parallel_hybrid_lb: Annotated[
        bool,
        "Place requests on the engines of this machine only: each machine of the group runs a mesh, and a balancer in "
        "front chooses one. Mixture-of-experts models need --data-parallel-address.",
    ] = False
    data_parallel_external_lb: Annotated[
        bool, "As --data-parallel-hybrid-lb, with one engine in each mesh: the balancer chooses the rank."
    ] = False
    data_parallel_address: Annotated[
        str,
        "HOST:PORT where rank 0 of a mixture-of-experts model listens for other machines, with "
        "--data-parallel-secret-file; by default a socket here.",
    ] = ""
    encoders: Annotated[
        _Engines | None,
        "Encoders of each model that reads images or sounds; by default one, which computes on the engine's device.",
    ] = None
    tokenizers: Annotated[_Parts, "Tokenizer services."] = 1
    output_processors: Annotated[_Parts, "Output processors."] = 1
    gateways: Annotated[_Parts, "Gateways, on consecutive ports."] = 1
    coordinators: Annotated[_Parts, "Coordinators: one is active, the others stand by to take its place."] = 1
    standby: Annotated[
        bool | None,
        "Keep a process that has imported what engines on a CPU need: theirs are forks of it. By default with several.",
    ] = None
    host: Annotated[str, "Address of the gateways."] = "127.0.0.1"
    port: Annotated[_Port, "HTTP port of the first gateway; 0: a free one."] = 8000
    grpc_port: Annotated[_Port | None, "Public gRPC port of the first gateway; by default 1000 above --port."] = None
    relays: Annotated[
        _Engines,
        "Relays in front of the gateways, on consecutive ports: they end gRPC of clients, and with --public-tls-cert "
        "HTTPS, and go on with answers whose gateway is killed. With a certificate gateways listen on loopback.",
    ] = 0
    relay_port: Annotated[_Port, "HTTPS port of the first relay; 0: a free one."] = 8443
    relay_grpc_port: Annotated[_Port | None, "gRPC port of the first relay; by default 1000 above --relay-port."] = None
    drain_timeout: Annotated[
        Annotated[float, Meta(ge=0, le=86400)], "Seconds that live requests have to finish after Ctrl-C."
    ] = 30.0
    flags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """More flags for every instance of a service."""
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """More environment for every instance of a service. These variables hold secrets: the other services do not get
    them from the supervisor's environment either."""
    common_flags: tuple[str, ...] = ()
    """More flags for every part."""
    page_kills: bool = False
    """Whether the gateways' page has a button that kills an engine."""

    @property
    def engine_roles(self) -> list[str]:
        """The role of each engine, in the order of their indices."""
        engines = self.ranks.count or self.engines
        return ["prefill"] * self.prefill + ["decode"] * self.decode or ["both"] * engines

    @property
    def ranks(self) -> LocalRanks:
        """The ranks of the data-parallel group on this machine."""
        local = 1 if self.data_parallel_external_lb else self.data_parallel_size_local
        is_split = self.data_parallel_hybrid_lb or self.data_parallel_external_lb
        address = self.data_parallel_address
        return LocalRanks(self.data_parallel_size, local, self.data_parallel_start_rank, is_split, address)

    @property
    def has_public_relays(self) -> bool:
        """Whether relays alone face clients: they have a certificate, and gateways serve plain text behind them."""
        given = self.flags.get("relay", ())
        return self.relays > 0 and any(each.startswith("--public-tls-cert=") for each in given)

    @property
    def gateway_host(self) -> str:
        """Address of the gateways."""
        return _LOOPBACK if self.has_public_relays else self.host

    @property
    def encoder_counts(self) -> list[int]:
        """The number of encoders of each model."""
        # Here: the help of a command needs the options only.
        from tokenloom.model_files.checkpoint import reads_images, reads_sounds

        # Without the weights of its other parts, or without files, an engine computes text only.
        without = {"--language-model-only", "--load-format=dummy"}.intersection(self.flags.get("engine", ()))
        count = 1 if self.encoders is None else self.encoders
        paths = [model.path for model in self.models]
        return [count if not without and (reads_images(path) or reads_sounds(path)) else 0 for path in paths]

    @property
    def models(self) -> list[ServedModel]:
        """All models, the first one at the head."""
        return [ServedModel(self.model, self.served_model_name), *self.more_models]


def with_names(options: MeshOptions, names: Sequence[str]) -> MeshOptions:
    """Return the options with the names for clients; without any, unchanged."""
    return structs.replace(options, served_model_name=names[0], other_names=tuple(names[1:])) if names else options


def parts_of(
    options: MeshOptions, directory: Path, ports: Sequence[GatewayPorts], of_relays: Sequence[GatewayPorts] = ()
) -> list[PartSpec]:
    """Return every part of the mesh in the order in which they drain: what faces clients first, the coordinators
    last."""
    layout, models = _Layout(options, directory, ports), len(options.models)
    return [
        *(layout.relay(index, each) for index, each in enumerate(of_relays)),
        *map(layout.gateway, range(options.gateways)),
        *map(layout.output_processor, range(models * options.output_processors)),
        *map(layout.engine, range(models * len(options.engine_roles))),
        *map(layout.encoder, range(sum(options.encoder_counts))),
        *map(layout.tokenizer, range(models * options.tokenizers)),
        *map(layout.coordinator, range(models * options.coordinators)),
    ]


def relay_ports(
    options: MeshOptions, *, is_check: bool = False
) -> contextlib.AbstractContextManager[list[GatewayPorts]]:
    """Hold the ports of the relays. ``is_check``: only reserve them. Raises ``PortTaken``."""
    grpc = options.relay_grpc_port
    if grpc is None:
        grpc = options.relay_port and options.relay_port + GRPC_OFFSET
    https = options.relay_port if options.has_public_relays else None
    return (reserved_ports if is_check else held_ports)(options.host, options.relays, https, grpc)


def engines_of(options: MeshOptions, directory: Path, count: int) -> list[PartSpec]:
    """Return the specifications of ``count`` engines of a mesh that has another number of them. Raises ``ValueError``
    for a mesh whose engines have different tasks, or of which other machines run some."""
    ranks = options.ranks
    if options.more_models or options.prefill or ranks.is_split or ranks.count not in (0, ranks.size):
        raise ValueError(
            "engines are started and stopped in a mesh of one model, with engines of one kind that all run here"
        )
    if not 1 <= count <= _MOST_PARTS:
        raise ValueError(f"a mesh has 1 to {_MOST_PARTS} engines")
    changed = {"engines": count} if ranks.size is None else {"data_parallel_size": count}
    layout = _Layout(structs.replace(options, **changed), directory, ())
    # Engines that run are bound to the cores that they have; others may run on any.
    return [_without_flag(layout.engine(index), "--cpus") for index in range(count)]


def with_size_of(spec: PartSpec, other: PartSpec) -> PartSpec:
    """Return ``spec`` with the size of the data-parallel group that another one names, if it belongs to one."""
    words, flag = list(spec.command), "--data-parallel-size"
    if flag in words:
        words[words.index(flag) + 1] = other.command[other.command.index(flag) + 1]
    return replace(spec, command=tuple(words))


def _without_flag(spec: PartSpec, flag: str) -> PartSpec:
    words = list(spec.command)
    if flag in words:
        at = words.index(flag)
        del words[at : at + 2]
    return replace(spec, command=tuple(words))


def write_meshes(options: MeshOptions, directory: Path) -> None:
    """Write the file ``--meshes`` of the gateways, if there are several models."""
    if options.more_models:
        (directory / MESHES).write_bytes(json.encode({"mesh": _Layout(options, directory, ()).more_meshes()}))


class _Layout:
    """Makes the specification of each part: its addresses, and the flags by which it finds the others."""

    def __init__(self, options: MeshOptions, directory: Path, ports: Sequence[GatewayPorts]) -> None:
        self._options = options
        self._directory = directory
        self._ports = ports
        self._models = options.models
        self._roles = options.engine_roles
        self._shares = divide_cores(len(self._models) * len(self._roles))
        # All gateways of the mesh share it, so each finds the prefixes that another one's requests have left.
        self._secrets = {"gateway": {"TOKENLOOM_CACHE_SALT_SECRET": secrets.token_hex(32)}}

    def gateway(self, index: int) -> PartSpec:
        options, ports = self._options, self._ports[index]
        held = {"--http-listen-fd": ports.http_descriptor, "--listen-fd": ports.grpc_descriptor}
        descriptors = {flag: number for flag, number in held.items() if number is not None}
        host = options.gateway_host
        flags = (
            *("--http-listen", str(Address(host=host, port=ports.http))),
            *(_BEHIND_RELAYS if options.relays else ()),
            *(("--hold-connections", str(self._directory / "held")) if self._must_hold() else ()),
            *("--served-model-name", ",".join((options.served_model_name, *options.other_names))),
            *("--tokenizers", self._all("tokenizer", options.tokenizers)),
            *("--output-processors", self._all("output_processor", options.output_processors)),
            *self._coordinator(0),
            *(("--meshes", str(self._directory / MESHES)) if options.more_models else ()),
            *(("--page-kills", str(self._directory / CONTROL_SOCKET)) if options.page_kills else ()),
            *(word for flag, number in descriptors.items() for word in (flag, str(number))),
        )
        part = self._part("gateway", index, flags, listen=str(Address(host=host, port=ports.grpc)))
        return replace(part, descriptors=tuple(descriptors.values()))

    def relay(self, index: int, ports: GatewayPorts) -> PartSpec:
        """``ports``: its own."""
        options = self._options
        host = _LOOPBACK if options.gateway_host in ("0.0.0.0", "::") else options.gateway_host
        behind = [Address(host=host, port=each.grpc) for each in self._ports]
        flags: tuple[str, ...] = (
            *("--grpc-listen", str(Address(host=options.host, port=ports.grpc))),
            *("--grpc-gateways", ",".join(map(str, behind))),
        )
        held = {"--grpc-listen-fd": ports.grpc_descriptor}
        if options.has_public_relays:
            behind = [Address(host=host, port=each.http) for each in self._ports]
            flags += ("--https-listen", str(Address(host=options.host, port=ports.http)))
            flags += ("--http-gateways", ",".join(map(str, behind)))
            held["--https-listen-fd"] = ports.http_descriptor
        descriptors = {flag: number for flag, number in held.items() if number is not None}
        flags += tuple(word for flag, number in descriptors.items() for word in (flag, str(number)))
        return replace(self._part("relay", index, flags), descriptors=tuple(descriptors.values()))

    def _must_hold(self) -> bool:
        """Return whether gateways hold connections without a flag for it: else what a relay decrypts would end with
        its gateway."""
        given = self._options.flags.get("gateway", ())
        return self._options.has_public_relays and not any(each.startswith("--hold-connections") for each in given)

    def more_meshes(self) -> list[dict[str, object]]:
        """Return the tables of the file ``--meshes``."""
        options = self._options
        return [
            {
                "served_model_name": [model.name],
                "tokenizers": self._all("tokenizer", options.tokenizers, number).split(","),
                "output_processors": self._all("output_processor", options.output_processors, number).split(","),
                "coordinator": self._coordinator(number)[1],
            }
            for number, model in enumerate(self._models)
            if number
        ]

    def output_processor(self, index: int) -> PartSpec:
        number = index // self._options.output_processors
        return self._of_model(number, "output_processor", index, self._coordinator(number))

    def engine(self, index: int) -> PartSpec:
        number, place = divmod(index, len(self._roles))
        share, role, kv_socket = self._shares[index], self._roles[place], self._socket("engine", index, "-kv")
        flags: tuple[str, ...] = ("--role", role)
        asked = any(each.startswith("--kv-transports=") for each in self._options.flags.get("engine", ()))
        if role != "both" or asked:  # only these exchange KV blocks
            flags += ("--kv-listen", str(Address(path=str(kv_socket))))
        flags += ("--engines-on-host", str(len(self._shares)), "--place-on-host", str(index))
        flags += ("--num-threads", str(share.threads), "--warm-up-dir", str(self._directory / "warm-ups"))
        if share.cpus:  # of the worker only: the engine's own process answers while the worker computes
            # Bound as a whole, an engine answered from the core on which its worker computes: 520 and 545 tokens/s from
            # a prefill and a decode engine on two cores, and 660 with the worker alone bound.
            flags += ("--cpus", ",".join(map(str, share.cpus)))
        flags += self._rank_flags(number, place)
        part = self._of_model(number, "engine", index, (*self._coordinator(number), *flags))
        return replace(part, role=role, leftovers=(*part.leftovers, kv_socket))

    def _rank_flags(self, number: int, place: int) -> tuple[str, ...]:
        """Return the flags that name the rank of a model's engine in its data-parallel group, if it is in one."""
        ranks, role = self._options.ranks, self._roles[place]
        if ranks.size is None or role == "both":
            return ranks.flags(place, self._directory / f"data-parallel-{number}.sock")
        group, rank = divmod(place - self._roles.index(role), ranks.size)
        name = f"{role}-{group}"
        return ranks.flags(rank, self._directory / f"{name}-{number}.sock", name)

    def encoder(self, index: int) -> PartSpec:
        owners = [number for number, count in enumerate(self._options.encoder_counts) for _ in range(count)]
        flags = (*self._coordinator(owners[index]), "--tower-threads", str(self._shares[0].threads))
        return self._of_model(owners[index], "encoder", index, flags)

    def tokenizer(self, index: int) -> PartSpec:
        return self._of_model(index // self._options.tokenizers, "tokenizer", index)

    def coordinator(self, index: int) -> PartSpec:
        """Several coordinators of a model have one address, at which the active one listens: the one that has locked a
        file."""
        number = index // self._options.coordinators
        model = self._models[number].name
        if self._options.coordinators == 1:
            # No engine has joined another one before the mesh's first coordinator: it waits for none to come back.
            return replace(self._part("coordinator", index, ()), model=model, first_flags=("--settle-seconds", "0"))
        health, lock = self._socket("coordinator", index, "-health"), self._directory / f"coordinator-{number}.lock"
        flags = ("--lease", f"file:{lock}", "--health-listen", str(Address(path=str(health))))
        part = self._part("coordinator", index, flags, listen=self._coordinator(number)[1])
        return replace(part, leftovers=(health,), model=model)  # the other sockets may be those of the active one

    def _of_model(self, number: int, service: str, index: int, flags: tuple[str, ...] = ()) -> PartSpec:
        """Return a part that reads the files of a model."""
        model = self._models[number]
        named = ("--model", str(model.path), "--served-model-name", model.name)
        return replace(self._part(service, index, (*named, *flags)), model=model.name)

    def _coordinator(self, number: int) -> tuple[str, str]:
        """Return the flag that names the coordinator of a model."""
        return "--coordinator", self._listen("coordinator", number * self._options.coordinators)

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

    def _all(self, service: str, count: int, number: int = 0) -> str:
        """Return the addresses of a service's parts for a model."""
        return ",".join(self._listen(service, index) for index in range(number * count, (number + 1) * count))


_CORES_PER_FREE_ONE = 8
"""Of so many cores, engines leave one to the other parts of the mesh, the kernel's network threads and other programs:
threads of an engine wait for each other, so the one that shares its core slows all of them down."""


@dataclass(frozen=True)
class CoreShare:
    """The cores and threads of one engine."""

    cpus: tuple[int, ...]
    """The cores that it is bound to; empty: not bound."""
    threads: int
    """Compute threads, at least 1."""


def siblings(cpu: int, root: Path = Path("/sys/devices/system/cpu")) -> str:
    """Return what names the hardware threads of this one's core, as ``0,16``; its own number if the system does not."""
    try:
        return (root / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def divide_cores(
    engines: int, available: list[int] | None = None, siblings_of: Callable[[int], str] = siblings
) -> list[CoreShare]:
    """Return a share for each engine; sizes differ by at most one core, and no two have threads of the same core.

    From 8 cores on, one of 8 is left to the other parts. With too few cores, no engine is bound. A lone engine is not
    bound either: its threads, of which there are fewer than cores, move away from a busy core.
    """
    cpus = sorted(os.sched_getaffinity(0)) if available is None else available
    by_name: dict[str, list[int]] = {}
    for cpu in cpus:
        by_name.setdefault(siblings_of(cpu), []).append(cpu)
    # Whole cores with all of their hardware threads: neighbouring numbers may be the two threads of one core, and
    # engines bound to them would share it.
    cores = list(by_name.values())
    if len(cores) < engines:
        return [CoreShare((), 1)] * engines
    left = min(len(cores) // _CORES_PER_FREE_ONE, len(cores) - engines)
    cores = cores[left:]  # the first ones are those that interrupt handlers use most
    bounds = [i * len(cores) // engines for i in range(engines + 1)]
    shares = [tuple(itertools.chain(*cores[a:b])) for a, b in itertools.pairwise(bounds)]
    return [CoreShare(share if engines > 1 else (), len(share)) for share in shares]
