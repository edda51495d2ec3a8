"""Shows which parts of the meshes are missing."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily

from .mesh_health import PARTS
from .served_meshes import ServedMeshes


@dataclass(frozen=True, slots=True)
class PartGauges:
    """Collects a gauge for each part of each mesh, those that are not connected yet included."""

    meshes: ServedMeshes

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return the gauges now."""
        text = "1 while no replica of the part answers; requests continue without the coordinator only."
        missing = GaugeMetricFamily("tokenloom_part_missing", text, labels=["part", "model_name"])
        for model, (parts, _) in self.meshes.states().items():
            for part in PARTS:
                missing.add_metric([part, model], not parts[part].num_serving)
        yield missing

    describe = collect  # the name, so that a second metric with it is refused
