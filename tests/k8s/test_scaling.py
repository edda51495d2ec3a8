"""Autoscalers read metrics that the scaled workloads have."""

import re

import pytest

from tests.k8s.cluster import WHOLE, Object, build, of_kind
from tests.k8s.server_side_apply import Conflict, LiveObject, key_of, scaled
from tests.observability.catalogue import DOCUMENT
from tokenloom.engine_core.data.config import SchedulerConfig
from tokenloom.services.gateway.settings.gateway_settings import GatewaySettings
from tokenloom.services.runtime.host.options import options_of
from tools import helm_chart

_ROW = re.compile(r"^\| `(\S+)` \|", re.MULTILINE)
_SERIES = re.compile(r'^(?:sum|max)\((\S+?)\{namespace="tokenloom",job="(\S+?)"\}\)$')
ENGINE_METRICS = set(_ROW.findall(DOCUMENT.read_text().partition("\n## Engine\n")[2]))
GATEWAY_METRICS = set(_ROW.findall(DOCUMENT.read_text().partition("\n## Gateway\n")[2].partition("\n## ")[0]))
HELD, RUNNING = "tokenloom_gateway_held_requests", "vllm:num_requests_running"
PREFILL, DECODE = "tokenloom_prompt_tokens_waiting", "vllm:kv_cache_usage_perc"


def _of_engines(objects: tuple[Object, ...], kind: str) -> dict[str, Object]:
    found = {each["spec"]["scaleTargetRef"]["name"]: each["spec"] for each in of_kind(objects, kind)}
    return {name: spec for name, spec in found.items() if name.startswith("engine")}


@pytest.mark.parametrize("overlay", WHOLE)
def test_metrics_exist_under_the_names_that_the_adapter_gives_them(overlay: str) -> None:
    names = {name.replace(":", "_") for name in ENGINE_METRICS}
    for spec in _of_engines(build(overlay), "HorizontalPodAutoscaler").values():
        assert {each["pods"]["metric"]["name"] for each in spec["metrics"]} <= names


@pytest.mark.parametrize("overlay", ["overlays/keda", "overlays/keda-disaggregated"])
def test_keda_asks_for_metrics_that_exist_of_the_job_that_it_scales(overlay: str) -> None:
    objects = build(overlay)
    services = {each["metadata"]["name"] for each in of_kind(objects, "Service")}
    scaled = _of_engines(objects, "ScaledObject")
    assert scaled
    for name, spec in scaled.items():
        (trigger,) = spec["triggers"]
        match = _SERIES.match(trigger["metadata"]["query"])
        assert match is not None
        assert match[1] in ENGINE_METRICS
        assert match[2] == name  # the Prometheus operator names a job after its Service
        assert name in services


def test_prefill_scales_on_queued_prompt_tokens_and_decode_on_kv_with_and_without_keda() -> None:
    plain = _of_engines(build("overlays/disaggregated"), "HorizontalPodAutoscaler")
    keda = _of_engines(build("overlays/keda-disaggregated"), "ScaledObject")
    for role, metric, value, threshold in (("prefill", PREFILL, "8192", "8192"), ("decode", DECODE, "700m", "0.7")):
        (pods,) = (each["pods"] for each in plain[f"engine-{role}"]["metrics"])
        assert pods["metric"]["name"] == metric.replace(":", "_")
        assert pods["target"] == {"type": "AverageValue", "averageValue": value}
        (trigger,) = keda[f"engine-{role}"]["triggers"]
        assert trigger["metadata"]["query"].startswith(f"sum({metric}{{")
        assert trigger["metadata"]["threshold"] == threshold


@pytest.mark.parametrize("overlay", helm_chart.ONLY_WITH["scale-to-zero"])
def test_engines_that_are_scaled_to_zero_are_started_by_what_gateways_hold(overlay: str) -> None:
    plain, objects = (helm_chart.build(overlay, *components) for components in ((), ("scale-to-zero",)))
    (gateway,) = objects["Deployment/gateway"]["spec"]["template"]["spec"]["containers"]
    values = {each["name"]: each.get("value") for each in gateway["env"]}
    assert values[options_of(GatewaySettings)["ready_without_engines"].variable] == "true"
    names = [key for key in objects if key.startswith("ScaledObject/engine")]
    assert names == [key for key in plain if key.startswith("ScaledObject/engine")] != []
    for name in names:
        spec = objects[name]["spec"]
        before = plain[name]["spec"]["triggers"]
        assert spec["minReplicaCount"] == 0
        assert spec["triggers"][: len(before)] == before, "engines that run scale as before"
        held, running = (each["metadata"] for each in spec["triggers"][len(before) :])
        found = [_SERIES.match(each["query"]) for each in (held, running)]
        assert [match.groups() for match in found if match] == [(HELD, "gateway"), (RUNNING, "gateway")]
        # The last engine stays while a request runs, and no engine more is asked for than runs as many.
        assert running["threshold"] == str(SchedulerConfig().max_num_seqs)
    assert {HELD, RUNNING} <= GATEWAY_METRICS
    others = {key for key, each in objects.items() if plain[key] != each}
    assert others == {"Deployment/gateway", *names}


def test_a_number_of_zero_is_kept_too_when_it_is_applied_again() -> None:
    engine = helm_chart.build("keda", "scale-to-zero")["StatefulSet/engine"]
    live = LiveObject()
    live.apply("kubectl", engine)
    live.update("keda", REPLICAS, 0)
    live.apply("kubectl", engine)
    assert live.get(REPLICAS) == 0


REPLICAS = ("spec", "replicas")
SCALED = (*WHOLE, "overlays/planner", "overlays/hub", "overlays/images")


@pytest.mark.parametrize("overlay", SCALED)
def test_what_an_autoscaler_scales_keeps_its_live_number_when_it_is_applied_again(overlay: str) -> None:
    objects = {key_of(each): each for each in build(overlay)}
    targets = scaled(objects.values())
    assert {"Deployment/gateway", "Deployment/tokenizer", "Deployment/output-processor"} < targets.keys()
    assert [key for key in targets if key.startswith("StatefulSet/engine")]
    for key, least in targets.items():
        live = LiveObject()
        live.apply("kubectl", objects[key])
        assert live.get(REPLICAS) == 1, f"{key}: the API server's default, which the autoscaler raises to {least}"
        live.update("autoscaler", REPLICAS, 7)
        live.apply("kubectl", objects[key])
        assert live.get(REPLICAS) == 7, key


def test_a_fixed_number_would_be_noticed() -> None:
    """The model refuses what the manifests once did, and drops a number that only they had."""
    fixed = {"spec": {"replicas": 2, "serviceName": "engine"}}
    live = LiveObject()
    live.apply("kubectl", fixed)
    live.update("autoscaler", REPLICAS, 7)
    with pytest.raises(Conflict, match=r"spec\.replicas belongs to autoscaler"):
        live.apply("kubectl", fixed)
    live.apply("kubectl", fixed, force=True)
    assert live.get(REPLICAS) == 2
    live.update("autoscaler", REPLICAS, 7)
    live.apply("kubectl", {"spec": {"serviceName": "engine"}})
    assert live.get(REPLICAS) == 7, "an upgrade from such manifests keeps the number too"
