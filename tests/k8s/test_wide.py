"""The overlay ``wide``: a LeaderWorkerSet whose groups of pods are one engine each."""

import re
from typing import Any

import kubernetes_validate
import pytest

from tests.k8s.cluster import ROOT, Object, Workload, build, of_kind, selects, workloads
from tokenloom.services.engine.records.engine_settings import EngineSettings
from tokenloom.services.runtime.host.options import options_of

WIDE = build("overlays/wide")
(SET,) = of_kind(WIDE, "LeaderWorkerSet")
GROUP = SET["spec"]["leaderWorkerTemplate"]
(BASE,) = (each for each in workloads(build("base")) if each.part == "engine")
SET_LABEL = {"leaderworkerset.sigs.k8s.io/name": "wide-engine"}
"""The controller gives it to every pod of the set."""


def pod(template: str) -> Workload:
    return Workload({"metadata": {"name": template}, "spec": {"template": GROUP[template]}})


LEADER, WORKER = pod("leaderTemplate"), pod("workerTemplate")


def script(workload: Workload) -> str:
    assert workload.container["command"] == ["sh", "-ec"]
    (text,) = workload.container["args"]
    return str(text)


def policy(name: str) -> Object:
    (found,) = (each for each in of_kind(WIDE, "NetworkPolicy") if each["metadata"]["name"] == name)
    return dict(found["spec"])


def test_the_set_has_fields_of_its_api_only() -> None:
    """By hand, as https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/ lists them; no schema is at hand."""
    assert (SET["apiVersion"], SET["metadata"]["namespace"]) == ("leaderworkerset.x-k8s.io/v1", "tokenloom")
    assert set(SET["spec"]) == {"replicas", "startupPolicy", "rolloutStrategy", "leaderWorkerTemplate"}
    assert set(GROUP) == {"size", "restartPolicy", "leaderTemplate", "workerTemplate"}
    assert SET["spec"]["startupPolicy"] == "LeaderCreated", "the leader is ready only when its workers have joined"
    assert GROUP["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert SET["spec"]["rolloutStrategy"]["type"] == "RollingUpdate"


@pytest.mark.parametrize("workload", [LEADER, WORKER], ids=lambda each: str(each.name))
def test_its_pods_are_valid(workload: Workload) -> None:
    template = {"metadata": workload.source["spec"]["template"]["metadata"], "spec": workload.pod}
    spec = {"selector": {"matchLabels": workload.labels}, "serviceName": "wide-engine", "template": template}
    stateful = {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "wide-engine"}, "spec": spec}
    kubernetes_validate.validate(stateful, kubernetes_validate.latest_version(), strict=True)


def test_it_takes_the_place_of_the_other_engines() -> None:
    assert not of_kind(WIDE, "StatefulSet")
    assert {each.part for each in workloads(WIDE)} == {"coordinator", "gateway", "tokenizer", "output-processor"}
    for service in of_kind(WIDE, "Service"):
        assert not selects(service["spec"]["selector"], WORKER.labels)
        assert selects(service["spec"]["selector"], LEADER.labels) == (service["metadata"]["name"] == "engine")


def test_the_leader_is_an_engine_of_the_mesh_as_any_other() -> None:
    assert LEADER.labels == BASE.labels
    assert LEADER.environment.items() >= BASE.environment.items()
    assert LEADER.container["envFrom"] == BASE.container["envFrom"]
    assert LEADER.container["ports"] == BASE.container["ports"]
    for field in ("readinessProbe", "livenessProbe", "lifecycle"):
        assert LEADER.container[field] == BASE.container[field]
    assert LEADER.container["startupProbe"]["grpc"] == BASE.container["startupProbe"]["grpc"]
    assert script(LEADER).rstrip().endswith("\nexec python -m tokenloom.services.engine")


@pytest.mark.parametrize("workload", [LEADER, WORKER], ids=lambda each: str(each.name))
def test_its_containers_may_do_no_more_than_the_base_engine(workload: Workload) -> None:
    assert workload.pod["securityContext"] == BASE.pod["securityContext"]
    assert workload.container["securityContext"] == BASE.container["securityContext"]
    assert workload.pod["automountServiceAccountToken"] is False
    assert "memory" in workload.container["resources"]["limits"]


def test_the_leaders_settings_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(monkeypatch).engine
    assert config.parallel.distributed_executor_backend == "ray"
    assert config.worker.device == "cuda", "auto computes on CPUs when GPUs join late"
    assert not settings(monkeypatch).kv_transports, "KV of workers on Ray does not move"


def test_the_workers_fill_the_gpus_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = {each.container["resources"]["limits"]["nvidia.com/gpu"] for each in (LEADER, WORKER)}
    assert gpus == {each.container["resources"]["requests"]["nvidia.com/gpu"] for each in (LEADER, WORKER)}
    (of_pod,) = gpus
    assert settings(monkeypatch).engine.parallel.world_size == GROUP["size"] * int(of_pod)
    for each in (LEADER, WORKER):  # one CPU of Ray for each worker: a node has room for as many as it has GPUs
        assert re.findall(r"--num-cpus (\d+)", script(each)) == [of_pod]


def test_the_workers_join_the_leaders_ray() -> None:
    (port,) = re.findall(r"--head .* --port (\d+)", script(LEADER))
    commands = (script(WORKER), WORKER.container["lifecycle"]["preStop"]["exec"]["command"][-1])
    addresses = [address for command in commands for address in re.findall(r"--address (\S+)", command)]
    assert addresses == [f'"$LWS_LEADER_ADDRESS:{port}"'] * 3
    assert "exec ray start" in script(WORKER)
    assert script(WORKER).rstrip().endswith("--block")
    assert "< $LWS_GROUP_SIZE" in script(LEADER)
    for each in (LEADER, WORKER):  # without a route to the internet, Ray would take the address of the loopback
        assert '--node-ip-address "$POD_IP"' in script(each)
        assert "POD_IP" in each.environment
    assert WORKER.pod["terminationGracePeriodSeconds"] == LEADER.pod["terminationGracePeriodSeconds"]


def test_a_worker_is_no_part_of_the_mesh() -> None:
    assert "tokenloom-engine-tls" not in str(WORKER.pod)
    assert not {"ports", "envFrom", "readinessProbe", "livenessProbe", "startupProbe"} & set(WORKER.container)
    for each in of_kind(WIDE, "NetworkPolicy"):
        if each["metadata"]["name"] != "wide-engine":
            assert not selects(each["spec"]["podSelector"]["matchLabels"], WORKER.labels | SET_LABEL)


@pytest.mark.parametrize("workload", [LEADER, WORKER], ids=lambda each: str(each.name))
def test_its_pods_have_the_model_and_shared_memory(workload: Workload) -> None:
    volumes = {volume["name"]: volume for volume in workload.pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in workload.container["volumeMounts"]}
    assert set(volumes) == set(mounts)
    assert (mounts["models"], mounts["shm"]) == ("/hub", "/dev/shm")
    assert volumes["shm"] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}
    (store,) = re.findall(r"--object-store-memory (\d+)", script(workload))
    assert int(store) < 2 << 30
    (wait,) = workload.pod["initContainers"]
    assert "--no-weights" not in wait["args"]


def test_ray_is_reached_from_pods_of_the_set_only() -> None:
    own = policy("wide-engine")
    assert own["podSelector"] == {"matchLabels": SET_LABEL}
    peers = [{"podSelector": {"matchLabels": SET_LABEL}}]
    assert own["ingress"] == [{"from": peers}]
    assert [rule["to"] for rule in own["egress"] if "to" in rule] == [peers]
    assert {entry["port"] for rule in own["egress"] for entry in rule.get("ports", ())} == {53}
    assert selects(policy("engine")["podSelector"]["matchLabels"], LEADER.labels)
    others = {port["port"] for rule in policy("engine")["ingress"] for port in rule["ports"]}
    assert others == {50051, 50053, 50054, 9090}, "not Ray's"


def test_it_is_scaled_by_groups_and_drained_by_pods_of_the_set() -> None:
    (autoscaler,) = (each for each in of_kind(WIDE, "HorizontalPodAutoscaler") if each["metadata"]["name"] == "engine")
    target = {name: SET[name] for name in ("apiVersion", "kind")} | {"name": SET["metadata"]["name"]}
    assert autoscaler["spec"]["scaleTargetRef"] == target
    (budget,) = (each for each in of_kind(WIDE, "PodDisruptionBudget") if each["metadata"]["name"] == "engine")
    assert budget["spec"]["selector"]["matchLabels"] == SET_LABEL


def test_its_image_is_one_that_the_dockerfile_builds_with_ray() -> None:
    for each in (LEADER, WORKER):
        name, _, tag = each.container["image"].partition(":")
        assert (name, tag) == ("tokenloom/engine-cuda-ray", BASE.container["image"].partition(":")[2])
    assert (ROOT.parent / "locks" / "ray.txt").exists()


def settings(monkeypatch: pytest.MonkeyPatch) -> EngineSettings:
    """Read the leader's settings from its variables."""
    variables: dict[str, Any] = {}
    maps = {each["metadata"]["name"]: each["data"] for each in of_kind(WIDE, "ConfigMap")}
    for source in LEADER.container["envFrom"]:
        variables |= maps[source["configMapRef"]["name"]]
    own = {name: "name-0" if value is None else value for name, value in LEADER.environment.items()}
    variables |= {name: value.replace("$(POD_IP)", "10.0.0.1") for name, value in own.items()}
    known = {option.variable for option in options_of(EngineSettings).values()}
    assert {name for name in variables if name.startswith("TOKENLOOM_")} <= known
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return EngineSettings.load([])
