"""What a kustomization builds, and the parts of it that the checks look at."""

import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2] / "k8s"
KUSTOMIZATIONS = tuple(
    sorted(
        str(path.parent.relative_to(ROOT))
        for path in ROOT.rglob("kustomization.yaml")
        if "components" not in path.parts
    )
)
WHOLE = (
    "base",
    *(f"overlays/{name}" for name in ("cpu", "gpu", "disaggregated", "keda", "keda-disaggregated", "large")),
)
"""Those that are a mesh without components."""

Object = dict[str, Any]


@cache
def build(kustomization: str) -> tuple[Object, ...]:
    """Its objects."""
    command = ["kubectl", "kustomize", str(ROOT / kustomization)]
    built = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert not built.stderr, built.stderr
    return tuple(yaml.load_all(built.stdout, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


@dataclass(frozen=True)
class Workload:
    """A Deployment, StatefulSet or Job of one container."""

    source: Object

    @property
    def name(self) -> str:
        return str(self.source["metadata"]["name"])

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.source["spec"]["template"]["metadata"]["labels"])

    @property
    def part(self) -> str:
        return self.labels["app.kubernetes.io/name"]

    @property
    def pod(self) -> Object:
        return dict(self.source["spec"]["template"]["spec"])

    @property
    def container(self) -> Object:
        (container,) = self.pod["containers"]
        return dict(container)

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    @property
    def environment(self) -> dict[str, str | None]:
        """Values as they are written; None for one that the cluster fills in."""
        return {entry["name"]: entry.get("value") for entry in self.container["env"]}


def of_kind(objects: tuple[Object, ...], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] in kinds]


def workloads(objects: tuple[Object, ...]) -> list[Workload]:
    return [Workload(each) for each in of_kind(objects, "Deployment", "StatefulSet")]


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()
