"""The manifests as a cluster would take them, and what no validator of single objects sees."""

import json
import re
from functools import cache

import kubernetes_validate
import pytest

from tests.k8s.cluster import KUSTOMIZATIONS, WHOLE, Object, Workload, build, of_kind, selects, workloads
from tokenloom.services.coordinator.coordinator_settings import CoordinatorSettings
from tokenloom.services.coordinator.engines.defaults import PREFIX_INDEX_MIB
from tokenloom.services.coordinator.lease import SERVICE_ACCOUNT
from tokenloom.services.engine.records.engine_settings import EngineSettings
from tokenloom.services.gateway.settings.gateway_settings import GatewaySettings
from tokenloom.services.output_processor.output_processor_settings import OutputProcessorSettings
from tokenloom.services.runtime.host.options import options_of
from tokenloom.services.runtime.host.service_settings import ServiceSettings
from tokenloom.services.tokenizer.tokenizer_settings import TokenizerSettings
from tokenloom.supervisor.certificates import PARTS
from tools import helm_chart

SETTINGS: dict[str, type[ServiceSettings]] = {
    "coordinator": CoordinatorSettings,
    "tokenizer": TokenizerSettings,
    "output-processor": OutputProcessorSettings,
    "engine": EngineSettings,
    "gateway": GatewaySettings,
}
CUSTOM = {
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
    "ScaledObject": "keda.sh/v1alpha1",
    "ServiceMonitor": "monitoring.coreos.com/v1",
}
"""Kinds that a cluster gets from elsewhere: no schema of theirs is at hand."""
MADE_BY_HAND = {f"tokenloom-{part.replace('_', '-')}-tls" for part in PARTS} | {"tokenloom-api-keys"}
"""Secrets: `tokenloom certs --kubernetes` and docs/operate/kubernetes.md make them."""


MORE_SECRETS = {"gateway": {"tokenloom-api-keys"}}
"""Secrets that a part mounts in addition to its own certificate; all others mount none."""


@pytest.fixture(params=KUSTOMIZATIONS)
def objects(request: pytest.FixtureRequest) -> tuple[Object, ...]:
    return build(request.param)


@pytest.fixture(params=WHOLE)
def mesh(request: pytest.FixtureRequest) -> tuple[Object, ...]:
    return build(request.param)


def test_every_object_is_valid(objects: tuple[Object, ...]) -> None:
    assert objects
    for each in objects:
        if each["kind"] in CUSTOM:
            assert each["apiVersion"] == CUSTOM[each["kind"]]
        else:
            _validate(json.dumps(each))


@cache
def _validate(text: str) -> None:
    """Check an object against the schema of its kind, once: the kustomizations share most of their objects."""
    kubernetes_validate.validate(json.loads(text), kubernetes_validate.latest_version(), strict=True)


def test_objects_have_names_of_their_own_and_one_namespace(objects: tuple[Object, ...]) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(set(names)) == len(names)
    for each in objects:
        assert each["kind"] == "Namespace" or each["metadata"]["namespace"] == "tokenloom"


def test_each_part_is_there_once(mesh: tuple[Object, ...]) -> None:
    parts = [workload.part for workload in workloads(mesh)]
    assert set(parts) == set(SETTINGS)
    roles = [workload.environment.get("TOKENLOOM_ROLE") for workload in workloads(mesh) if workload.part == "engine"]
    assert roles in ([None], ["decode", "prefill"])


def test_every_container_is_probed_on_its_health_port(mesh: tuple[Object, ...]) -> None:
    for workload in workloads(mesh):
        container, health = workload.container, workload.ports["health"]
        assert container["readinessProbe"]["grpc"] == {"port": health, "service": "readiness"}
        for probe in ("livenessProbe", "startupProbe"):
            assert container[probe]["grpc"] == {"port": health, "service": "liveness"}, workload.name


def test_the_coordinators_memory_is_twice_its_prefix_index(mesh: tuple[Object, ...]) -> None:
    (coordinator,) = (workload for workload in workloads(mesh) if workload.part == "coordinator")
    mebibytes = int(coordinator.container["resources"]["limits"]["memory"].removesuffix("Mi"))
    assert mebibytes == 2 * int(coordinator.environment.get("TOKENLOOM_PREFIX_INDEX_MIB", PREFIX_INDEX_MIB))


def test_every_container_is_bounded_and_may_do_nothing(mesh: tuple[Object, ...]) -> None:
    for workload in workloads(mesh):
        container = workload.container
        assert set(container["resources"]["requests"]) >= {"cpu", "memory"}, workload.name
        assert "memory" in container["resources"]["limits"], workload.name
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert workload.pod["securityContext"]["runAsNonRoot"] is True
        assert workload.pod["automountServiceAccountToken"] is False
        assert workload.pod["enableServiceLinks"] is False  # TOKENLOOM_… is for settings


