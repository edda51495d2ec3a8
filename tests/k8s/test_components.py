"""What each component adds to an overlay."""

from functools import cache

import kubernetes_validate
import pytest
import yaml

from tests.k8s.cluster import ROOT, Object, Workload, selects
from tokenloom.services.gateway.settings.gateway_settings import GatewaySettings
from tokenloom.services.relay.relay_settings import RelaySettings
from tokenloom.services.runtime.peers.certificate_files import dns_name
from tokenloom.supervisor.certificates import PARTS
from tools import helm_chart

CUSTOM = {
    "Certificate": "cert-manager.io/v1",
    "GRPCRoute": "gateway.networking.k8s.io/v1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
    "InferencePool": "inference.networking.k8s.io/v1",
    "Issuer": "cert-manager.io/v1",
    "ServiceMonitor": "monitoring.coreos.com/v1",
}
READERS = ("Deployment/tokenizer", "Deployment/output-processor", "StatefulSet/engine")
"""The workloads that read the model's files."""


@cache
def build(*components: str) -> helm_chart.Objects:
    return helm_chart.build("cpu", *components)


def test_every_component_is_in_the_chart() -> None:
    folders = {path.name for path in (ROOT / "components").iterdir()}
    assert folders - {"pods", "release"} == set(helm_chart.COMPONENTS)


@pytest.mark.parametrize("component", helm_chart.COMPONENTS)
def test_what_a_component_adds_is_valid_and_in_the_namespace(component: str) -> None:
    objects, base = build(component), build()
    added = {key: each for key, each in objects.items() if base.get(key) != each}
    assert added
    assert objects.keys() >= base.keys()
    for each in added.values():
        assert each["metadata"]["namespace"] == "tokenloom"
        if each["kind"] in CUSTOM:
            assert each["apiVersion"] == CUSTOM[each["kind"]]
        else:
            kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)


def test_one_job_downloads_the_model_and_no_other_pod_reaches_the_hub() -> None:
    objects = build("model-store")
    job = Workload(objects["Job/model-fetch"])
    assert job.container["args"] == ["tokenloom.cli.main", "fetch", "$(TOKENLOOM_MODEL)"]
    assert job.environment["HF_HUB_OFFLINE"] == "0"
    assert {"name": "models", "mountPath": "/hub"} in job.container["volumeMounts"]
    outside = [key for key, each in objects.items() if each["kind"] == "NetworkPolicy" and "ipBlock" in str(each)]
    assert outside == ["NetworkPolicy/model-fetch"]
    chosen = objects[outside[0]]["spec"]["podSelector"]["matchLabels"]
    pods = [Workload(each) for each in objects.values() if each["kind"] in ("Deployment", "StatefulSet", "Job")]
    assert [pod.name for pod in pods if selects(chosen, pod.labels)] == ["model-fetch"]
    secrets = [pod.name for pod in pods if "tokenloom-hub-token" in str(pod.pod)]
    assert secrets == ["model-fetch"]


def test_parts_wait_for_what_they_need_of_the_model() -> None:
    objects = build("model-store")
    for key, each in objects.items():
        if each["kind"] not in ("Deployment", "StatefulSet"):
            continue
        pod = Workload(each)
        mounts = [mount for mount in pod.container["volumeMounts"] if mount["name"] == "models"]
        assert (key in READERS) == bool(mounts) == ("initContainers" in pod.pod)
        if key in READERS:
            (wait,) = pod.pod["initContainers"]
            assert mounts == [{"name": "models", "mountPath": "/hub", "readOnly": True}]
            assert mounts[0] in wait["volumeMounts"]
            assert wait["args"][:4] == ["tokenloom.cli.main", "fetch", "$(TOKENLOOM_MODEL)", "--wait"]
            assert ("--no-weights" in wait["args"]) == (pod.part != "engine")


@pytest.mark.parametrize("key", ["Job/model-fetch", *READERS])
def test_containers_of_the_model_store_may_do_nothing_else(key: str) -> None:
    pod = Workload(build("model-store")[key])
    assert pod.pod["securityContext"]["runAsNonRoot"] is True
    for container in [pod.container, *pod.pod.get("initContainers", ())]:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]


