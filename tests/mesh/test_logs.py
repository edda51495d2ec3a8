"""A request's lines in the logs of the services carry its id or its trace."""

import json
import logging
from pathlib import Path

import pytest

from tests.collector import Collector
from tests.mesh.harness import Mesh
from tokenloom.services.runtime.telemetry.logs import JsonFormatter

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_one_id_leads_from_the_clients_to_the_engine(socket_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    formatted: list[dict[str, str]] = []
    formatter = JsonFormatter("mesh", "mesh-0")
    handler = logging.Handler()
    handler.emit = lambda record: formatted.append(json.loads(formatter.format(record)))  # type: ignore[method-assign]
    caplog.set_level(logging.DEBUG, logger="tokenloom")
    logging.getLogger("tokenloom").addHandler(handler)
    try:
        with Collector() as collector:
            common = {"otlp_endpoint": collector.endpoint}
            async with Mesh(socket_dir, common=common).running() as mesh, mesh.http() as http:
                body = {"prompt": "a secret word", "max_tokens": 2}
                headers = {"x-request-id": "client-7", "traceparent": PARENT}
                (await http.post("/v1/completions", json=body, headers=headers)).raise_for_status()
    finally:
        logging.getLogger("tokenloom").removeHandler(handler)
    (first,) = (line for line in formatted if line["message"] == "is the client's client-7")
    assert first["trace_id"] == PARENT.split("-")[1]
    mentions = [line for line in formatted if line.get("request_id") == first["request_id"]]
    services = {line["logger"].removeprefix("tokenloom.services.").partition(".")[0] for line in mentions}
    assert services == {"gateway", "output_processor", "engine"}
    assert {line.get("trace_id") for line in mentions} == {first["trace_id"]}
    spans = {span.span_id.hex() for span in collector.spans}
    traced = [line for line in formatted if line.get("trace_id") == first["trace_id"]]
    assert {line["span_id"] for line in traced} <= spans
    calls = {line["message"] for line in traced if line["logger"].endswith("servicer_edge")}
    assert calls == {"/tokenloom.v1.Tokenizer/Encode", "/tokenloom.v1.Coordinator/Pick"}
    assert "secret" not in str(formatted)
