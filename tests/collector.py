"""An OpenTelemetry collector for tests: it keeps what it gets."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Use as ``with``; everything that was sent is there when it has ended.

    Attributes:
        spans: Of all services.
        services: ``service.name`` of each that sent some.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        self._server = grpc.server(ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port("127.0.0.1:0")

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> "Collector":
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(1).wait()

    def Export(self, request: Any, context: object) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            for attribute in resource.resource.attributes:
                if attribute.key == "service.name":
                    self.services.add(attribute.value.string_value)
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> Span:
        """The only span of this name."""
        (span,) = (span for span in self.spans if span.name == name)
        return span