def test_the_volume_is_where_the_images_look_for_hub_ids() -> None:
    assert "ENV HF_HUB_CACHE=/hub HF_HUB_OFFLINE=1\n" in (ROOT.parent / "Dockerfile").read_text()


def test_the_overlay_hub_is_cpu_with_the_model_store() -> None:
    objects = helm_chart.build("hub")
    model = objects.pop("ConfigMap/tokenloom-model")
    assert model["data"] == {"TOKENLOOM_MODEL": "Qwen/Qwen3-0.6B"}
    assert objects == {key: each for key, each in build("model-store").items() if key != "ConfigMap/tokenloom-model"}


def test_the_overlay_images_is_cpu_with_encoders_and_a_model_that_reads_images() -> None:
    objects, parts = helm_chart.build("images"), build("encoder", "model-store")
    model = objects.pop("ConfigMap/tokenloom-model")["data"]["TOKENLOOM_MODEL"]
    assert objects == {key: each for key, each in parts.items() if key != "ConfigMap/tokenloom-model"}
    rows = (ROOT.parent / "docs" / "reference" / "models.md").read_text()
    assert f"| {model} | built in |" in rows


def test_cert_manager_makes_the_certificate_of_each_part() -> None:
    objects = build("cert-manager")
    made = {
        each["spec"]["secretName"]: each["spec"]
        for each in objects.values()
        if each["kind"] == "Certificate" and not each["spec"].get("isCA")
    }
    assert {name: spec["dnsNames"] for name, spec in made.items()} == {
        f"tokenloom-{part.replace('_', '-')}-tls": [dns_name(part)] for part in PARTS
    }
    for spec in made.values():
        assert spec["usages"] == ["digital signature", "server auth", "client auth"]
        assert spec["issuerRef"] == {"name": "tokenloom", "kind": "Issuer"}
    authority = objects["Certificate/tokenloom-ca"]["spec"]["secretName"]
    assert objects["Issuer/tokenloom"]["spec"]["ca"]["secretName"] == authority
    assert authority not in str(build())


def test_relays_reach_gateways_and_are_reached_by_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = build("relay")
    relay, common = Workload(objects["Deployment/relay"]), objects["ConfigMap/tokenloom-common"]["data"]
    for name, value in (common | {k: v for k, v in relay.environment.items() if v is not None}).items():
        monkeypatch.setenv(name, value)
    settings = RelaySettings.load(relay.container["args"][1:])
    host, _, port = settings.grpc_gateways[0].partition(":")
    assert int(port) in {each["port"] for each in objects[f"Service/{host}"]["spec"]["ports"]}
    (clients, metrics) = objects["Service/relay"]["spec"]["ports"]
    assert (settings.grpc_listen, clients["port"]) == ("0.0.0.0:9443", 9443)
    assert settings.health_listen.endswith(":50052")
    assert settings.metrics_listen.endswith(f":{metrics['port']}")
    policy = objects["NetworkPolicy/relay"]["spec"]
    assert selects(policy["podSelector"]["matchLabels"], relay.labels)
    assert policy["ingress"][0] == {"ports": [{"port": 9443}]}
    assert policy["egress"][1]["to"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "gateway"}}}]
    assert "Deployment/relay" not in build()


@pytest.mark.parametrize("component", ["http-route", "inference-pool"])
def test_routes_lead_to_ports_of_the_gateway(component: str) -> None:
    objects = build(component)
    ports = {port["port"] for port in objects["Service/gateway"]["spec"]["ports"]}
    labels = Workload(objects["Deployment/gateway"]).labels
    for key, each in objects.items():
        for rule in each["spec"]["rules"] if key.endswith("Route/gateway") else ():
            (backend,) = rule["backendRefs"]
            assert backend["name"] == "gateway"
            assert backend.get("kind") == "InferencePool" or backend["port"] in ports
        if each["kind"] == "InferencePool":
            assert selects(each["spec"]["selector"]["matchLabels"], labels)
            assert {port["number"] for port in each["spec"]["targetPorts"]} <= ports


