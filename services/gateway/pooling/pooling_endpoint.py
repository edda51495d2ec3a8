"""An endpoint that pools: reads a body, runs the call and writes JSON."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from ..endpoints.generation_endpoint import IGNORED_HEADER, listed, trace_headers
from ..generation.generator import Generator
from ..http.http_exchange import HttpExchange, respond_in_pieces
from ..http.json_body import BodyParser
from ..openai.body_reader import Body
from ..records.model_names import ModelNames
from ..records.pooling_input import PoolingInput
from ..tenants.tenant import Tenant
from .pooling_api import PoolingApi, Shape


@dataclass(frozen=True, slots=True)
class PoolingEndpoint:
    """Runs an API that pools."""

    api: PoolingApi
    generator: Generator
    names: ModelNames
    parser: BodyParser
    max_body_bytes: int

    async def __call__(self, exchange: HttpExchange) -> None:
        with await exchange.read_body(self.max_body_bytes) as received:
            job, shape, ignored = await self.parser.read(received.data, partial(self._read, exchange.tenant))
        if exchange.internal_tenant is not None:
            job = replace(job, job=replace(job.job, is_sheddable=True))
        headers = [(IGNORED_HEADER, listed(ignored))] if ignored else []
        with exchange.until_disconnected():
            async with self.generator.pool(job, trace_headers(exchange)) as pooling:
                await respond_in_pieces(exchange, shape(pooling), headers)

    def _read(self, tenant: Tenant, body: Body) -> tuple[PoolingInput, Shape, Sequence[str]]:
        adapter = self.names.find(body.get("model"))
        job, shape, ignored = self.api.read(body, tenant)
        return replace(job, job=replace(job.job, adapter=adapter)), shape, ignored
