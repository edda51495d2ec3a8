"""Serves ``/v1/batches``, and puts files and batches together if the gateway has a directory for them."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tokenloom.request.errors import FailedPrecondition, InvalidArgument, NotFound
from tokenloom.services.runtime.host.host import Host

from ..encoding.sse import encode_json
from ..files.disk import Disk
from ..files.file_store import FileLimits, FileStore, new_file_id
from ..files.files_api import PURPOSE, FilesApi, id_of
from ..files.page_query import PageQuery
from ..http.http_exchange import HttpExchange
from ..http.internal_call import InternalCalls
from ..http.request_body import decode_object
from ..http.route import Routes
from ..openai.body_reader import Body, BodyReader
from ..openapi import route_table
from ..openapi.batch_schemas import CreateBatchRequest
from ..settings.gateway_settings import GatewaySettings
from ..tenants.api_keys import ApiKeys
from .batch import ENDPOINTS, StoredBatch, new_batch_id
from .batch_run import BatchGauges, BatchResources, LineMetrics
from .batch_runner import BatchRunner
from .batch_store import BatchStore
from .batch_task import BatchLimits

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


class Batches:
    """Holds what a gateway with a directory for batches has. The routes exist before the application that answers the
    lines of batches, so :meth:`start` comes last.

    Attributes:
        routes: Of files and batches.
        uploads: The files of clients.
    """

    def __init__(self, settings: GatewaySettings, directory: Path, host: Host, keys: ApiKeys) -> None:
        self._disk = Disk(directory)
        limits = FileLimits(settings.max_file_bytes, settings.tenant_file_bytes, settings.tenant_files)
        self._files = FileStore(self._disk, limits)
        self._batches = BatchStore(self._disk)
        lines = LineMetrics(host.metrics)
        around = BatchResources(self._disk, lines, host.random, time.time)
        batch_limits = BatchLimits(settings.max_batch_lines, settings.max_body_bytes, settings.batch_concurrency)
        self._runner = BatchRunner(self._batches, self._files, batch_limits, around, keys.tenant)
        host.metrics.register(BatchGauges(self._batches, self._files, lines))
        api = BatchesApi(BodyReader(strict=settings.strict), self._files, self._batches, self._runner, time.time)
        self.uploads = FilesApi(self._disk, self._files)
        self.routes: Routes = {**self.uploads.routes(), **api.routes()}

    async def open(self) -> None:
        """Take the directory, and read what it holds. Raises ``InvalidArgument`` if that fails."""
        try:
            await self._disk.open()
            await self._files.open()
            await self._batches.open()
        except OSError as error:
            raise InvalidArgument(
                f"--batch-dir: {self._disk.directory} cannot be used: {error.strerror}", "batch_dir"
            ) from error

    def start(self, calls: InternalCalls) -> None:
        """Run batches; resume those of the gateway before this one."""
        self._runner.start(calls)

    async def close(self) -> None:
        """Stop the batches where they are, and leave the directory to the next gateway. Idempotent."""
        await self._runner.close()
        await self._disk.close()


async def open_batches(settings: GatewaySettings, host: Host, keys: ApiKeys) -> Batches | None:
    """Return files and batches, opened; None without ``--batch-dir``."""
    if settings.batch_dir is None:
        return None
    batches = Batches(settings, settings.batch_dir, host, keys)
    try:
        await batches.open()
    except BaseException:
        await batches.close()
        raise
    return batches


def absent_routes() -> Routes:
    """Return the routes of a gateway without ``--batch-dir``, which say so."""

    async def refuse(exchange: HttpExchange) -> NoReturn:
        raise NotFound("This gateway keeps no files and runs no batches; start it with --batch-dir DIR.")

    return dict.fromkeys((route for route in route_table.ROUTES if route.is_of_batches), refuse)