def test_a_gateway_beside_each_engine_stands_for_it_at_an_endpoint_picker(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = build("engine-pool")
    template = objects["StatefulSet/engine"]["spec"]["template"]
    pod = template["spec"]
    engine, gateway = pod["containers"]
    taken = [port["containerPort"] for container in (engine, gateway) for port in container["ports"]]
    assert len(set(taken)) == len(taken), "containers of a pod share its ports"
    identity = {"name": "TOKENLOOM_INSTANCE_ID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    assert identity in engine["env"]
    for name, value in objects["ConfigMap/tokenloom-common"]["data"].items():
        monkeypatch.setenv(name, value)
    for each in gateway["env"]:
        monkeypatch.setenv(each["name"], each.get("value", "engine-0").replace("$(POD_NAME)", "engine-0"))
    settings = GatewaySettings.load([])
    assert (settings.beside_engine, settings.instance_id) == ("engine-0", "engine-0-gateway")
    listening = (settings.http_listen, settings.health_listen, settings.metrics_listen)
    ports = [port["containerPort"] for port in gateway["ports"]]
    assert [int(address.rpartition(":")[2]) for address in listening] == ports
    alone = Workload(objects["Deployment/gateway"]).container
    for name in ("securityContext", "lifecycle", "imagePullPolicy", "envFrom", "image"):
        assert gateway[name] == alone[name], name
    assert {mount["name"] for mount in gateway["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}
    pool = objects["InferencePool/engine"]["spec"]
    assert selects(pool["selector"]["matchLabels"], template["metadata"]["labels"])
    assert [port["number"] for port in pool["targetPorts"]] == ports[:1]
    (backend,) = objects["HTTPRoute/gateway"]["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", "engine")


def test_encoders_reach_the_coordinator_and_are_reached_by_gateways_and_engines() -> None:
    objects = build("encoder")
    encoder = Workload(objects["StatefulSet/encoder"])
    values = dict(encoder.environment)
    assert values["TOKENLOOM_COORDINATOR"] == "coordinator:50051"
    engine = objects["StatefulSet/engine"]["spec"]["template"]["spec"]["containers"][0]
    for name in ("readinessProbe", "livenessProbe", "startupProbe", "lifecycle", "securityContext", "envFrom"):
        assert encoder.container[name] == engine[name], name
    assert (
        encoder.pod["securityContext"] == objects["StatefulSet/engine"]["spec"]["template"]["spec"]["securityContext"]
    )
    own, callers = (objects[f"NetworkPolicy/{name}"]["spec"] for name in ("encoder", "to-encoder"))
    assert selects(own["podSelector"]["matchLabels"], encoder.labels)
    asking = {peer["podSelector"]["matchLabels"]["app.kubernetes.io/name"] for peer in own["ingress"][0]["from"]}
    assert asking == set(callers["podSelector"]["matchExpressions"][0]["values"]) == {"gateway", "engine"}
    mounted = build("encoder", "model-store")["StatefulSet/encoder"]
    assert {"name": "models", "mountPath": "/hub", "readOnly": True} in Workload(mounted).container["volumeMounts"]


def test_traces_may_leave_from_every_part_to_the_collectors_namespace_only() -> None:
    objects = build("otlp")
    policy: Object = objects["NetworkPolicy/otlp"]["spec"]
    (expression,) = policy["podSelector"]["matchExpressions"]
    parts = {Workload(each).part for each in objects.values() if each["kind"] in ("Deployment", "StatefulSet")}
    assert set(expression["values"]) == parts | {"encoder"}  # a component of its own
    endpoint = objects["ConfigMap/tokenloom-common"]["data"]["TOKENLOOM_OTLP_ENDPOINT"]
    (rule,) = policy["egress"]
    namespace = rule["to"][0]["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
    assert endpoint == f"http://otel-collector.{namespace}:{rule['ports'][0]['port']}"


def test_images_have_the_tag_of_this_version() -> None:
    text = (ROOT / "components" / "release" / "kustomization.yaml").read_text()
    tags = {each["name"]: each["newTag"] for each in yaml.safe_load(text)["images"]}
    assert set(tags) == {"tokenloom/service", "tokenloom/engine-cpu", "tokenloom/engine-cuda"}
    assert len(set(tags.values())) == 1
    for each in build("model-store").values():
        if each["kind"] in ("Deployment", "StatefulSet", "Job"):
            pod = Workload(each)
            for container in [pod.container, *pod.pod.get("initContainers", ())]:
                name, _, tag = container["image"].partition(":")
                assert tag == tags[name]
