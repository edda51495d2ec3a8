"""Writes the objects of charts/tokenloom from the kustomizations in k8s/: ``python tools/helm_chart.py`` (kubectl).

Each line of a file is one object. ``files/OVERLAY.jsonl`` holds the objects of an overlay, ``files/COMPONENT.jsonl``
those that a component adds or changes. If these depend on the overlay, there is a file ``OVERLAY+COMPONENT.jsonl`` for
each. ``COMPONENT+COMPONENT.jsonl`` or ``OVERLAY+COMPONENT+COMPONENT.jsonl`` holds what both together change. The
Namespace is left out, because Helm has one of its own.
"""

import json
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
FILES = ROOT / "charts" / "tokenloom" / "files"
OVERLAYS = ("cpu", "gpu", "disaggregated", "keda", "keda-disaggregated", "planner")
COMPONENTS = (
    "model-store",
    "encoder",
    "relay",
    "http-route",
    "inference-pool",
    "engine-pool",
    "cert-manager",
    "otlp",
    "scale-to-zero",
    "service-monitors",
)
ONLY_WITH = {"scale-to-zero": ("keda", "keda-disaggregated"), "engine-pool": ("cpu", "gpu", "keda")}
"""The overlays for which a component is meant, if not for all."""

PAIRS = (("encoder", "model-store"), ("engine-pool", "model-store"))
"""Components of which the second one changes what the first one adds."""

Objects = dict[str, dict[str, Any]]
"""By kind and name."""


@cache
def build(overlay: str, *components: str) -> Objects:
    """Return the objects of an overlay with components, but for the Namespace. Raises ``CalledProcessError``."""
    with tempfile.TemporaryDirectory() as folder:
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [_from(folder, "overlays", overlay)],
            "components": [_from(folder, "components", component) for component in components],
        }
        Path(folder, "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        command = ["kubectl", "kustomize", "--load-restrictor", "LoadRestrictionsNone", folder]
        text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    objects = yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in objects if each["kind"] != "Namespace"}


def files() -> dict[str, str]:
    """Return the text of each file by its name."""
    overlays = {overlay: build(overlay) for overlay in OVERLAYS}
    texts = {f"{overlay}.jsonl": _lines(objects) for overlay, objects in overlays.items()}
    for component in COMPONENTS:
        fitting = ONLY_WITH.get(component, OVERLAYS)
        added = {overlay: _lines(_difference(build(overlay, component), overlays[overlay])) for overlay in fitting}
        texts |= _named(component, added)
    for first, second in PAIRS:
        together = {}
        for overlay in ONLY_WITH.get(first, OVERLAYS):
            apart = build(overlay, second) | build(overlay, first)
            together[overlay] = _lines(_difference(build(overlay, first, second), apart))
        texts |= _named(f"{first}+{second}", together)
    return texts


def main() -> None:
    FILES.mkdir(exist_ok=True)
    texts = files()
    for path in FILES.iterdir():
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        (FILES / name).write_text(text)


def _named(added: str, texts: dict[str, str]) -> dict[str, str]:
    """Return the files of what is added to overlays: one if it is the same for all of them. ``texts``: by overlay."""
    if tuple(texts) == OVERLAYS and len(set(texts.values())) == 1:
        return {f"{added}.jsonl": texts[OVERLAYS[0]]}
    return {f"{overlay}+{added}.jsonl": text for overlay, text in texts.items()}


def _difference(objects: Objects, base: Objects) -> Objects:
    return {key: each for key, each in objects.items() if base.get(key) != each}


def _lines(objects: Objects) -> str:
    return "".join(json.dumps(objects[key], sort_keys=True) + "\n" for key in sorted(objects))


def _from(folder: str, kind: str, name: str) -> str:
    return os.path.relpath(ROOT / "k8s" / kind / name, Path(folder).resolve())


if __name__ == "__main__":
    main()
