"""``make chart-check``: renders charts/tokenloom with Helm's own library, and compares it with what kustomize builds.

It runs in an environment of its own with ``helm-python-sdk`` and ``PyYAML``, because the library is large.
"""

import json
import sys
from pathlib import Path
from typing import Any

import helm_python  # type: ignore[import-not-found]
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tools.helm_chart import COMPONENTS, OVERLAYS, Objects, build  # noqa: E402

CHART = ROOT / "charts" / "tokenloom"
DIGEST = f"sha256:{'a' * 64}"


class Chart:
    """Renders the chart with values."""

    def __init__(self, chart: Any) -> None:
        self._chart = chart

    def render(self, namespace: str = "tokenloom", **values: object) -> Objects:
        (text,) = self._chart.render(values, name="release", namespace=namespace).values()
        found = [each for each in yaml.safe_load_all(text) if each]
        objects = {f"{each['kind']}/{each['metadata']['name']}": each for each in found}
        assert len(objects) == len(found), "two objects have one name"
        return objects


def check_that_it_equals_the_overlays(chart: Chart) -> int:
    """Compare each overlay alone and with each component, and the overlay `hub`. Return the number of comparisons."""
    count = 0
    for overlay in OVERLAYS:
        for components in [(), *((component,) for component in COMPONENTS)]:
            _same(chart.render(overlay=overlay, components=list(components)), build(overlay, *components))
            count += 1
    every = ("model-store", "http-route", "cert-manager", "otlp")
    otlp = {"TOKENLOOM_OTLP_ENDPOINT": "http://otel-collector.observability:4317"}
    _same(chart.render(overlay="disaggregated", components=list(every)), build("disaggregated", *every))
    _same(chart.render(overlay="cpu", settings=otlp)["ConfigMap/tokenloom-common"], _common("cpu", "otlp"))
    _same(chart.render(overlay="cpu", components=["model-store"], model="Qwen/Qwen3-0.6B"), build("hub"))
    return count + 3


def check_values(chart: Chart) -> None:
    """Check that each value changes what it names, and nothing else."""
    plain, namespace = build("keda-disaggregated"), "other"
    moved = chart.render(namespace, overlay="keda-disaggregated")
    text = json.dumps(plain).replace('"namespace": "tokenloom"', '"namespace": "other"')
    _same(moved, json.loads(text.replace(r"namespace=\"tokenloom\"", r"namespace=\"other\"")))
    images = chart.render(registry="registry.example/team/", tag="1.2.3", digests={"engine-cpu": DIGEST})
    _same(_image(images["Deployment/gateway"]), "registry.example/team/tokenloom/service:1.2.3")
    _same(_image(images["StatefulSet/engine"]), f"registry.example/team/tokenloom/engine-cpu@{DIGEST}")
    _same(_image(chart.render(tag=20261128)["Deployment/gateway"]), "tokenloom/service:20261128")
    check_texts(chart)
    larger = chart.render(objects={"StatefulSet/engine": {"spec": {"replicas": 4}}})
    assert larger["StatefulSet/engine"]["spec"].pop("replicas") == 4
    _same(larger["StatefulSet/engine"]["spec"]["template"], build("cpu")["StatefulSet/engine"]["spec"]["template"])
    assert not _is_accepted(chart, overlay="none")
    assert not _is_accepted(chart, components=["none"])
    assert not _is_accepted(chart, objects={"Pod/none": {}})


def check_texts(chart: Chart) -> None:
    """Check that numbers and booleans become texts in ConfigMaps, as Kubernetes asks for, and nothing else does."""
    settings = {
        "TOKENLOOM_A": 30,
        "TOKENLOOM_B": True,
        "TOKENLOOM_C": 1_000_000,
        "TOKENLOOM_D": 0.5,
        "TOKENLOOM_E": "x",
    }
    texts = {
        "TOKENLOOM_A": "30",
        "TOKENLOOM_B": "true",
        "TOKENLOOM_C": "1000000",
        "TOKENLOOM_D": "0.5",
        "TOKENLOOM_E": "x",
    }
    plain = build("cpu")["ConfigMap/tokenloom-common"]["data"]
    _same(chart.render(settings=settings)["ConfigMap/tokenloom-common"]["data"], plain | texts)
    own = {"ConfigMap/tokenloom-common": {"data": settings}}
    _same(chart.render(objects=own)["ConfigMap/tokenloom-common"]["data"], plain | texts)
    _same(chart.render(model=7)["ConfigMap/tokenloom-model"]["data"], {"TOKENLOOM_MODEL": "7"})
    assert not _is_accepted(chart, settings={"TOKENLOOM_A": None})
    assert not _is_accepted(chart, settings={"TOKENLOOM_A": {"b": 1}})
    assert not _is_accepted(chart, settings={"TOKENLOOM_A": [1]})


def _is_accepted(chart: Chart, **values: object) -> bool:
    try:
        chart.render(**values)  # type: ignore[arg-type]
    except helm_python.HelmError:
        return False
    return True


def main() -> int:
    errors = helm_python.lint(str(CHART))["errors"]
    assert not errors, errors
    with helm_python.Chart.load(str(CHART)) as loaded:
        count = check_that_it_equals_the_overlays(Chart(loaded))
        check_values(Chart(loaded))
    print(f"Helm {helm_python.helm_sdk_version()} renders what kustomize builds, {count} times, and heeds every value.")
    return 0


def _common(*build_arguments: str) -> dict[str, Any]:
    return build(*build_arguments)["ConfigMap/tokenloom-common"]


def _image(workload: dict[str, Any]) -> str:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    return str(container["image"])


def _same(found: object, expected: object) -> None:
    if found != expected:
        if isinstance(found, dict) and isinstance(expected, dict):
            keys = [key for key in {*found, *expected} if found.get(key) != expected.get(key)]
            found, expected = ({key: side.get(key) for key in keys} for side in (found, expected))
        raise AssertionError(f"Helm: {json.dumps(found)[:2000]}\nkustomize: {json.dumps(expected)[:2000]}")


if __name__ == "__main__":
    sys.exit(main())
