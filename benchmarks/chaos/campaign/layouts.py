"""Lays out the meshes of a campaign, and starts them with proxies in front of their parts where links are cut."""

import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from tokenloom.gpu_worker.checkpoint.files.text_part import media_switches
from tokenloom.model_files.checkpoint import reads_images, reads_sounds
from tokenloom.supervisor.layout import MeshOptions, parts_of
from tokenloom.supervisor.mesh import Mesh, MeshOutcome, supervise
from tokenloom.supervisor.output import LineCopier, WriteLine
from tokenloom.supervisor.part_spec import PartSpec
from tokenloom.supervisor.ports import held_ports
from tokenloom.supervisor.state_dir import mesh_directory

from ..clients.other_calls import ADAPTER_FLAGS, FLAGS
from ..faults.fault import IMAGES, SOUNDS, SPLIT, WHOLE, Kind
from ..faults.links import Links
from ..faults.part_link import Link
from .options import ChaosOptions

DRAIN_SECONDS = 30.0


class Media(StrEnum):
    """Names what the requests of a campaign show to its model."""

    NONE = "none"
    IMAGES = "images"
    VIDEOS = "videos"
    """And images."""
    SOUNDS = "sounds"
    TRANSCRIPTS = "transcripts"
    """Sounds, without chats."""


_KINDS = {Media.NONE: (), Media.IMAGES: IMAGES, Media.VIDEOS: IMAGES, Media.SOUNDS: SOUNDS, Media.TRANSCRIPTS: SOUNDS}


def media_of(checkpoint: Path) -> Media:
    """Return what a model reads besides text."""
    if not reads_images(checkpoint) and not reads_sounds(checkpoint):
        return Media.NONE
    config = json.loads((checkpoint / "config.json").read_text())
    if reads_images(checkpoint):
        switches = media_switches(config)
        return Media.VIDEOS if switches is not None and "video" in switches.kinds else Media.IMAGES
    return Media.TRANSCRIPTS if config["model_type"] == "whisper" else Media.SOUNDS


@dataclass(frozen=True)
class Layout:
    """One kind of mesh, with the victims in it."""

    name: str
    kinds: tuple[Kind, ...]
    mesh: MeshOptions


@dataclass(frozen=True)
class Target:
    """A running mesh as the load and the faults see it."""

    mesh: Mesh
    http: list[str]
    """The gateways' HTTP addresses."""
    grpc: list[str]
    """The gateways' gRPC addresses."""
    links: Mapping[str, Link]
    """The link of each part by name; empty: no proxies."""


def layouts_of(options: ChaosOptions, *, is_patient: bool = False) -> list[Layout]:
    """Return the layouts that the options ask for. ``is_patient``: gateways let requests wait for as long as they may
    take, instead of refusing those that would wait for too long."""
    found = []
    media = media_of(options.checkpoint)
    more = _KINDS[media]
    if options.layout in ("both", "whole"):
        # The workers are processes of their own, so that they can be victims.
        engine = (*_engine_flags(options), "--distributed-executor-backend", "mp")
        kinds = [kind for kind in WHOLE if media is not Media.TRANSCRIPTS or not kind.is_of_texts]
        mesh = _mesh(options, engine, engines=options.parts, is_patient=is_patient)
        found.append(Layout("whole", (*kinds, *more), mesh))
    # A model that transcribes computes whole requests only.
    if options.layout == "split" or (options.layout == "both" and media is not Media.TRANSCRIPTS):
        engine = _engine_flags(options)
        mesh = _mesh(options, engine, prefill=options.parts, decode=options.parts, is_patient=is_patient)
        found.append(Layout("split", (*SPLIT, *more), mesh))
    return found


