"""The load header."""

import base64
import json

import httpx
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from tests.services.gateway.fakes import FakeMesh
from tokenloom.services.gateway.endpoints.orca import response_headers
from tokenloom.services.gateway.mesh.mesh_view import MeshLoad

LOAD = MeshLoad(num_running=3, num_waiting=2, kv_usage=0.25)
METRICS = {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 2.0, "num_requests_running": 3.0}


def value(wanted: bytes) -> str:
    ((name, text),) = response_headers(wanted, LOAD)
    assert name == b"endpoint-load-metrics"
    return text.decode()


def test_text() -> None:
    assert value(b"text") == (
        "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=2.0, "
        "named_metrics.num_requests_running=3.0"
    )


def test_json() -> None:
    kind, _, body = value(b"JSON").partition(" ")
    assert kind == "JSON"
    assert json.loads(body) == {"named_metrics": METRICS}


def test_binary_is_the_protobuf_of_orca() -> None:
    """Its message as protobuf itself reads it, from the one field of it that is used."""
    kind, _, body = value(b"BIN").partition(" ")
    assert kind == "BIN"
    file = descriptor_pb2.FileDescriptorProto(name="orca_test.proto", package="orca_test", syntax="proto3")
    report = file.message_type.add(name="OrcaLoadReport")
    entry = report.nested_type.add(name="NamedMetricsEntry")
    entry.options.map_entry = True
    field = descriptor_pb2.FieldDescriptorProto
    entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    entry.field.add(name="value", number=2, type=field.TYPE_DOUBLE, label=field.LABEL_OPTIONAL)
    report.field.add(
        name="named_metrics",
        number=8,
        type=field.TYPE_MESSAGE,
        label=field.LABEL_REPEATED,
        type_name=".orca_test.OrcaLoadReport.NamedMetricsEntry",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    message = message_factory.GetMessageClass(pool.FindMessageTypeByName("orca_test.OrcaLoadReport"))
    assert dict(message.FromString(base64.b64decode(body)).named_metrics) == METRICS


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_carries_it_when_asked(mesh: FakeMesh, http: httpx.AsyncClient, stream: bool) -> None:
    mesh.outputs.auto = ["x"]
    body = {"prompt": "four", "stream": stream}
    for headers, has_header in (({}, False), ({"endpoint-load-metrics-format": "TEXT"}, True)):
        answer = await http.post("/v1/completions", json=body, headers=headers)
        assert ("endpoint-load-metrics" in answer.headers) == has_header
    assert answer.headers["endpoint-load-metrics"] == value(b"TEXT")
    unknown = await http.post("/v1/completions", json=body, headers={"endpoint-load-metrics-format": "XML"})
    assert unknown.status_code == 200
    assert "endpoint-load-metrics" not in unknown.headers
