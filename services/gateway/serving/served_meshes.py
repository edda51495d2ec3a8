"""Holds the meshes behind a gateway and finds the one that serves a model."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily

from tokenloom.request import errors
from tokenloom.services.runtime.host.health import Health

from ..records.model_names import LISTING, MAX_QUOTED, NamedAdapter
from ..settings.mesh_spec import MeshSpec
from .mesh_health import ENCODER, PARTS, PUBLISH_SECONDS, PartState
from .served_mesh import ServedMesh

MAX_NAMED = 16
"""Limits the models that an error names."""
_AWAY = {part: PartState(int(part == "gateway"), 1, is_needed=part != "coordinator") for part in PARTS}
"""The parts of a mesh that is not connected yet."""


class ServedMeshes:
    """Holds a mesh for each model. Requests reach a mesh as soon as it is connected, whatever state the others are in.

    Attributes:
        specs: The meshes that should be connected, in the order of the options.
    """

    def __init__(self, specs: Sequence[MeshSpec]) -> None:
        self.specs = specs
        self._draining = False
        self._by_spec: dict[MeshSpec, ServedMesh] = {}
        self._by_name: dict[str, ServedMesh] = {}
        self._connected = asyncio.Event()

    def __iter__(self) -> Iterator[ServedMesh]:
        """Yield the meshes that are connected, in the order of the options."""
        return iter([self._by_spec[spec] for spec in self.specs if spec in self._by_spec])

    @property
    def is_one(self) -> bool:
        """Whether the gateway has a single mesh."""
        return len(self.specs) == 1

    @property
    def first(self) -> ServedMesh:
        """The first mesh that is connected."""
        return next(iter(self))

    @property
    def names(self) -> list[str]:
        """The names of all models, those of a mesh that is not connected yet included."""
        return [name for spec in self.specs for name in self._names_of(spec)]

    def add(self, spec: MeshSpec, mesh: ServedMesh) -> None:
        """Serve a mesh that was connected."""
        mesh.health.draining = self._draining
        self._by_spec[spec] = mesh
        self._by_name |= dict.fromkeys(mesh.names, mesh)
        self._connected.set()

    async def wait_connected(self) -> None:
        """Return once any mesh is connected."""
        await self._connected.wait()

    def find(self, name: object) -> tuple[ServedMesh, NamedAdapter | None]:
        """Return the mesh that serves a model or an adapter, and the adapter. Raises as :meth:`pick`."""
        mesh = self.pick(name)
        return mesh, mesh.models.find(name)

    def pick(self, name: object) -> ServedMesh:
        """Return the mesh that serves a model or an adapter; None names the only one.

        Raises ``InvalidArgument`` without a name if there are several, and for the name of adapters of several models,
        ``ModelNotFound`` for an unknown one and ``Unavailable`` for one whose mesh is not connected yet.
        """
        if name is None:
            if self.is_one:
                return self.first
            raise errors.InvalidArgument(f"model is required: this gateway serves {self._listed()}", "model")
        if not isinstance(name, str):
            raise errors.InvalidArgument("model must be a string", "model")
        # A model is found among whole meshes. A coordinator that knew several models would check the model in each of
        # its answers, and the failure of one model could reach another.
        if (mesh := self._by_name.get(name)) is not None:
            return mesh
        having = [mesh for mesh in self if mesh.models.has(name)]
        if len(having) == 1:
            return having[0]
        if having:
            right = " or ".join(repr(mesh.models.answers_as(name)) for mesh in having)
            raise errors.InvalidArgument(f"{name!r} is an adapter of several models; send {right}", "model")
        if (mesh := self._by_name.get(model := name.rpartition(":")[0])) is not None:
            raise mesh.models.not_served(name)
        if name in self.names or model in self.names:
            raise errors.Unavailable(f"The mesh of model {name[:MAX_QUOTED]!r} does not answer; retry.")
        message = f"model {name[:MAX_QUOTED]!r} is not served; {LISTING} the served models: {self._listed()}"
        raise errors.ModelNotFound(message, field="model")

    def name_of(self, name: str) -> str:
        """Return what answers to requests for a model say, or the first model's name if ``name`` is unknown."""
        try:
            return self.pick(name).models.answers_as(name)
        except errors.TokenloomError:
            return self.first.model

    def listed(self) -> list[str]:
        """Return the names of all models, and of the adapters that a request can name."""
        adapters = [name for mesh in self for name in mesh.models.adapters()]
        return self.names + [name for name in adapters if adapters.count(name) == 1 and name not in self.names]

    def states(self) -> Mapping[str, tuple[Mapping[str, PartState], list[str]]]:
        """Return by model, under its first name, the parts of its mesh and those without which it does not answer."""
        states: dict[str, tuple[Mapping[str, PartState], list[str]]] = {}
        for spec in self.specs:
            mesh = self._by_spec.get(spec)
            name = self._names_of(spec)[0]
            if mesh is None:
                states[name] = (
                    _AWAY,
                    [part for part, state in _AWAY.items() if not state.num_serving and state.is_needed],
                )
            else:
                states[name] = mesh.health.parts(), mesh.health.missing()
        return states

    def missing(self) -> list[str]:
        """Return the parts without which no model is answered now; empty when any is."""
        missing = [missing for _, missing in self.states().values()]
        return [] if not all(missing) else [part for part in (*PARTS, ENCODER) if any(part in each for each in missing)]

    async def publish(self, health: Health) -> None:
        """Make gRPC health follow whether requests are answered, until cancelled."""
        while True:
            await health.set_answering(not self.missing())
            states = [(parts[ENCODER], missing) for parts, missing in self.states().values() if ENCODER in parts]
            if states:
                await health.set_media(any(part.num_serving and not missing for part, missing in states))
            await asyncio.sleep(PUBLISH_SECONDS)

    def cancel(self, request_id: str, tenant: str) -> None:
        """End a request that its client can resume, in whichever mesh it runs."""
        for mesh in self:
            mesh.generator.cancel(request_id, tenant)

    def begin_drain(self) -> None:
        """Report that this gateway accepts no more requests."""
        self._draining = True
        for mesh in self:
            mesh.health.draining = True

    async def end_of_present(self) -> None:
        """Return when the generations that are open now have ended; new ones are still admitted. To be called once."""
        await asyncio.gather(*(mesh.generator.end_of_present() for mesh in self))

    async def drain(self) -> None:
        """Refuse new generations, and return when none is open."""
        await asyncio.gather(*(mesh.generator.drain() for mesh in self))

    def leave_resumable(self) -> None:
        """End the calls whose clients can continue through another gateway."""
        for mesh in self:
            mesh.generator.leave_resumable()

    async def close(self) -> None:
        """End the requests that run without a client."""
        for mesh in self:
            await mesh.generator.close()

    def _names_of(self, spec: MeshSpec) -> Sequence[str]:
        return spec.names if spec.names else self._by_spec[spec].names

    def _listed(self) -> str:
        names = self.names
        return ", ".join(names[:MAX_NAMED]) + (", …" if len(names) > MAX_NAMED else "")


@dataclass(frozen=True, slots=True)
class PartGauges:
    """Collects a gauge for each part of each mesh, those that are not connected yet included."""

    meshes: ServedMeshes

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return the gauges now."""
        text = (
            "1 while no replica of the part answers; requests continue without the coordinator, and those of text "
            "without encoders. With --ready-without-engines no engine is missing: none may be needed."
        )
        missing = GaugeMetricFamily("tokenloom_part_missing", text, labels=["part", "model_name"])
        for model, (parts, _) in self.meshes.states().items():
            for part, state in parts.items():
                missing.add_metric([part, model], not state.num_serving and not state.may_be_away)
        yield missing

    describe = collect  # the name, so that a second metric with it is refused
