"""Puts files and batches together, if the gateway has a directory for them."""

import time
from pathlib import Path
from typing import NoReturn

from tokenloom.request.errors import NotFound
from tokenloom.services.runtime.host.host import Host

from ..files.disk import Disk
from ..files.file_store import FileLimits, FileStore
from ..files.files_api import FilesApi
from ..http.http_exchange import HttpExchange
from ..http.internal_call import InternalCalls
from ..http.route import Routes
from ..openai.body_reader import BodyReader
from ..openapi import route_table
from ..settings.gateway_settings import GatewaySettings
from ..tenants.api_keys import ApiKeys
from .batch_run import BatchGauges, BatchResources, LineMetrics
from .batch_runner import BatchRunner
from .batch_store import BatchStore
from .batch_task import BatchLimits
from .batches_api import BatchesApi


class Batches:
    """Holds what a gateway with a directory for batches has. The routes exist before the application that answers the
    lines of batches, so :meth:`start` comes last.

    Attributes:
        routes: Of files and batches.
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
        self.routes: Routes = {**FilesApi(self._disk, self._files).routes(), **api.routes()}

    async def open(self) -> None:
        """Take the directory, and read what it holds. Raises ``FailedPrecondition`` if that fails."""
        await self._disk.open()
        await self._files.open()
        await self._batches.open()

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
    await batches.open()
    return batches


def absent_routes() -> Routes:
    """Return the routes of a gateway without ``--batch-dir``, which say so."""

    async def refuse(exchange: HttpExchange) -> NoReturn:
        raise NotFound("This gateway keeps no files and runs no batches; start it with --batch-dir DIR.")

    return dict.fromkeys((route for route in route_table.ROUTES if route.is_of_batches), refuse)
