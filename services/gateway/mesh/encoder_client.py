"""Puts the files of requests at encoders, and puts them elsewhere when an encoder is lost."""

import asyncio
import hashlib
import logging
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

import grpc.aio

from tokenloom.request import errors, wire_errors
from tokenloom.services.runtime.fair_stage import FairStage
from tokenloom.services.runtime.liveness import answered
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.peers.retry_budget import RetryBudget, RetryDebt, cause_of
from tokenloom.services.runtime.tasks import Tasks, is_cancelled
from tokenloom.v1 import encoder_pb2, encoder_pb2_grpc, output_processor_pb2
from tokenloom.v1.tokenizer_pb2 import MediaSize

from ..records.media import AnyFile, ClientFile, KeptFiles, MediaPart, StoredMedia, noun_of
from .mesh_view import MeshView

if TYPE_CHECKING:
    from tokenloom.v1.encoder_pb2_grpc import EncoderAsyncStub

log = logging.getLogger(__name__)

MAX_PUTS: Final = 8
"""Files that are on their way to an encoder; further ones wait for their tenants' turns."""
MAX_FETCHES: Final = 8
"""Files that encoders fetch; a slow host must not take the turns of files that are here."""
MAX_WAITING: Final = 4096
MAX_WAITING_BYTES: Final = 1 << 40
"""Not limited here: the files that the gateway holds are."""
PIECE_BYTES: Final = 1 << 20
"""Of a file in one message."""
WAIT_SECONDS: Final = 60.0
"""How long a request waits for an encoder that takes its files: one that was killed starts again and loads a tower."""
_NO_ENCODER: Final = "No encoder is serving; start one (--encoders), or retry when it is back."
AGAIN_SECONDS: Final = 0.2
RELEASE_SECONDS: Final = 5.0
RELEASE_ATTEMPTS: Final = 4
LEAVE_SECONDS: Final = 10.0
"""How long calls in flight may go on at an encoder that has left."""
MAX_NAMES: Final = 10_000
"""Names of images that are known; of the tenant with the most, the oldest one is forgotten."""

_PLACE: Final = re.compile(r"media\[([0-9]{1,9})\]")
T = TypeVar("T")
_Stub: TypeAlias = "EncoderAsyncStub"


@dataclass(frozen=True, slots=True)
class FilesOwner:
    """Says whose files they are, and for which request they stay."""

    tenant: str
    salt: bytes
    """Of the request's KV blocks: files with different salts are different files."""
    request_id: str
    is_kept: bool = False
    """Whether the gateway keeps the files for later requests."""


