"""What a mesh of processes bills is the time that the kernel has counted for its processes."""

import hashlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import Serve, Served
from tokenloom.process.cpu_bill import OVERHEAD

TENANTS = {"calm": 2, "eager": 6}
"""With the requests that each sends at a time."""
ROUNDS = 12
TICK = 1 / os.sysconf("SC_CLK_TCK")
MOST_WRONG = 0.02
"""The share of the time by which the bill may be wrong."""
NAME = "tokenloom_bill_cpu_seconds_total"
Totals = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def mesh(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("bill")
    keys = folder / "keys.toml"
    digests = {name: hashlib.sha256(f"{name}-key".encode()).hexdigest() for name in TENANTS}
    keys.write_text(
        "\n".join(f'[[tenant]]\nname = "{name}"\nkey_sha256 = ["{key}"]\n' for name, key in digests.items())
    )
    options = ("--worker", "hash", "--engines", "2", "--output-processors", "2", "--batch-dir", str(folder / "batches"))
    return serve(*options, "--bill", "--api-key-file", str(keys), "--cache-salt-secret", "s" * 32)


def client(mesh: Served, tenant: str) -> httpx.Client:
    return httpx.Client(base_url=mesh.url, headers={"Authorization": f"Bearer {tenant}-key"}, timeout=120)


def body(number: int, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Question {number}: " + "tell me more. " * (number % 20)}]
    return {
        "messages": messages,
        "max_tokens": 100 + number % 50,
        "ignore_eos": True,
        "return_timeline": True,
        **fields,
    }


def chat(mesh: Served, tenant: str, number: int) -> dict[str, float]:
    """Return the milliseconds of each part for one chat, of which every second one is streamed."""
    with client(mesh, tenant) as http:
        if number % 2:
            answer = http.post("/v1/chat/completions", json=body(number))
            answer.raise_for_status()
            found = answer.json()
        else:
            asked = body(number, stream=True, stream_options={"include_usage": True})
            with http.stream("POST", "/v1/chat/completions", json=asked) as stream:
                lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
            events = [json.loads(line) for line in lines if line != "[DONE]"]
            found = next(event for event in events if event.get("usage"))
            found["timeline"] = found.get("timeline") or next(e["timeline"] for e in events if "timeline" in e)
    parts: dict[str, float] = found["timeline"]["cpu_ms"]
    assert parts.keys() == {"gateway", "tokenizer", "output_processor", "engine"}
    assert all(milliseconds > 0 for milliseconds in parts.values()), parts
    assert found["usage"]["cpu_ms"] >= 0.99 * sum(parts.values())
    return parts


def counted(pid: int) -> float:
    """Return the seconds of a part, and of all that it has started, as /proc/PID/stat counts them."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    times = [process.cpu_times() for process in family]
    seconds = sum(each.user + each.system + each.children_user + each.children_system for each in times)
    return float(seconds) + TICK * len(family)  # user and system time are both cut off, by half a tick on average


def billed(address: str) -> Totals:
    """Return the seconds of each tenant, by part, as a page of metrics shows them."""
    with httpx.Client() as http:
        page = http.get(f"http://{address}/metrics").text
    totals: Totals = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == NAME:
                totals.setdefault(sample.labels["part"], {})[sample.labels["tenant"]] = sample.value
    return totals


def measure(mesh: Served) -> tuple[Totals, float, float]:
    """Return what all parts bill, and the time of their processes before and after each was asked."""
    found: Totals = {}
    before = after = 0.0
    for part in mesh.ps():
        billed(part["metrics"])  # the first page takes more time than all that follow
        before += counted(part["pid"])
        for name, tenants in billed(part["metrics"]).items():
            of_part = found.setdefault(name, {})
            for tenant, seconds in tenants.items():
                of_part[tenant] = of_part.get(tenant, 0.0) + seconds
        after += counted(part["pid"])
    return found, before, after


def test_the_bill_is_the_time_of_the_processes(mesh: Served) -> None:
    spent = dict.fromkeys(TENANTS, 0.0)
    _, start, _ = measure(mesh)
    with ThreadPoolExecutor(sum(TENANTS.values())) as pool:
        asked = [
            (tenant, pool.submit(chat, mesh, tenant, number))
            for number in range(ROUNDS)
            for tenant, share in TENANTS.items()
            for _ in range(share)
        ]
        for tenant, answer in asked:
            spent[tenant] += sum(answer.result().values()) / 1e3
    totals, before, after = measure(mesh)
    assert totals.keys() == {"gateway", "tokenizer", "output_processor", "coordinator", "engine", "engine_core"}
    assert all(tenants[OVERHEAD] > 0 for tenants in totals.values())
    total = sum(sum(tenants.values()) for tenants in totals.values())
    assert (1 - MOST_WRONG) * before <= total <= (1 + MOST_WRONG) * after, (totals, before, after)
    of_tenants = {name: sum(tenants.get(name, 0.0) for tenants in totals.values()) for name in TENANTS}
    # The pages, and health checks, take the rest; all the more on a machine where the load takes long.
    assert 0.4 * (before - start) <= sum(of_tenants.values()) <= after - start
    for name in TENANTS:
        assert 0.8 * of_tenants[name] <= spent[name] <= 1.01 * of_tenants[name], (name, spent, of_tenants)
    assert of_tenants["eager"] == pytest.approx(3 * of_tenants["calm"], rel=0.25)


def test_the_lines_of_a_batch_say_what_they_cost(mesh: Served) -> None:
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body(number)}
        for number in range(4)
    ]
    with client(mesh, "calm") as http:
        data = "\n".join(map(json.dumps, lines)).encode()
        upload = http.post("/v1/files", files={"file": ("lines.jsonl", data)}, data={"purpose": "batch"})
        made = {"input_file_id": upload.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = http.post("/v1/batches", json=made).json()
        ends_at = time.monotonic() + 60
        while batch["status"] not in ("completed", "failed", "expired"):
            assert time.monotonic() < ends_at, batch
            batch = http.get(f"/v1/batches/{batch['id']}").json()
        results = http.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    costs = [json.loads(line)["response"]["body"]["usage"]["cpu_ms"] for line in results]
    assert len(costs) == 4
    assert all(cost > 0 for cost in costs)