def _engine_flags(options: ChaosOptions) -> tuple[str, ...]:
    flags: tuple[str, ...] = FLAGS if options.model else (*FLAGS, *ADAPTER_FLAGS)
    if options.worker == "hash":
        flags += ("--worker", "hash", "--hash-step-seconds", str(options.step_seconds))
    if options.bfloat16:
        flags += ("--dtype", "bfloat16")
    # A step that verifies drafts has several rows of a request, whose sums would differ from those of a row alone: 8 of
    # 1,671 answers in float32 took the other one of two tokens that were nearly equally likely.
    if options.bfloat16 or (options.drafts and options.worker == "model" and not options.model):
        flags += ("--batch-invariant",)
    if options.link_delay:
        flags += ("--kv-transports", "socket")  # shared memory has no delay
    if options.drafts:
        flags += ("--speculative-config", f'{{"method":"ngram","num_speculative_tokens":{options.drafts}}}')
    return flags


def _mesh(
    options: ChaosOptions,
    engine: tuple[str, ...],
    *,
    engines: int = 1,
    prefill: int = 0,
    decode: int = 0,
    is_patient: bool,
) -> MeshOptions:
    return MeshOptions(
        model=options.checkpoint,
        served_model_name=options.model_name,
        engines=engines,
        prefill=prefill,
        decode=decode,
        encoders=options.parts,
        tokenizers=options.parts,
        output_processors=options.parts,
        gateways=options.parts,
        port=0,
        drain_timeout=DRAIN_SECONDS,
        flags={
            "engine": engine,
            # Short prompts too are prefilled and decoded on different engines.
            "coordinator": ("--pd-threshold", "0") if prefill else (),
            # A mesh that has just been stopped is slow, not overloaded: what it refuses would count as failed.
            "gateway": ("--max-queue-seconds", str(options.timeout)) if is_patient else (),
        },
        common_flags=("--log-level", "warning"),
    )


async def run_layout(
    layout: Layout,
    chosen: ChaosOptions,
    *,
    cuts_links: bool,
    write_line: WriteLine,
    work: Callable[[Target], Awaitable[None]],
) -> MeshOutcome:
    """Start the mesh, run ``work`` once every part serves, and stop the mesh. Raises as ``run_mesh_in_loop``.

    ``cuts_links``: the faults need proxies in front of the parts.
    """
    options = layout.mesh
    with_proxies = cuts_links or chosen.link_delay > 0
    output = LineCopier(write_line)
    with held_ports(options.host, options.gateways, 0, 0) as ports, mesh_directory() as directory:
        async with Links(chosen.link_delay) as links:
            holds = chosen.hold_connections
            specs = [_of_campaign(spec, Path(directory), holds) for spec in parts_of(options, Path(directory), ports)]
            if with_proxies:
                specs = [spec if spec.service == "gateway" else await links.in_front_of(spec) for spec in specs]
            mesh = Mesh(specs, directory, output, port=ports[0].http, drain_timeout=options.drain_timeout)

            async def once_serving(mesh: Mesh) -> None:
                await mesh.wait_serving()
                await work(await _target(mesh, links, with_proxies=with_proxies))

            with contextlib.closing(output):
                return await supervise(mesh, once_serving)


def _of_campaign(spec: PartSpec, directory: Path, holds: bool) -> PartSpec:
    """Give each gateway a folder of its own for batches, and one that all share if they hold connections."""
    if spec.service != "gateway":
        return spec
    flags: tuple[str, ...] = ("--batch-dir", str(directory / f"batches-{spec.index}"))
    if holds:
        # With copies: until a gateway is back, an output processor may be killed too.
        flags += ("--hold-connections", str(directory / "held"), "--journal-copies", "2")
    return replace(spec, command=(*spec.command, *flags))


async def _target(mesh: Mesh, links: Links, *, with_proxies: bool) -> Target:
    http, grpc = [], []
    for part in mesh.parts:
        if part.spec.service != "gateway":
            continue
        assert part.state is not None
        assert part.state.http is not None
        addresses = [part.state.http, part.state.address]
        if with_proxies:
            addresses = await links.in_front_of_gateway(part.spec.name, addresses)
        http.append(addresses[0])
        grpc.append(addresses[1])
    return Target(mesh, http, grpc, links.by_part)
