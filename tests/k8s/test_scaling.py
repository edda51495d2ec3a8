"""Autoscalers read metrics that the scaled workloads have."""

import re

import pytest

from tests.k8s.cluster import WHOLE, Object, build, of_kind
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