class EncoderClient:
    """Finds the encoder for each file, which is the same at all gateways, and sends it there unless it is there."""

    def __init__(self, view: MeshView, channels: Channels, draw_id: Callable[[], str], kept: KeptFiles) -> None:
        """``draw_id``: returns random ids, by which encoders know requests. ``kept``: files of stored conversations."""
        self._view = view
        self._channels = channels
        self._draw_id = draw_id
        self.kept = kept
        self._links: dict[str, _Link] = {}  # by address
        loop = asyncio.get_running_loop()
        self._budget = RetryBudget(loop.time)
        self._fetches = FairStage(
            MAX_FETCHES, "images to fetch", max_waiting=MAX_WAITING, max_cost=MAX_WAITING, leaves_spare=True
        )
        self._names: dict[str, OrderedDict[str, bytes]] = {}  # by tenant, digests by name; bounded
        self._num_names = 0
        self._tasks = Tasks(lambda error: log.error("an encoder got no word of an end", exc_info=error))

    def owner(self, tenant: str, salt: bytes, *, is_kept: bool = False) -> FilesOwner:
        """Return whose files those of a new request are."""
        return FilesOwner(tenant, salt, self._draw_id(), is_kept)

    def open(
        self, parts: Sequence[MediaPart], files: Mapping[bytes, ClientFile], owner: FilesOwner, options: bytes = b""
    ) -> "RequestMedia":
        """Return what places the images of a request. ``files``: those of its body; ``options``: of the processor."""
        return RequestMedia(self, parts, files, owner, options)

    async def close(self) -> None:
        """End all calls."""
        await self._tasks.close()
        for link in self._links.values():
            await link.channel.close()

    def digest_of(self, part: MediaPart, tenant: str) -> bytes:
        """Return the digest of a part's file; empty: it is only at a URL. Raises ``InvalidArgument`` for a name that is
        not known."""
        if part.file is not None:
            digest = part.file.digest
        elif part.digest or part.url:
            digest = part.digest
        elif (names := self._names.get(tenant)) is not None and part.name in names:
            digest = names[part.name]
        else:
            raise _unknown(part)
        return digest

    def note_name(self, part: MediaPart, tenant: str, digest: bytes) -> None:
        """Remember how a tenant calls a file."""
        if not part.name:
            return
        names = self._names.setdefault(tenant, OrderedDict())
        self._num_names += part.name not in names
        names[part.name] = digest
        names.move_to_end(part.name)
        if self._num_names > MAX_NAMES:  # so that no tenant drops the names of the others
            most = max(self._names, key=lambda each: len(self._names[each]))
            self._names[most].popitem(last=False)
            self._num_names -= 1
            if not self._names[most]:
                del self._names[most]

    async def place(
        self, part: MediaPart, digest: bytes, file: AnyFile | None, owner: FilesOwner, asked: dict[str, None]
    ) -> tuple[str, encoder_pb2.PutResponse]:
        """Return the address of an encoder that has a file now, and what it says of it.

        ``digest``: empty if the file is only at a URL. ``file``: None if only encoders may have it. ``asked``: takes
        the addresses of all encoders that may have the file from now on, also if this is cancelled. Raises
        ``InvalidArgument`` for a file that no encoder takes, ``PermissionDenied`` for a URL, and ``Unavailable``, or
        what refused it, when no encoder takes it in time.
        """
        loop, debt = asyncio.get_running_loop(), RetryDebt(self._budget)
        self._budget.add_request()
        until, refusal = loop.time() + WAIT_SECONDS, errors.Unavailable(_NO_ENCODER)
        cost = 1 + (0 if file is None else file.num_bytes)
        while True:
            num_without, addresses = 0, self._addresses()
            for address in _ranked(addresses, digest or part.url.encode()):
                if not debt.pay():
                    break
                link = self._link(address)
                stage = link.turns if digest else self._fetches
                await stage.begin(owner.tenant, cost)
                asked[address] = None
                try:
                    if (found := await self._put(link.stub, part, digest, file, owner)) is not None:
                        return address, found
                    num_without += 1
                except errors.TokenloomError as error:
                    if (cause := cause_of(error)) is None:
                        _name(error, part)
                        raise
                    debt.failed(cause)
                    refusal = error  # type: ignore[assignment]
                finally:
                    stage.end(owner.tenant, cost)
            if num_without and num_without == len(addresses):
                raise _unknown(part)
            if loop.time() + AGAIN_SECONDS > until:
                raise refusal
            await asyncio.sleep(AGAIN_SECONDS)

    def release(self, addresses: Sequence[str], owner: FilesOwner) -> None:
        """Let encoders forget a request's files; nothing waits for it."""
        for address in addresses:
            self._tasks.spawn(self._release(address, owner), name="release files")

    async def _put(
        self, stub: _Stub, part: MediaPart, digest: bytes, file: AnyFile | None, owner: FilesOwner
    ) -> encoder_pb2.PutResponse | None:
        """Return what an encoder says of a file that it has now; None: it has none, and there is none to send."""
        header = encoder_pb2.PutHeader(
            tenant=owner.tenant,
            cache_salt=owner.salt,
            kind=part.kind,
            digest=digest,
            num_bytes=0 if file is None else file.num_bytes,
            request_id=owner.request_id,
            url="" if digest else part.url,
        )
        if digest:
            asked = encoder_pb2.HasRequest(
                tenant=owner.tenant,
                cache_salt=owner.salt,
                digest=[digest],
                request_id=owner.request_id,
                kind=part.kind,
            )
            found: encoder_pb2.HasResponse = await _answer(stub, stub.Has(asked))
            if found.has and found.has[0]:
                return found.facts[0]
            if file is None:
                return None  # one that was fetched from a URL is where the URL's hash has put it
        sent = ClientFile((await file.read(),), file.num_bytes, digest) if isinstance(file, StoredMedia) else file
        failed: list[errors.TokenloomError] = []
        try:
            return await _answer(stub, stub.Put(_messages(header, sent, failed)))
        except errors.Unavailable:
            if failed:  # gRPC does not say why it has ended the call
                raise failed[0] from None
            raise

    def _addresses(self) -> list[str]:
        return [entry.identity.address for entry in self._view.encoders]

    def _known(self) -> set[str]:
        """Return the addresses of those that drain too: they wait until the files that they have are released."""
        return {entry.identity.address for entry in self._view.known_encoders}

    def _link(self, address: str) -> "_Link":
        if address not in self._links:
            for left in self._links.keys() - self._known():
                channel = self._links.pop(left).channel
                self._tasks.spawn(channel.close(LEAVE_SECONDS), name="close a channel to an encoder")
            self._links[address] = _Link(self._channels.open(address, "encoder"))
        return self._links[address]

    async def _release(self, address: str, owner: FilesOwner) -> None:
        request = encoder_pb2.ReleaseFilesRequest(request_id=owner.request_id, tenant=owner.tenant)
        # A call that is lost would leave the file pinned until its lease ends: it would take the room
        # of others, and an encoder that drains would wait for it.
        for attempt in range(RELEASE_ATTEMPTS):
            if address not in self._known():  # it is gone, and its memory with it
                return
            try:
                await self._link(address).stub.ReleaseFiles(request, timeout=RELEASE_SECONDS)
                return
            except grpc.aio.AioRpcError as failure:
                log.debug("encoder %s: %s", address, failure.code().name)
            await asyncio.sleep(AGAIN_SECONDS * 2**attempt)


