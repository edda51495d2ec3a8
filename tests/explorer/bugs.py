"""Faults that reading once found, put back one at a time: the explorer must find each of them soon."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from tokenloom.engine_core.client.async_core_client import AsyncSocket
from tokenloom.engine_core.data_parallel.group_hub import GroupHub
from tokenloom.engine_core.scheduling.media_rows import RowStore
from tokenloom.engine_core.wire.frames import Frame
from tokenloom.request.errors import FailedPrecondition
from tokenloom.services.engine.control import pause
from tokenloom.services.engine.core.row_loads import RowLoads
from tokenloom.services.engine.records.attempt import Attempt
from tokenloom.services.gateway.batches.batch_task import BatchTask
from tokenloom.services.gateway.files.file_store import FileRoom, FileStore
from tokenloom.services.gateway.generation.charge import Charge, Charges
from tokenloom.services.gateway.generation.generator import Generator
from tokenloom.services.gateway.generation.resumable import ResumableRequests
from tokenloom.services.gateway.kserve import kserve_servicer
from tokenloom.services.gateway.records.request_ids import ResumeToken

from .runner import size_of

T = TypeVar("T")


async def _cancel_and_write(task: BatchTask) -> None:
    """Write that a batch is cancelled from the client's request, while the batch's own task writes too."""
    batch, context = task.batch, task._context
    if batch.is_ended or batch.status == "cancelling":
        return
    await context.batches.change(batch, "cancelling", context.around.now())
    task._cancelled.set()


async def _write_once(task: BatchTask, write: Callable[[], Awaitable[None]]) -> None:
    """Give a batch up when the disk refuses how it ends."""
    await write()


def _reserve_nothing(store: FileStore, tenant: str, num_files: int = 1) -> FileRoom:
    """Compare a tenant's limit with the files that are stored, not with those that arrive."""
    if len(store.of(tenant)) + num_files > store.limits.tenant_files:
        raise FailedPrecondition("as many files are stored as may be")
    return store._shelf(tenant).take_anyway(num_files, 0)


def _grow_freely(store: FileStore, room: FileRoom, tenant: str, size: int) -> None:
    """Compare the bytes with the limit of one file only."""
    store.check_size(size)
    room.hold(size)


_find = ResumableRequests.find


def _give_place_back(resumable: ResumableRequests, token: ResumeToken, tenant: str) -> None:
    """Give the place of a request without a client back before the call that repeats it has one."""
    if (before := _find(resumable, token, tenant)) is not None:
        before.admitted.close()


def _charge_again(charges: Charges, tenant: str, request_id: str, token: ResumeToken) -> Charge:
    """Count every call for itself."""
    return Charge()


def _forget_beginning(connection: AsyncSocket, frames: Sequence[Frame], on_begun: object = None) -> Awaitable[None]:
    """Take the rows of a message back although its beginning was sent."""
    return _SEND(connection, frames)


def _open_for_any(generator: Generator, *args: Any, outlives_call: bool = True, **options: Any) -> Any:
    """Take every cancelled call for one whose client may come back."""
    return _OPEN(generator, *args, **options)


def _withdraw_nothing(generator: Generator, request_id: str, tenant: str) -> None:
    """Let an output processor go on with a request that was cancelled."""


def _wait_for_ever(requests: AsyncIterator[Any], idle_seconds: float, noun: str) -> Awaitable[Any]:
    """Let a stream be silent as long as it likes."""
    return anext(requests, None)


def _as_it_is(awaitable: Awaitable[T]) -> Awaitable[T]:
    """End with the task that waits."""
    return awaitable


def _leave_by_rank(hub: GroupHub, rank: int, frames: object, error: OSError) -> None:
    """Take the end of a connection for the end of its rank, whichever process that is now."""
    with hub._lock:
        hub._ranks.pop(rank, None)
        if hub._rounds.leave(rank) and not hub._is_closed:
            hub._close()


_OPEN, _SEND = Generator.open, AsyncSocket.send


def _read_on(loads: RowLoads, attempt: Attempt) -> None:
    """Read rows to their end, although no request waits for them any more."""


def _wait_for_others(media: RowStore, holding: Any) -> None:
    """Let a request that runs wait for rows that others hold, which wait for its seat."""
    media._hold(holding.request, holding.request.kv.num_computed_tokens)


_BUGS: dict[str, tuple[str, dict[tuple[Any, str], Any]]] = {
    "two_writers": ("batches", {(BatchTask, "cancel"): _cancel_and_write}),
    "written_once": ("batches", {(BatchTask, "_persist"): _write_once}),
    "files_that_arrive": ("files", {(FileStore, "take"): _reserve_nothing, (FileStore, "grow"): _grow_freely}),
    "place_given_back": ("generations", {(ResumableRequests, "find"): _give_place_back}),
    "charged_by_call": ("generations", {(Charges, "of"): _charge_again}),
    "cancelled_as_lost": ("responses", {(Generator, "open"): _open_for_any, (Generator, "cancel"): _withdraw_nothing}),
    "silent_streams": ("streams", {(kserve_servicer, "next_request"): _wait_for_ever}),
    "half_resumed": ("pauses", {(pause, "completed"): _as_it_is}),
    "end_of_the_predecessor": ("hubs", {(GroupHub, "_leave"): _leave_by_rank}),
    "rows_for_none": ("rows", {(RowLoads, "_leave"): _read_on}),
    "rows_held_by_all": ("rows", {(RowStore, "_extend_running"): _wait_for_others}),
    "rows_taken_back": ("core clients", {(AsyncSocket, "send"): _forget_beginning}),
}
BUGS = tuple(_BUGS)


def scenario_of(bug: str) -> str:
    """Return the scenario that uses what the bug is in."""
    return _BUGS[bug][0]


@contextmanager
def reintroduced(bug: str) -> Iterator[None]:
    """Put a bug into the product for the length of the ``with``. The plans stay those of the product."""
    scenario, wrong = _BUGS[bug]
    size_of(scenario)
    right = {(where, name): getattr(where, name) for where, name in wrong}
    try:
        for (where, name), method in wrong.items():
            setattr(where, name, method)
        yield
    finally:
        for (where, name), method in right.items():
            setattr(where, name, method)
