"""Every query of the dashboard, of the alerts and of docs/operate/on-call.md against a real Prometheus that scrapes a
running mesh with traffic: ``python -m tests.observability.live`` (``make dashboards``)."""

import argparse
import json
import socket
import ssl
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from tests.collector import Collector
from tests.e2e.conftest import Served, serving
from tests.observability import prometheus
from tests.observability.prometheus import Prometheus
from tests.observability.queries import Query, queries
from tokenloom.supervisor.certificates import make_certificates
from tokenloom.v1 import inference_pb2, inference_pb2_grpc

MODEL = "tokenloom-demo"
NAME = "gateway.tokenloom.internal"
"""In the gateway's certificate."""
SERVE = (
    "--prefill=1",
    "--decode=1",
    "--pd-threshold=0",
    "--api-key=a key,another key",
    '--speculative-config={"method": "ngram"}',
)
TRACED = "vllm:time_to_first_token_seconds_bucket"
"""A series with exemplars."""
ROUNDS = 12
"""Of requests, a second apart: rates need several scrapes."""
INTERVAL = "15s"
"""What Grafana would choose as the interval of a rate for scrapes of a second."""
NEEDS = {'status=~"5.."': "a part that fails or a mesh that is full"}
"""Parts of queries that may find nothing in this mesh, with what they need."""


@dataclass(frozen=True)
class Outcome:
    """What a query returned."""

    query: Query
    num_values: int
    excuse: str
    """Why it may be empty; empty: it may not."""

    @property
    def is_failure(self) -> bool:
        return not self.num_values and not self.excuse


def check(server: Prometheus) -> Iterator[Outcome]:
    """Execute every query."""
    for query in queries():
        excuse = next((reason for name, reason in NEEDS.items() if name in query.text), "")
        values = server.values(query.filled(model=MODEL, interval=INTERVAL))
        yield Outcome(query, len(values), excuse)


class Client:
    """Sends requests to a gateway over TLS."""

    def __init__(self, url: str, grpc_address: str, authority: Path) -> None:
        """``authority``: the certificate that has signed the gateway's."""
        self._url = url
        self._context = ssl.create_default_context(cafile=str(authority))
        self._context.check_hostname = False  # the gateway is called by its address
        self._grpc_address = grpc_address
        self._credentials = grpc.ssl_channel_credentials(authority.read_bytes())

    def send(self, path: str, body: Mapping[str, object], key: str = "a key") -> int:
        """Send a request over HTTP; return its status."""
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        request = urllib.request.Request(f"{self._url}{path}", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=prometheus.SECONDS, context=self._context) as response:
                response.read()
                return int(response.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    def call_without_key(self) -> str:
        """Make a call over gRPC that is refused; return its code."""
        options = (("grpc.ssl_target_name_override", NAME),)
        with grpc.secure_channel(self._grpc_address, self._credentials, options) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            try:
                stub.ListModels(inference_pb2.ListModelsRequest(), timeout=prometheus.SECONDS)
            except grpc.RpcError as error:
                return str(error.code().name)  # type: ignore[attr-defined]
        return "OK"


def send_traffic(client: Client, number: int) -> list[object]:
    """Send answers of several kinds, the same prompt twice, and refusals. Returns the statuses."""
    prompt = f"Round {number}. " + "The quick brown fox jumps over the lazy dog. " * 4
    chat = {"messages": [{"role": "user", "content": f"What is {number} plus 4?"}], "max_tokens": 12}
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return [
        client.send("/v1/completions", {"prompt": prompt, "max_tokens": 8}),
        client.send("/v1/completions", {"prompt": prompt, "max_tokens": 8, "n": 2}, "another key"),
        client.send("/v1/chat/completions", chat | {"stream": True}),
        client.send("/v1/chat/completions", chat | {"response_format": form}),
        client.send("/v1/chat/completions", chat | {"temperature": -1}),
        client.send("/v1/chat/completions", chat, "no key"),
        client.send("/nowhere", {}),
        client.call_without_key(),
    ]


STATUSES = [200, 200, 200, 200, 400, 401, 404, "UNAUTHENTICATED"]


def targets_of(served: Served) -> dict[str, list[str]]:
    """Return the addresses of /metrics, by the jobs that the repository's configuration of Prometheus has."""
    found: dict[str, list[str]] = {}
    for part in served.ps():
        job = part["role"] if part["service"] == "engine" else part["service"].replace("_", "-")
        found.setdefault(job, []).append(part["metrics"])
    return found


def run(directory: Path) -> tuple[list[Outcome], list[str]]:
    """Run mesh, Prometheus and traffic. Returns the outcomes, and what else is wrong: targets, rules, exemplars."""
    make_certificates(directory / "tls", days=30)
    certificate = [f"--public-tls-cert={directory}/tls/gateway.crt", f"--public-tls-key={directory}/tls/gateway.key"]
    with Collector() as collector, serving() as serve:
        served = serve(*SERVE, *certificate, f"--otlp-endpoint={collector.endpoint}")
        (gateway,) = (part for part in served.ps() if part["service"] == "gateway")
        client = Client(served.url, gateway["address"], directory / "tls" / "ca.crt")
        with prometheus.running(directory, _free_port(), targets_of(served)) as server:
            for number in range(ROUNDS):
                statuses = send_traffic(client, number)
                assert statuses == STATUSES, statuses
                time.sleep(1)
            problems = [*server.bad_targets(), *server.bad_rules()]
            if not any("trace_id" in labels for labels in server.exemplars(TRACED)):
                problems.append(f"{TRACED} has no exemplar")
            return list(check(server)), problems


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _show(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        state = "ok" if outcome.num_values else "empty"
        print(f"{state:5} {outcome.num_values:4} {outcome.query.where}: {outcome.query.text}")
        if outcome.excuse and not outcome.num_values:
            print(f"{'':11}needs {outcome.excuse}")


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    if not prometheus.is_installed():
        print(prometheus.HINT, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="tl-", dir="/tmp") as directory:
        outcomes, problems = run(Path(directory))
    _show(outcomes)
    failures = [outcome for outcome in outcomes if outcome.is_failure]
    excused = sum(bool(outcome.excuse) and not outcome.num_values for outcome in outcomes)
    print(f"{len(outcomes)} queries, {len(failures)} empty, {excused} that need something else")
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if failures or problems else 0


if __name__ == "__main__":
    sys.exit(main())