class _Link:
    """Leads to one encoder.

    Attributes:
        turns: Of its own, so that an encoder that does not answer holds up no files of the others.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.stub: _Stub = encoder_pb2_grpc.EncoderStub(channel)
        self.turns = FairStage(MAX_PUTS, "images", max_waiting=MAX_WAITING, max_cost=MAX_WAITING_BYTES)


class RequestMedia:
    """Holds the images of one request while it lives."""

    def __init__(
        self,
        client: EncoderClient,
        parts: Sequence[MediaPart],
        files: Mapping[bytes, ClientFile],
        owner: FilesOwner,
        options: bytes,
    ) -> None:
        self._client = client
        self._parts = parts
        self._files = files
        self._owner = owner
        self._options = options
        self._digests: list[bytes] = []  # of the parts, once they are placed
        self._addresses: dict[str, None] = {}  # of all encoders that may have a file

    async def put(self) -> list[MediaSize]:
        """Put all files at encoders, and return what the tokenizer has to know of each part. Raises as
        :meth:`EncoderClient.place`."""
        placed = await self._place()
        self._digests = [response.digest for _, response in placed]
        sizes = []
        for part, (address, response) in zip(self._parts, placed, strict=True):
            self._client.note_name(part, self._owner.tenant, response.digest)
            sizes.append(
                MediaSize(
                    digest=response.digest,
                    kind=part.kind,
                    width=response.width,
                    height=response.height,
                    samples=response.samples,
                    frames=response.frames,
                    frame_rate=response.frame_rate,
                    options_json=self._options,
                    encoder=address,
                )
            )
        return sizes

    async def restore(self, submit: output_processor_pb2.Submit) -> None:
        """Put the files again, and write into a request where they are now. Raises as :meth:`put`."""
        answers = await self._place()
        kinds = (part.kind for part in self._parts)
        placed = {(each.digest, kind): address for (address, each), kind in zip(answers, kinds, strict=True)}
        for item in submit.prompt.media:
            if (item.digest, item.kind) not in placed:
                raise errors.Unavailable("A file has changed at its URL while its request was running; send it again.")
            item.encoder = placed[item.digest, item.kind]

    def name(self, error: errors.TokenloomError) -> None:
        """Name the client's field in an error of an engine or a tokenizer, which know an image by its place."""
        place = _PLACE.fullmatch(error.field or "")
        if place is not None and int(place[1]) < len(self._parts):
            _name(error, self._parts[int(place[1])])

    def release(self) -> None:
        """Let the encoders forget the files."""
        self._client.release(list(self._addresses), self._owner)
        self._files, self._parts = {}, ()

    async def _place(self) -> list[tuple[str, encoder_pb2.PutResponse]]:
        tasks: dict[object, asyncio.Task[tuple[str, encoder_pb2.PutResponse]]] = {}
        keys = []
        try:
            async with asyncio.TaskGroup() as group:
                for index, part in enumerate(self._parts):
                    # A name may be that of another file by now; a request goes on with the files that it began with.
                    is_named = bool(self._digests) and not part.url
                    digest = self._digests[index] if is_named else self._client.digest_of(part, self._owner.tenant)
                    keys.append(key := (digest or part.url, part.kind))
                    if key not in tasks:
                        tasks[key] = group.create_task(self._place_one(part, digest))
        except BaseExceptionGroup as failed:
            raise _first(failed) from None
        return [tasks[key].result() for key in keys]

    async def _place_one(self, part: MediaPart, digest: bytes) -> tuple[str, encoder_pb2.PutResponse]:
        kept, tenant = self._client.kept, self._owner.tenant
        file = part.file or self._files.get(digest) or kept.get(tenant, digest)
        if file is not None and self._owner.is_kept:
            kept.put(tenant, file)
        return await self._client.place(part, digest, file, self._owner, self._addresses)


async def _messages(
    header: encoder_pb2.PutHeader, file: ClientFile | None, failed: list[errors.TokenloomError]
) -> AsyncIterator[encoder_pb2.PutRequest]:
    """Yield the messages of a file. ``failed``: takes the error of one that cannot be read."""
    yield encoder_pb2.PutRequest(header=header)
    if file is None:
        return
    try:
        async for data in file.parts(PIECE_BYTES):
            yield encoder_pb2.PutRequest(data=data)
    except errors.TokenloomError as error:
        failed.append(error)
        raise


async def _answer(stub: _Stub, call: Awaitable[T]) -> T:
    """Return the answer of an encoder. Raises its error, and ``Unavailable`` for one that is lost or silent."""
    try:
        return await answered(call, lambda: stub.GetEncoderInfo(encoder_pb2.GetEncoderInfoRequest()))
    except TimeoutError:
        raise errors.Unavailable("The encoder is silent; retry.") from None
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        # The channel of an encoder that has left was closed, or the file could not be read.
        raise errors.Unavailable("The encoder is away; retry.") from None
    except grpc.aio.AioRpcError as failure:
        if wire_errors.was_cut(failure):
            raise errors.Unavailable("The encoder is away; retry.") from failure
        raise wire_errors.from_rpc(failure) from failure


def _ranked(addresses: Sequence[str], key: bytes) -> list[str]:
    """Return encoders in the order in which every gateway asks them for a file (rendezvous hashing)."""
    return sorted(
        addresses, key=lambda address: hashlib.blake2s(address.encode() + b"\0" + key, digest_size=8).digest()
    )


def _name(error: errors.TokenloomError, part: MediaPart) -> None:
    """Give the error of an encoder or an engine the client's name of the part, unless it has it."""
    if isinstance(error, (errors.InvalidArgument, errors.PermissionDenied)) and error.field != part.field:
        error.field, error.message = part.field, f"{part.field}: {error.message}"


def _unknown(part: MediaPart) -> errors.InvalidArgument:
    message = f"{part.field}: this {noun_of(part.kind)} is not known any more; send its bytes"
    return errors.InvalidArgument(message, part.field)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first error of several that came at the same time."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
