"""Serves ``/v1/batches``."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from tokenloom.request.errors import FailedPrecondition, InvalidArgument

from ..encoding.sse import encode_json
from ..files.file_store import FileStore, new_file_id
from ..files.files_api import PURPOSE, id_of
from ..files.page_query import PageQuery
from ..http.http_exchange import HttpExchange
from ..http.json_body import decode_object
from ..http.route import Routes
from ..openai.body_reader import Body, BodyReader
from ..openapi import route_table
from ..openapi.batch_schemas import CreateBatchRequest
from .batch import ENDPOINTS, StoredBatch, new_batch_id
from .batch_runner import BatchRunner
from .batch_store import BatchStore

MAX_BODY_BYTES = 64 << 10
MAX_PAIRS = 16
MAX_KEY, MAX_VALUE = 64, 512
"""Limits of ``metadata``, as at OpenAI."""
MAX_HOURS = 7 * 24
_WINDOW = re.compile(r"([0-9]{1,3})h")


@dataclass(frozen=True, slots=True)
class BatchesApi:
    """Answers requests of clients; a client sees only the batches of its own tenant."""

    reader: BodyReader
    files: FileStore
    batches: BatchStore
    runner: BatchRunner
    now: Callable[[], float]
    """Returns seconds since 1970."""

    def routes(self) -> Routes:
        return {
            route_table.BATCHES: self.list_batches,
            route_table.CREATE_BATCH: self.create,
            route_table.BATCH: self.retrieve,
            route_table.CANCEL_BATCH: self.cancel,
        }

    async def create(self, exchange: HttpExchange) -> None:
        """Begin a batch."""
        with await exchange.read_body(MAX_BODY_BYTES) as received:
            batch = self._read(decode_object(received.data), exchange.tenant.name)
        await self.runner.create(batch)
        await self._respond(exchange, batch)

    async def list_batches(self, exchange: HttpExchange) -> None:
        """Answer with the tenant's batches."""
        query = PageQuery.read(exchange.query, most=100, default=20, names=("after", "limit"))
        batches = [batch.to_object() for batch in self.batches.of(exchange.tenant.name)]
        await exchange.respond(200, encode_json(query.page(batches)))

    async def retrieve(self, exchange: HttpExchange) -> None:
        """Answer with a batch."""
        await self._respond(exchange, self.batches.get(id_of(exchange), exchange.tenant.name))

    async def cancel(self, exchange: HttpExchange) -> None:
        """Stop a batch; the answers that are there are kept."""
        batch = self.batches.get(id_of(exchange), exchange.tenant.name)
        await self.runner.cancel(batch)
        if batch.is_ended and batch.status != "cancelled":
            raise FailedPrecondition(f"the batch has ended already; it is {batch.status}")
        await self._respond(exchange, batch)

    def _read(self, body: Body, tenant: str) -> StoredBatch:
        """Return what a body asks for. Raises ``InvalidArgument`` naming the field, and ``NotFound`` for the file."""
        fields = self.reader.read(body, CreateBatchRequest)
        if fields.endpoint not in ENDPOINTS:
            raise InvalidArgument(f"endpoint must be one of {', '.join(ENDPOINTS)}", "endpoint")
        file = self.files.get(fields.input_file_id, tenant, "input_file_id")
        if file.purpose != PURPOSE:
            raise InvalidArgument(f"input_file_id must be a file with the purpose {PURPOSE!r}", "input_file_id")
        now = self.now()
        batch = StoredBatch(
            id=new_batch_id(),
            tenant=tenant,
            endpoint=fields.endpoint,
            input_file_id=file.id,
            completion_window=fields.completion_window,
            output_file_id=new_file_id(),
            error_file_id=new_file_id(),
            expires_at=now + _seconds(fields.completion_window),
            metadata=_metadata(fields.metadata),
        )
        batch.begin("validating", now)
        return batch

    async def _respond(self, exchange: HttpExchange, batch: StoredBatch) -> None:
        await exchange.respond(200, encode_json(batch.to_object()))


def _seconds(window: str) -> float:
    match = _WINDOW.fullmatch(window)
    if match is None or not 1 <= int(match[1]) <= MAX_HOURS:
        raise InvalidArgument(f"completion_window must be 1h to {MAX_HOURS}h, such as 24h", "completion_window")
    return int(match[1]) * 3600.0


def _metadata(given: dict[str, str] | None) -> dict[str, str] | None:
    if given is None:
        return None
    is_long = any(len(key) > MAX_KEY or len(value) > MAX_VALUE for key, value in given.items())
    if len(given) > MAX_PAIRS or is_long:
        limits = f"{MAX_PAIRS} pairs of at most {MAX_KEY} and {MAX_VALUE} characters"
        raise InvalidArgument(f"metadata may have {limits}", "metadata")
    return given
