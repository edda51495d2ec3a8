"""The overlay `planner`: what plans the engines may call, and what scales them."""

import re
from pathlib import Path

import pytest
import typer.main

from tests.k8s.cluster import Object, Workload, build, of_kind, selects, workloads
from tests.k8s.test_manifests import MADE_BY_HAND
from tokenloom.cli.main import app
from tokenloom.cli.mesh.plan_run import REPLICAS
from tokenloom.services.runtime.peers.callers import CALLERS, PLANNER

OBJECTS = build("overlays/planner")
BEFORE = build("overlays/keda-disaggregated")
(PLANNING,) = (each for each in workloads(OBJECTS) if each.part == PLANNER)
_QUERY = re.compile(r'^max\((\w+)\{namespace="tokenloom",job="(\w+)",set="([\w-]+)"\}\)$')


def _named(kind: str, name: str) -> Object:
    (found,) = (each for each in of_kind(OBJECTS, kind) if each["metadata"]["name"] == name)
    return found


def test_nothing_else_scales_the_engines() -> None:
    """KEDA reads the planner's replicas instead of the gauge of a role, and no other autoscaler is left."""
    sets = {each.name for each in workloads(OBJECTS) if each.part == "engine"}
    scaled = of_kind(OBJECTS, "ScaledObject")
    assert {each["spec"]["scaleTargetRef"]["name"] for each in scaled} == sets == {"engine-prefill", "engine-decode"}
    for each in scaled:
        (trigger,) = each["spec"]["triggers"]
        match = _QUERY.match(trigger["metadata"]["query"])
        assert match is not None
        assert match.groups() == (REPLICAS, "planner", each["spec"]["scaleTargetRef"]["name"])
        assert trigger["metadata"]["threshold"] == "1"
        assert trigger["metadata"]["ignoreNullValues"] == "false"
    others = of_kind(OBJECTS, "HorizontalPodAutoscaler")
    assert not sets & {each["spec"]["scaleTargetRef"]["name"] for each in others}


def test_it_adds_the_planner_and_changes_only_what_scales_engines() -> None:
    names = {(each["kind"], each["metadata"]["name"]): each for each in BEFORE}
    changed = {
        (each["kind"], each["metadata"]["name"])
        for each in OBJECTS
        if names.get((each["kind"], each["metadata"]["name"])) != each
    }
    assert changed - {("ScaledObject", "engine-prefill"), ("ScaledObject", "engine-decode")} == {
        *((kind, "planner") for kind in ("Deployment", "Service", "ServiceAccount", "ServiceMonitor", "NetworkPolicy")),
        ("NetworkPolicy", "from-planner"),
    }


def test_its_arguments_are_options_of_the_command() -> None:
    module, command, *arguments = PLANNING.container["args"]
    assert (module, command) == ("tokenloom.cli.main", "plan")
    context = typer.main.get_command(app).commands["plan"].make_context("plan", arguments)  # type: ignore[attr-defined]
    assert context.params["apply"] is True
    assert context.params["every"] == 10
    assert context.params["metrics"] == f"0.0.0.0:{PLANNING.ports['metrics']}"
    most = sum(each["spec"]["maxReplicaCount"] for each in of_kind(OBJECTS, "ScaledObject"))
    assert context.params["most"] == most
    (port,) = (each["port"] for each in _named("Service", "coordinator")["spec"]["ports"] if each["name"] == "grpc")
    assert context.params["coordinator"] == f"coordinator:{port}"
    (volume,) = (each for each in PLANNING.pod["volumes"] if "secret" in each)
    (mount,) = (each for each in PLANNING.container["volumeMounts"] if each["name"] == volume["name"])
    assert context.params["certs"] == Path(mount["mountPath"])
    assert {item["path"] for item in volume["secret"]["items"]} == {"ca.crt", "planner.crt", "planner.key"}
    assert volume["secret"]["secretName"] == "tokenloom-planner-tls"
    assert volume["secret"]["secretName"] in MADE_BY_HAND


def test_its_certificate_may_follow_the_coordinator_and_change_roles() -> None:
    methods = {method.removeprefix("/tokenloom.v1.") for method, callers in CALLERS.items() if PLANNER in callers}
    assert methods == {"Coordinator/Watch", "EngineAdmin/SetRole"}


def test_it_has_no_right_in_the_api_of_kubernetes() -> None:
    assert PLANNING.pod["serviceAccountName"] == "planner"
    assert PLANNING.pod["automountServiceAccountToken"] is False
    assert _named("ServiceAccount", "planner")["automountServiceAccountToken"] is False
    for binding in of_kind(OBJECTS, "RoleBinding", "ClusterRoleBinding"):
        assert "planner" not in {subject["name"] for subject in binding["subjects"]}
    assert not any("projected" in volume for volume in PLANNING.pod["volumes"])


def test_the_network_lets_it_reach_the_coordinator_and_the_engines_only() -> None:
    pods = {each.part: each.labels for each in workloads(OBJECTS)}
    spec = _named("NetworkPolicy", "planner")["spec"]
    assert selects(spec["podSelector"]["matchLabels"], PLANNING.labels)
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    names, calls = spec["egress"]
    assert {port["port"] for port in names["ports"]} == {53}
    assert calls["ports"] == [{"port": 50051}]
    reached = {
        part for part, labels in pods.items() for to in calls["to"] if selects(to["podSelector"]["matchLabels"], labels)
    }
    (expression,) = _named("NetworkPolicy", "from-planner")["spec"]["podSelector"]["matchExpressions"]
    assert reached == set(expression["values"]) == {"coordinator", "engine"}
    (rule,) = _named("NetworkPolicy", "from-planner")["spec"]["ingress"]
    assert rule["ports"] == [{"port": 50051}]
    assert [selects(each["podSelector"]["matchLabels"], PLANNING.labels) for each in rule["from"]] == [True]
    (scrape,) = spec["ingress"]
    assert scrape["ports"] == [{"port": PLANNING.ports["metrics"]}]


def test_prometheus_finds_its_gauges() -> None:
    service, monitor = _named("Service", "planner"), _named("ServiceMonitor", "planner")
    assert selects(service["spec"]["selector"], PLANNING.labels)
    assert selects(monitor["spec"]["selector"]["matchLabels"], service["metadata"]["labels"])
    (endpoint,) = monitor["spec"]["endpoints"]
    assert [endpoint["port"]] == [port["name"] for port in service["spec"]["ports"]]


@pytest.mark.parametrize("field", ["runAsNonRoot", "runAsUser", "runAsGroup", "fsGroup", "seccompProfile"])
def test_it_may_do_as_little_as_any_pod(field: str) -> None:
    coordinator = next(Workload(each.source) for each in workloads(OBJECTS) if each.part == "coordinator")
    assert PLANNING.pod["securityContext"][field] == coordinator.pod["securityContext"][field]
    assert PLANNING.container["securityContext"] == coordinator.container["securityContext"]
    assert PLANNING.container["image"] == coordinator.container["image"]
    assert "memory" in PLANNING.container["resources"]["limits"]
    assert PLANNING.pod["enableServiceLinks"] is False
    assert PLANNING.source["spec"]["replicas"] == 1
    assert PLANNING.source["spec"]["strategy"] == {"type": "Recreate"}
