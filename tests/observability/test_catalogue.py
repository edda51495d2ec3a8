"""docs/reference/metrics.md, and promtool over what a running mesh shows."""

import shutil

import pytest

from tests.observability.catalogue import DOCUMENT, Pages, entries, markdown, objections

NEEDS_PROMTOOL = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")

VLLM = {
    "vllm:cache_config_info",
    "vllm:e2e_request_latency_seconds",
    "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds",
    "vllm:iteration_tokens_total",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prompt_tokens_total",
    "vllm:request_decode_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_success_total",
    "vllm:request_time_per_output_token_seconds",
    "vllm:time_to_first_token_seconds",
}
VLLM_SIZES = {
    "vllm:request_generation_tokens",
    "vllm:request_max_num_generation_tokens",
    "vllm:request_params_max_tokens",
    "vllm:request_params_n",
    "vllm:request_prompt_tokens",
}
"""At gateways only: they count each request once."""


def test_the_document_is_current(pages: Pages) -> None:
    assert DOCUMENT.read_text() == markdown(pages), "run `make metrics-docs`"


def test_engines_show_what_dashboards_for_vllm_read(pages: Pages) -> None:
    shown = {entry.name: entry for entry in entries(pages) if entry.service == "engine"}
    assert shown.keys() >= VLLM | {"vllm:request_prefill_kv_computed_tokens"}
    assert all(shown[name].labels[:2] == ("model_name", "engine") or "engine" in shown[name].labels for name in VLLM)


def test_gateways_show_the_sizes_of_requests(pages: Pages) -> None:
    shown = {entry.name for entry in entries(pages) if entry.service == "gateway"}
    assert shown >= VLLM_SIZES


def test_the_gateway_shows_what_an_endpoint_picker_reads(pages: Pages) -> None:
    shown = {entry.name: entry for entry in entries(pages) if entry.service == "gateway"}
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert shown[name].kind == "gauge"
        assert shown[name].labels == ("model_name",)
    assert {"block_size", "num_gpu_blocks"} < {*shown["vllm:cache_config_info"].labels}


def test_every_part_tells_what_it_is(pages: Pages) -> None:
    for service in pages:
        shown = {entry.name for entry in entries(pages) if entry.service == service}
        assert shown >= {"tokenloom_part_info", "tokenloom_serving"}, service
        assert "process_cpu_seconds_total" in pages[service]


def test_metrics_have_a_text_and_only_known_prefixes(pages: Pages) -> None:
    for entry in entries(pages):
        assert entry.text.endswith("."), entry
        assert entry.name.startswith(("vllm:", "tokenloom_", "gen_ai_server_")), entry


@NEEDS_PROMTOOL
def test_promtool_has_nothing_against_the_metrics(pages: Pages) -> None:
    assert {service: objections(page) for service, page in pages.items()} == {service: [] for service in pages}


@NEEDS_PROMTOOL
def test_promtool_would_object() -> None:
    page = "# HELP tokenloom_things Things.\n# TYPE tokenloom_things counter\ntokenloom_things 1\n"
    assert any("_total" in line for line in objections(page))
