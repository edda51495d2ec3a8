"""charts/tokenloom holds the objects that kustomize builds today; ``make chart-check`` renders it with Helm."""

import json
import tomllib

import pytest
import yaml

from tools.helm_chart import COMPONENTS, FILES, ONLY_WITH, OVERLAYS, PAIRS, ROOT, Objects, build

CHART = FILES.parent


def _read(name: str) -> Objects:
    path = FILES / f"{name}.jsonl"
    objects = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {f"{each['kind']}/{each['metadata']['name']}": each for each in objects}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_the_one_that_kustomize_builds(overlay: str) -> None:
    assert _read(overlay) == build(overlay)


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_adds_what_it_adds_in_kustomize(component: str) -> None:
    for overlay in ONLY_WITH.get(component, ("cpu",)):
        assert _read(overlay) | _read(component) | _read(f"{overlay}+{component}") == build(overlay, component)


@pytest.mark.parametrize("pair", PAIRS)
def test_two_components_add_what_they_add_in_kustomize(pair: tuple[str, str]) -> None:
    for overlay in ONLY_WITH.get(pair[0], ("cpu",)):
        both = "+".join(pair)
        objects = _read(overlay)
        for name in (*pair, *(f"{overlay}+{component}" for component in pair), both, f"{overlay}+{both}"):
            objects |= _read(name)
        assert objects == build(overlay, *pair)


def test_there_are_no_other_files() -> None:
    names = {path.stem for path in FILES.iterdir()}
    known = {*OVERLAYS, *COMPONENTS, *(f"{overlay}+{component}" for overlay in OVERLAYS for component in COMPONENTS)}
    known |= {name for pair in map("+".join, PAIRS) for name in (pair, *(f"{overlay}+{pair}" for overlay in OVERLAYS))}
    assert names <= known


def test_its_version_is_that_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert chart["version"] == chart["appVersion"] == version
    tags = yaml.safe_load((ROOT / "k8s" / "components" / "release" / "kustomization.yaml").read_text())["images"]
    assert {each["newTag"] for each in tags} == {version}


def test_its_values_are_those_of_the_manifests() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    objects = build(values["overlay"], "model-store")
    assert objects["ConfigMap/tokenloom-model"]["data"] == {"TOKENLOOM_MODEL": values["model"]}
    assert objects["ConfigMap/tokenloom-hub"]["data"] == {"HF_ENDPOINT": values["hubEndpoint"]}
