"""Every metric of every part, read off the ``/metrics`` of a running mesh: ``python -m tests.observability.catalogue``
writes docs/reference/metrics.md, ``--check`` has promtool look at each page."""

import argparse
import asyncio
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.mesh.harness import Mesh
from tokenloom.services.encoder.encoder_servicer import EncoderMetrics
from tokenloom.services.encoder.encoder_settings import EncoderSettings
from tokenloom.services.encoder.media_store import MediaStore
from tokenloom.services.encoder.row_cache import RowCache
from tokenloom.services.relay.grpc_relay import GrpcRelay
from tokenloom.services.relay.http_relay import HttpRelay
from tokenloom.services.relay.relay_settings import RelaySettings
from tokenloom.services.relay.service import observe_grpc, observe_http
from tokenloom.services.runtime.host.host import Host
from tokenloom.supervisor.certificates import make_certificates
from tokenloom.v1 import inference_pb2, inference_pb2_grpc

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "reference" / "metrics.md"
ALLOWED = re.compile(r"^vllm:\S+ metric names should not contain ':'$|^vllm:iteration_tokens_total non-counter ")
"""What promtool says of names that are vLLM's, and have to stay."""
_BY_PYTHON = ("process_", "python_", "tokenloom_engine_core_process_")
"""Prefixes of what prometheus_client tells of any process."""
_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}

Pages = Mapping[str, str]
"""What each service shows under ``/metrics``."""


@dataclass(frozen=True)
class Entry:
    """A metric of a service."""

    service: str
    name: str
    kind: str
    labels: tuple[str, ...]
    text: str

    @property
    def series(self) -> Iterator[str]:
        """Names that an expression may use."""
        return (self.name.removesuffix(suffix) + suffix for suffix in _SUFFIXES[self.kind])


async def read_pages(directory: Path) -> Pages:
    """Runs a mesh in ``directory``, sends it a few requests, and reads every part's metrics."""
    make_certificates(directory / "certificates", days=30)  # some metrics are about them
    mesh = Mesh(
        directory,
        certificates=directory / "certificates",
        common={"metrics_listen": "127.0.0.1:0"},
        coordinator={"placement": "cost"},  # which has more inputs than the default
        engine={"kv_transports": ["shm"], "logits_metrics_interval": 1, "speculative_config": {"method": "ngram"}},
    )
    async with mesh.running(), mesh.http() as http:
        for _ in range(2):
            chat = {"messages": [{"role": "user", "content": "Who made the lamp?"}], "max_tokens": 4}
            (await http.post("/v1/chat/completions", json=chat)).raise_for_status()
        (await http.post("/v1/completions", json={"prompt": "four", "echo": True, "n": 2})).raise_for_status()
        async with grpc.aio.insecure_channel(mesh.address("gateway-0")) as channel:
            await inference_pb2_grpc.InferenceStub(channel).ListModels(inference_pb2.ListModelsRequest())
        pages = {}
        for part in mesh.parts:
            assert part.host is not None
            url = f"http://{part.host.metrics_address}/metrics"
            pages[part.settings.service] = await asyncio.to_thread(_get, url)
        return {**pages, "encoder": _encoder_page(), "relay": await relay_page()}


def _encoder_page() -> str:
    """Returns what an encoder shows. It takes no model and no processes to know that."""
    host = Host(EncoderSettings.of(model="any"))
    host.certificates.show("mesh", lambda: 0.0)
    EncoderMetrics(host.metrics, MediaStore[bytes](1, 1.0, lambda: 0.0), RowCache(1))
    return generate_latest(host.metrics).decode()


async def relay_page() -> str:
    """Returns what a relay shows. It takes no gateways to know that."""
    host = Host(RelaySettings.of(grpc_listen="127.0.0.1:0", grpc_gateways=("127.0.0.1:1",)))
    for certificate in ("mesh", "public"):
        host.certificates.show(certificate, lambda: 0.0)
    relay = GrpcRelay(["127.0.0.1:1"], 0)
    observe_grpc(host.metrics, relay)
    observe_http(host.metrics, HttpRelay([("127.0.0.1", 1)], ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), 1, 1))
    await relay.close()
    return generate_latest(host.metrics).decode()


def entries(pages: Pages) -> list[Entry]:
    """All metrics but those that prometheus_client tells of any process."""
    return [
        Entry(service, _name(family), family.type, _labels(family), family.documentation)
        for service, page in pages.items()
        for family in text_string_to_metric_families(page)
        if not family.name.startswith(_BY_PYTHON)
    ]


