"""``make chart-check``: renders charts/tokenloom with Helm's own library, and compares it with what kustomize builds.

It runs in an environment of its own with ``helm-python-sdk`` and ``PyYAML``, because the library is large.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import helm_python  # type: ignore[import-not-found]
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tools.helm_chart import COMPONENTS, ONLY_WITH, OVERLAYS, Objects, build  # noqa: E402

CHART = ROOT / "charts" / "tokenloom"
DIGEST = f"sha256:{'a' * 64}"


class Chart:
    """Renders the chart with values."""

    def __init__(self, chart: Any) -> None:
        self._chart = chart

    def render(self, namespace: str = "tokenloom", release: str = "tokenloom", **values: object) -> Objects:
        texts = self._chart.render(values, name=release, namespace=namespace)
        found = [
            each for name, text in texts.items() if name.endswith(".yaml") for each in yaml.safe_load_all(text) if each
        ]
        objects = {f"{each['kind']}/{each['metadata']['name']}": each for each in found}
        assert len(objects) == len(found), "two objects have one name"
        return objects


def check_that_it_equals_the_overlays(chart: Chart) -> int:
    """Compare each overlay alone and with each component, and the overlay `hub`. Return the number of comparisons."""
    count = 0
    for overlay in OVERLAYS:
        for components in [(), *((component,) for component in components_of(overlay))]:
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
    check_prefixes(chart)
    check_engines(chart)
    larger = chart.render(objects={"StatefulSet/engine": {"spec": {"replicas": 4}}})
    assert larger["StatefulSet/engine"]["spec"].pop("replicas") == 4
    _same(larger["StatefulSet/engine"]["spec"]["template"], build("cpu")["StatefulSet/engine"]["spec"]["template"])
    assert not _is_accepted(chart, overlay="none")
    assert not _is_accepted(chart, components=["none"])
    assert not _is_accepted(chart, objects={"Pod/none": {}})


def check_prefixes(chart: Chart) -> None:
    """Check that two releases share no object and no pod in one namespace, and that each refers to its own."""
    for overlay in OVERLAYS:
        for components in ([], compatible(components_of(overlay))):
            first, second = (chart.render(release=name, overlay=overlay, components=components) for name in ("a", "b"))
            assert len(first) == len(second)
            assert not first.keys() & second.keys(), "two releases would have one object"
            assert json.dumps(first).replace("a-", "b-") == json.dumps(second).replace("a-", "b-")
            check_references(first, "a-")
            plain = chart.render(overlay=overlay, components=components)
            assert {key.replace("/a-", "/") for key in first} == plain.keys()
            assert 'namespace="a-' not in json.dumps(first).replace("\\", ""), "a query names another namespace"
    assert "Service/x-gateway" in chart.render(prefix="x-")
    assert "Service/gateway" in chart.render(release="a", prefix="")
    assert not _is_accepted(chart, prefix="Upper-")
    assert not _is_accepted(chart, prefix="without-hyphen-at-its-end")
    longest = "a" * 37  # with engine-prefill 52, and a StatefulSet's pods have labels that are 11 longer
    assert _is_accepted(chart, release=longest, overlay="disaggregated")
    assert not _is_accepted(chart, release=f"{longest}a", overlay="disaggregated")
    for release in ("1st", "with.dot"):
        assert not _is_accepted(chart, release=release), "a Service cannot be called so"
    renamed = chart.render(release="a", objects={"StatefulSet/engine": {"spec": {"minReadySeconds": 4}}})
    assert renamed["StatefulSet/a-engine"]["spec"]["minReadySeconds"] == 4


def check_references(objects: Objects, prefix: str) -> None:
    """Check that each host, selector and target of a release names something of the release."""
    services = {each["metadata"]["name"] for each in objects.values() if each["kind"] == "Service"}
    for key, each in objects.items():
        text = json.dumps(each)
        for host in re.findall(r"([\w.-]+):50051", text):
            assert host == "0.0.0.0" or host in services, f"{key} names {host}"
        for value in re.findall(r'"app.kubernetes.io/(?:name|part-of)": "([^"]+)"', text):
            assert value.startswith(prefix), f"{key} selects {value}"
        target = each.get("spec", {}).get("scaleTargetRef")
        assert target is None or f"{target['kind']}/{target['name']}" in objects, key
        for job in re.findall(r'job=\\"([^"\\]+)', text):
            assert job in services, f"{key} asks for {job}"


def check_engines(chart: Chart) -> None:
    """Check that numbers, resources and settings of engines reach all engines, or those that prefill or decode."""
    sized = chart.render(
        overlay="disaggregated",
        engines={"max": 9, "settings": {"TOKENLOOM_MAX_NUM_SEQS": 32, "TOKENLOOM_DRAIN_TIMEOUT": 60}},
        decode={"min": 3, "resources": {"limits": {"memory": "64Gi"}}},
    )
    scalers = {role: sized[f"HorizontalPodAutoscaler/engine-{role}"]["spec"] for role in ("prefill", "decode")}
    assert [(each["minReplicas"], each["maxReplicas"]) for each in scalers.values()] == [(2, 9), (3, 9)]
    (prefill,), (decode,) = (_containers(sized[f"StatefulSet/engine-{role}"]) for role in ("prefill", "decode"))
    assert decode["resources"] == {"limits": {"memory": "64Gi"}} != prefill["resources"]
    for container in (prefill, decode):
        values = [(each["name"], each.get("value")) for each in container["env"]]
        assert dict(values)["TOKENLOOM_MAX_NUM_SEQS"] == "32"
        assert [value for name, value in values if name == "TOKENLOOM_DRAIN_TIMEOUT"] == ["60"]
    assert all(sized[key] == each for key, each in build("disaggregated").items() if "engine-" not in key)
    all_engines, decoding = {"TOKENLOOM_A": 1, "TOKENLOOM_B": True}, {"TOKENLOOM_B": False}
    two = chart.render(overlay="disaggregated", engines={"settings": all_engines}, decode={"settings": decoding})
    (container,) = _containers(two["StatefulSet/engine-decode"])
    values = {each["name"]: each.get("value") for each in container["env"]}
    assert (values["TOKENLOOM_A"], values["TOKENLOOM_B"]) == ("1", "false"), "settings win one by one"
    assert not _is_accepted(chart, engines={"min": 0})
    assert not _is_accepted(chart, engines={"min": 9})
    assert not _is_accepted(chart, prefill={"min": 3})
    assert not _is_accepted(chart, components=["scale-to-zero"])
    assert not _is_accepted(chart, overlay="disaggregated", components=["engine-pool"])
    assert not _is_accepted(chart, overlay="keda", components=["engine-pool", "scale-to-zero"])
    assert not _is_accepted(chart, models=[{"name": "a"}], components=["engine-pool"])
    for overlay in ("cpu", "gpu"):
        both = ["engine-pool", "model-store"]
        _same(chart.render(overlay=overlay, components=both), build(overlay, *both))


def check_models(chart: Chart) -> None:
    """Check several models behind one gateway: each has a whole mesh of its own, and the gateway leads to all."""
    models: list[dict[str, Any]] = [
        {
            "name": "chat",
            "model": "org/large",
            "servedNames": ["chat", "org/large"],
            "components": ["encoder"],
            "settings": {"TOKENLOOM_MAX_MODEL_LEN": 32768},
            "engines": {"max": 16},
            "objects": {"StatefulSet/engine": {"spec": {"minReadySeconds": 4}}},
        },
        {"name": "small", "overlay": "keda-disaggregated", "components": ["scale-to-zero"]},
    ]
    shared = ["model-store", "cert-manager", "http-route", "service-monitors"]
    objects = chart.render("other", release="a", models=models, components=shared)
    check_meshes(objects)
    meshes = {"chat": ("cpu", "encoder"), "small": ("keda-disaggregated", "scale-to-zero")}
    for model, (overlay, component) in meshes.items():
        own = {key for key in objects if f"/a-{model}-" in key}
        alone = chart.render("other", release="a", overlay=overlay, components=[*shared, component])
        others = {key.replace("/a-", f"/a-{model}-") for key in alone} - own
        assert {key.replace(f"/a-{model}-", "/a-") for key in others} <= objects.keys(), "an object is not there"
    assert objects["ConfigMap/a-chat-tokenloom-model"]["data"] == {"TOKENLOOM_MODEL": "org/large"}
    assert objects["ConfigMap/a-small-tokenloom-model"]["data"] == {"TOKENLOOM_MODEL": "tokenloom-demo"}
    lengths = [objects[f"ConfigMap/a-{name}tokenloom-common"]["data"] for name in ("chat-", "small-", "")]
    assert [each.get("TOKENLOOM_MAX_MODEL_LEN") for each in lengths] == ["32768", None, None]
    assert objects["HorizontalPodAutoscaler/a-chat-engine"]["spec"]["maxReplicas"] == 16
    assert objects["StatefulSet/a-chat-engine"]["spec"]["minReadySeconds"] == 4
    queries = [each["metadata"]["query"] for each in objects["ScaledObject/a-small-engine-decode"]["spec"]["triggers"]]
    monitors = {key for key in objects if key.startswith("ServiceMonitor/")}
    assert {"ServiceMonitor/a-gateway", "ServiceMonitor/a-chat-engine", "ServiceMonitor/a-small-engine"} < monitors
    for key in monitors:
        selector = objects[key]["spec"]["selector"]["matchLabels"].items()
        chosen = [name for name, each in objects.items() if name.startswith("Service/") and selector <= _labels(each)]
        assert chosen or key.endswith("-encoder"), f"{key} reads nothing"
    of_gateways = 'namespace="other",job="a-gateway",model_name="small"'
    assert sum(of_gateways in query for query in queries) == 2, queries
    for wrong in (
        [{"name": "a"}, {"name": "a"}],
        [{"name": "a"}, {"name": "b", "servedNames": ["a"]}],
        [{"name": "A"}],
        [{"name": "a", "unknown": 1}],
        [{"name": "a", "components": ["scale-to-zero"]}],
        [{"name": "a", "components": ["encoder"]}, {"name": "a-from", "components": ["encoder"]}],
        [{"name": "a", "objects": {"Deployment/gateway": {}}}],
        [{"name": "a" * 30}],
    ):
        assert not _is_accepted(chart, release="release-x", models=wrong), wrong
    unset = {"TOKENLOOM_A": False, "TOKENLOOM_B": 0, "TOKENLOOM_C": ""}
    values = {"TOKENLOOM_A": True, "TOKENLOOM_B": 5, "TOKENLOOM_C": "text", "TOKENLOOM_D": 1}
    overruled = chart.render(settings=values, models=[{"name": "a", "settings": unset}])
    own = overruled["ConfigMap/a-tokenloom-common"]["data"]
    assert [own[name] for name in values] == ["false", "0", "", "1"], "false, 0 and an empty text are values"
    alone = chart.render(models=[{"name": "a"}])
    assert "ConfigMap/gateway-meshes" not in alone, "the options describe the only mesh"


def check_meshes(objects: Objects) -> None:
    """Check what the gateway of several models is told, and that its pods may reach what it names."""
    check_references(objects, "a-")
    (gateway,) = _containers(objects["Deployment/a-gateway"])
    told = {each["name"]: each.get("value") for each in gateway["env"]}
    assert told["TOKENLOOM_SERVED_MODEL_NAME"] == "chat,org/large"
    assert told["TOKENLOOM_TOKENIZERS"] == "dns:///a-chat-tokenizer:50051"
    assert told["TOKENLOOM_READY_WITHOUT_ENGINES"] == "true"
    file = Path(str(told["TOKENLOOM_MESHES"]))
    (mount,) = (each for each in gateway["volumeMounts"] if each["mountPath"] == str(file.parent))
    volumes = {each["name"]: each for each in objects["Deployment/a-gateway"]["spec"]["template"]["spec"]["volumes"]}
    source = objects[f"ConfigMap/{volumes[mount['name']]['configMap']['name']}"]
    assert json.loads(source["data"][file.name]) == {
        "mesh": [
            {
                "served_model_name": ["small"],
                "tokenizers": ["dns:///a-small-tokenizer:50051"],
                "output_processors": ["dns:///a-small-output-processor:50051"],
                "coordinator": "a-small-coordinator:50051",
            }
        ]
    }
    for model in ("chat", "small"):
        policy = objects[f"NetworkPolicy/a-{model}-gateway"]["spec"]
        assert policy["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "a-gateway"}
        (peers,) = (rule["to"] for rule in policy["egress"] if "to" in rule)
        names = {peer["podSelector"]["matchLabels"]["app.kubernetes.io/name"] for peer in peers}
        assert names == {f"a-{model}-{part}" for part in ("tokenizer", "output-processor", "coordinator")}
    leases = {
        each["value"]
        for key in objects
        if key.startswith("Deployment/") and key.endswith("-coordinator")
        for each in _containers(objects[key])[0]["env"]
        if each["name"] == "TOKENLOOM_LEASE"
    }
    assert leases == {"kubernetes:a-chat-coordinator", "kubernetes:a-small-coordinator"}


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


def components_of(overlay: str) -> list[str]:
    return [each for each in COMPONENTS if overlay in ONLY_WITH.get(each, OVERLAYS)]


def compatible(components: list[str]) -> list[str]:
    """Leave out what cannot be combined with others: each of them is rendered alone too."""
    return [each for each in components if each != "engine-pool"]


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
        check_models(Chart(loaded))
    print(f"Helm {helm_python.helm_sdk_version()} renders what kustomize builds, {count} times, and heeds every value.")
    return 0


def _common(*build_arguments: str) -> dict[str, Any]:
    return build(*build_arguments)["ConfigMap/tokenloom-common"]


def _image(workload: dict[str, Any]) -> str:
    (container,) = _containers(workload)
    return str(container["image"])


def _labels(each: dict[str, Any]) -> Any:
    return each["metadata"]["labels"].items()


def _containers(workload: dict[str, Any]) -> list[dict[str, Any]]:
    return list(workload["spec"]["template"]["spec"]["containers"])


def _same(found: object, expected: object) -> None:
    if found != expected:
        if isinstance(found, dict) and isinstance(expected, dict):
            keys = [key for key in {*found, *expected} if found.get(key) != expected.get(key)]
            found, expected = ({key: side.get(key) for key in keys} for side in (found, expected))
        raise AssertionError(f"Helm: {json.dumps(found)[:2000]}\nkustomize: {json.dumps(expected)[:2000]}")


if __name__ == "__main__":
    sys.exit(main())