def test_pods_have_the_time_to_drain(mesh: tuple[Object, ...]) -> None:
    for workload in workloads(mesh):
        grace = workload.pod["terminationGracePeriodSeconds"]
        drain = float(workload.environment.get("TOKENLOOM_DRAIN_TIMEOUT") or _default(workload, "drain_timeout"))
        before = float(workload.container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert grace >= 30
        assert workload.part == "coordinator" or grace >= before + drain, workload.name  # which has nothing to drain


def test_every_variable_is_a_setting_of_its_service(mesh: tuple[Object, ...]) -> None:
    maps = {each["metadata"]["name"]: each["data"] for each in of_kind(mesh, "ConfigMap")}
    for workload in workloads(mesh):
        fields = {option.variable for option in options_of(SETTINGS[workload.part]).values()}
        names = set(workload.environment)
        for source in workload.container["envFrom"]:
            names |= set(maps[source["configMapRef"]["name"]])
        assert names - {"POD_IP"} <= fields, workload.name
        module = workload.part.replace("-", "_")
        assert workload.container["args"] == [f"tokenloom.services.{module}"]


def test_settings_with_these_variables_are_accepted(mesh: tuple[Object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    maps = {each["metadata"]["name"]: each["data"] for each in of_kind(mesh, "ConfigMap")}
    for workload in workloads(mesh):
        with monkeypatch.context() as environment:
            for source in workload.container["envFrom"]:
                for name, value in maps[source["configMapRef"]["name"]].items():
                    environment.setenv(name, value)
            for name, value in workload.environment.items():
                filled = "10.0.0.1" if value is None else value.replace("$(POD_IP)", "10.0.0.1")
                environment.setenv(name, "name-0" if name == "TOKENLOOM_INSTANCE_ID" else filled)
            settings = SETTINGS[workload.part].load([])
        assert settings.certificate is not None
        assert settings.listen.rpartition(":")[2] == str(workload.ports["grpc"])
        assert settings.health_listen.rpartition(":")[2] == str(workload.ports["health"])
        assert settings.metrics_listen.rpartition(":")[2] == str(workload.ports["metrics"])


def test_addresses_name_services_and_their_ports(mesh: tuple[Object, ...]) -> None:
    services = {each["metadata"]["name"]: each["spec"]["ports"] for each in of_kind(mesh, "Service")}
    named = re.compile(r"^(?:dns:///)?([a-z][a-z-]*):(\d+)$")
    found = 0
    for workload in workloads(mesh):
        for value in workload.environment.values():
            if value is not None and (match := named.match(value)):
                found += 1
                assert int(match[2]) in {port["port"] for port in services[match[1]]}, value
    assert found >= 5


def test_services_lead_to_ports_of_pods(mesh: tuple[Object, ...]) -> None:
    for service in of_kind(mesh, "Service"):
        chosen = [each for each in workloads(mesh) if selects(service["spec"]["selector"], each.labels)]
        assert [each.name for each in chosen] == [service["metadata"]["name"]]
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in chosen[0].ports
            assert chosen[0].ports[port["targetPort"]] == port["port"]
    for workload in workloads(mesh):
        if workload.source["kind"] == "StatefulSet":
            assert workload.source["spec"]["serviceName"] == workload.name


def test_every_selector_finds_its_pods(mesh: tuple[Object, ...]) -> None:
    pods = workloads(mesh)
    for workload in pods:
        wanted = workload.source["spec"]["selector"]["matchLabels"]
        assert [each.name for each in pods if selects(wanted, each.labels)] == [workload.name]
        for spread in workload.pod.get("topologySpreadConstraints", ()):
            assert selects(spread["labelSelector"]["matchLabels"], workload.labels)
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        for each in of_kind(mesh, kind):
            selector = each["spec"].get("selector") or each["spec"]["podSelector"]
            assert any(selects(selector["matchLabels"], pod.labels) for pod in pods), each["metadata"]["name"]
    budgets = of_kind(mesh, "PodDisruptionBudget")
    assert all(any(selects(b["spec"]["selector"]["matchLabels"], pod.labels) for b in budgets) for pod in pods)


def test_autoscalers_scale_what_exists(mesh: tuple[Object, ...]) -> None:
    pods = {(each.source["kind"], each.name): each for each in workloads(mesh)}
    scaled = set()
    for each in of_kind(mesh, "HorizontalPodAutoscaler", "ScaledObject"):
        target = each["spec"]["scaleTargetRef"]
        scaled.add(pods[target["kind"], target["name"]].part)
    assert scaled == {"engine", "tokenizer", "output-processor", "gateway"}


def test_volumes_are_mounted_and_each_part_sees_its_own_secrets_only(mesh: tuple[Object, ...]) -> None:
    for workload in workloads(mesh):
        volumes = {volume["name"]: volume for volume in workload.pod["volumes"]}
        assert set(volumes) == {mount["name"] for mount in workload.container["volumeMounts"]}
        secrets = {volume["secret"]["secretName"] for volume in volumes.values() if "secret" in volume}
        assert secrets == {f"tokenloom-{workload.part}-tls", *MORE_SECRETS.get(workload.part, ())} <= MADE_BY_HAND
        assert "secretRef" not in str(workload.container)
        assert "secretKeyRef" not in str(workload.container)
        # Kubernetes never updates a file that is mounted with a subPath: the part would not see a new certificate.
        assert not any("subPath" in mount for mount in workload.container["volumeMounts"])
    accounts = {each["metadata"]["name"] for each in of_kind(mesh, "ServiceAccount")}
    assert {workload.pod["serviceAccountName"] for workload in workloads(mesh)} == accounts


def test_the_network_lets_through_the_drawn_arrows_only(mesh: tuple[Object, ...]) -> None:
    pods = workloads(mesh)

    def labels(part: str) -> dict[str, str]:
        return next(pod.labels for pod in pods if pod.part == part)

    def peers(rules: list[Object], side: str, port: int) -> set[str]:
        wanted = [rule for rule in rules if port in {entry["port"] for entry in rule["ports"]}]
        found = {part for part in SETTINGS for rule in wanted for peer in rule.get(side, ()) if _is(peer, labels(part))}
        return found | {"everybody" for rule in wanted if not rule.get(side)}

    incoming, outgoing = {}, {}
    for policy in of_kind(mesh, "NetworkPolicy"):
        name, spec = policy["metadata"]["name"], policy["spec"]
        assert spec["policyTypes"] == ["Ingress", "Egress"]
        incoming[name] = peers(spec["ingress"], "from", 50051)
        outgoing[name] = peers(spec["egress"], "to", 50051)
        kv = {"engine"} if name == "engine" else set()
        assert peers(spec["ingress"], "from", 50053) == peers(spec["egress"], "to", 50054) == kv
    assert incoming == {
        "gateway": {"everybody"},
        "tokenizer": {"gateway"},
        "output-processor": {"gateway"},
        "coordinator": {"gateway", "output-processor", "engine", "coordinator"},
        "engine": {"output-processor", "coordinator"},
    }
    assert outgoing == {part: {to for to, callers in incoming.items() if part in callers} for part in incoming}


def test_only_the_coordinators_use_the_api_server_and_only_for_their_lease(mesh: tuple[Object, ...]) -> None:
    coordinators = {each.name: each for each in workloads(mesh)}["coordinator"]
    kind, _, lease = str(coordinators.environment["TOKENLOOM_LEASE"]).partition(":")
    assert (kind, coordinators.source["spec"]["replicas"]) == ("kubernetes", 2)
    (role,), (binding,) = of_kind(mesh, "Role"), of_kind(mesh, "RoleBinding")
    leases = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}
    assert role["rules"] == [
        {**leases, "resourceNames": [lease], "verbs": ["get", "update"]},
        {**leases, "verbs": ["create"]},
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [subject["name"] for subject in binding["subjects"]] == [coordinators.pod["serviceAccountName"]]
    for workload in workloads(mesh):
        mounted = {mount["name"]: mount["mountPath"] for mount in workload.container["volumeMounts"]}
        paths = [mounted[volume["name"]] for volume in workload.pod["volumes"] if "projected" in volume]
        assert paths == ([str(SERVICE_ACCOUNT)] if workload.name == "coordinator" else []), workload.name
    reaching = [
        policy["metadata"]["name"]
        for policy in of_kind(mesh, "NetworkPolicy")
        for rule in policy["spec"]["egress"]
        if {"port": 443} in rule["ports"]
    ]
    assert reaching == ["coordinator"]


def test_the_address_of_the_coordinators_stands_for_every_pod(mesh: tuple[Object, ...]) -> None:
    (service,) = (each for each in of_kind(mesh, "Service") if each["metadata"]["name"] == "coordinator")
    assert service["spec"]["clusterIP"] == "None"  # a cluster's address would also lead to one that does not listen


def test_monitors_read_metrics_ports_and_name_their_certificates() -> None:
    whole = tuple(helm_chart.build("cpu", "encoder", "relay").values())
    services = {each["metadata"]["name"]: each for each in of_kind(whole, "Service")}
    monitors = of_kind(build("monitoring"), "ServiceMonitor")
    assert {each["metadata"]["name"] for each in monitors} == {*SETTINGS, "encoder", "relay"}
    for each in monitors:
        (endpoint,) = each["spec"]["endpoints"]
        service = services[each["metadata"]["name"]]
        assert selects(each["spec"]["selector"]["matchLabels"], service["metadata"]["labels"])
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
        assert endpoint["tlsConfig"]["serverName"] == f"{each['metadata']['name']}.tokenloom.internal"


def _is(peer: Object, labels: dict[str, str]) -> bool:
    return "podSelector" in peer and selects(peer["podSelector"]["matchLabels"], labels)


def _default(workload: Workload, field: str) -> float:
    return float(options_of(SETTINGS[workload.part])[field].default)