def markdown(pages: Pages) -> str:
    """docs/reference/metrics.md."""
    lines = [_HEAD]
    for service in pages:
        lines += [f"\n## {service.replace('_', ' ').capitalize()}\n", "| metric | kind | labels | what it is |"]
        lines.append("|---|---|---|---|")
        lines += [
            f"| `{entry.name}` | {entry.kind} | {', '.join(entry.labels)} | {entry.text} |"
            for entry in sorted(entries(pages), key=lambda entry: entry.name)
            if entry.service == service
        ]
    return "\n".join(lines) + "\n"


def objections(page: str) -> list[str]:
    """What promtool has against a page, but for vLLM's names."""
    checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=30)
    said = [line for line in (checked.stdout + checked.stderr).splitlines() if line.strip()]
    return [line for line in said if not ALLOWED.match(line)]


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())


def _name(family: Metric) -> str:
    return family.name + "_total" if family.type == "counter" else family.name


def _labels(family: Metric) -> tuple[str, ...]:
    return tuple(dict.fromkeys(label for sample in family.samples for label in sample.labels if label != "le"))


_HEAD = """# Metrics

Every part serves `/metrics` where `--metrics-listen` says; the gateway serves its own at its HTTP address too. Names
that begin with `vllm:` are vLLM's, so that dashboards made for it work; the rest is the mesh's own. Beside these,
every part shows CPU time, memory and file descriptors of its process (`process_…`), engines those of their core's
process too (`tokenloom_engine_core_process_…`).

Scrapers that accept OpenMetrics, as Prometheus does, get it; with `--otlp-endpoint` the gateway's
`vllm:time_to_first_token_seconds` and `vllm:e2e_request_latency_seconds` then carry the trace of the last request of
each bucket as an exemplar. Sizes of requests (`vllm:request_prompt_tokens` and others) are the gateway's, which counts
each request once; an engine counts attempts.

The gateway's gauges under vLLM's names are of the whole mesh, or of `--beside-engine`, and have no label `engine`: they
are what an endpoint picker of the Gateway API Inference Extension reads. An engine shows the same names for itself.

`observability/` holds what reads them: a Grafana dashboard, alerts with their tests, and the scrapes of
docker-compose.yml, whose profile `observability` runs it all; `k8s/monitoring` has the same for the Prometheus
operator. [on-call.md](../operate/on-call.md) leads from symptoms to queries. `make dashboards` runs every query of all
three against a real Prometheus that scrapes a running mesh.

The metrics of logits and temperatures exist where `--logits-metrics-interval` is set, those of drafts
(`vllm:spec_decode_…`) where `--speculative-config` is.

An engine with `--enable-lora` also shows `vllm:lora_requests_info` (labels `max_lora`, `waiting_lora_adapters`,
`running_lora_adapters`), and for each adapter that is loaded `tokenloom_lora_requests_running` and
`tokenloom_lora_requests_waiting` (label `adapter`).

An engine of a model with experts also shows `tokenloom_expert_tokens_total` (label `expert`): the tokens that each
expert computed, over all layers; and `tokenloom_expert_imbalance` (label `layer`): the tokens of a layer's most used
expert, divided by the mean of its experts, 1 if they are even. Layers without experts are not numbered. What a GPU
counts is up to 32 steps old.
With `--enable-eplb` it also shows `tokenloom_expert_balancedness`, the mean load of the ranks divided by that of the
busiest one before the latest plan; `tokenloom_expert_plans_total`; and `tokenloom_experts_moved_total`, the experts
that its own rank has taken over from others.

A gateway with `--batch-dir` also shows `tokenloom_batches` (label `status`), `tokenloom_batch_lines_total` (label
`outcome`), `tokenloom_batch_lines_in_flight`, `tokenloom_batch_lines_postponed_total` and
`tokenloom_stored_file_bytes`; [batches](../use/batches.md#metrics) explains them.

With `--bill` every part also shows `tokenloom_bill_cpu_seconds_total` (labels `part`, `tenant`): the CPU time of its
processes, shared out to tenants; [operations](../operate/operations.md#what-a-request-costs) explains it.

This page is written by `make metrics-docs` from a running mesh; a test keeps it current. `make metrics-check` has
promtool look at every page and at the rules in `observability/`."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="look, and write nothing")
    check = parser.parse_args().check
    directory = Path(tempfile.mkdtemp(prefix="tl-", dir="/tmp"))
    try:
        pages = asyncio.run(read_pages(directory))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if not check:
        DOCUMENT.write_text(markdown(pages))
        return 0
    found = [f"{service}: {line}" for service, page in pages.items() for line in objections(page)]
    print("\n".join(found) or f"promtool has nothing against the metrics of {', '.join(pages)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
