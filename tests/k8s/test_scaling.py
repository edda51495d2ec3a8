"""Autoscalers read metrics that the scaled workloads have."""

import re

import pytest

from tests.k8s.cluster import WHOLE, Object, build, of_kind
from tests.k8s.server_side_apply import Conflict, LiveObject, key_of, scaled
from tests.observability.catalogue import DOCUMENT

_ROW = re.compile(r"^\| `(\S+)` \|", re.MULTILINE)
_SERIES = re.compile(r'^sum\((\S+?)\{namespace="tokenloom",job="(\S+?)"\}\)$')
ENGINE_METRICS = set(_ROW.findall(DOCUMENT.read_text().partition("\n## Engine\n")[2]))
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


REPLICAS = ("spec", "replicas")
SCALED = (*WHOLE, "overlays/planner", "overlays/hub")


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
