"""An output processor in the middle of fakes."""

from dataclasses import dataclass, field

import grpc.aio
from tokenizers import Tokenizer

from tests.services.output_processor.fakes import EngineStream, FakeCoordinator, FakeEngine, Gateway, Served
from tokenloom.services.runtime.host.host import Host
from tokenloom.v1.output_processor_pb2 import RecallRequest, RecallResponse
from tokenloom.v1.output_processor_pb2_grpc import OutputProcessorStub


@dataclass
class Mesh:
    """An output processor between two engines, a coordinator and this test."""

    engines: list[FakeEngine]
    servers: list[Served]
    coordinator: FakeCoordinator
    channel: grpc.aio.Channel
    tokenizer: Tokenizer
    host: Host
    gateways: list[Gateway] = field(default_factory=list)

    async def gateway(self, credit: int = 1000, peer_id: str = "gateway-0") -> Gateway:
        gateway = Gateway(self.channel, credit, peer_id)
        self.gateways.append(gateway)
        await gateway.greet()
        return gateway

    async def started(self, gateway: Gateway, *submits: object) -> tuple[EngineStream, list[int]]:
        """Submits, and returns the first engine's stream with the attempts' slots."""
        await gateway.send(submit=submits)
        stream = await self.engines[0].next_stream()
        return stream, [add.slot for add in await stream.next_adds(len(submits))]

    async def recall(self, wanted: RecallRequest) -> RecallResponse:
        """Return what a request was begun with."""
        recalled: RecallResponse = await OutputProcessorStub(self.channel).Recall(wanted)
        return recalled

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids
