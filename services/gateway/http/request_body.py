"""The body of one HTTP request: collects its bytes within limits, and returns them to the gateway's budget and to its
tenant's. Decodes JSON, a large one in a thread, known fields only. Reads the body behind a head that asks for another
protocol, as if it had not asked."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import httptools
import msgspec

from tokenloom.request import errors
from tokenloom.request.limits import AdmissionLimit, DividedLimit, Reservation

from ..tenants.tenant_shares import TenantShare
from .client_flow import ClientDisconnected, ClientFlow
from .large_json import Data, build_value, check_amount

if TYPE_CHECKING:  # most requests have no files
    from ..records.media import HeldFiles

BODY_SECONDS = 60.0
"""Limit on the time from the end of a request's head to the end of its body, trailers included."""
RETRY_SECONDS = 1.0
"""After this time, a body that found no room in the gateway's budget may be sent again."""
UNREAD_BYTES = 64 * 1024
"""A connection is paused when so many bytes of a body have arrived before its handler reads them."""
OFF_LOOP_BYTES = 128 << 10
"""Larger bodies are decoded and read in a thread."""
_DECODER_ERRORS = (RecursionError, UnicodeDecodeError, msgspec.DecodeError)
_STOPPED_AT = re.compile(r"\(byte (\d+)\)")
_HALF_PAIR = re.compile(rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})(?!\\u[dD][c-fC-F]|(?:\\(?:u[dD]?)?)?\Z)")
"""Matches the escape of a high surrogate that no low one follows, unless the text ends there."""

T = TypeVar("T")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class BodyTimeout(errors.InvalidArgument):
    """Raised for a body that is incomplete when its time is over."""

    http_status = 408
    reason = "BODY_TIMEOUT"


class RequestBody:
    """Collects the bytes of a body as the connection delivers them. Every byte that it holds is reserved in the budget,
    and counts for the tenant as soon as the client's key is known.

    Use it as ``with``: at the end of the block the bytes are dropped and their reservation is released.

    Attributes:
        data: The bytes that have arrived; empty after :meth:`close`.
        files: Those of the body, which :meth:`keep` was given, until :meth:`close_files`; None: it has none.
        is_kept: Whether :meth:`keep` was called.
        is_incomplete: Whether the connection has bytes to deliver that belong to this body or to its trailers.
        refused_by_protocol: Status and reason of the response by which the connection has refused the request, in place
            of the application; None: it has not.
    """

    __slots__ = (
        "_budget",
        "_expects_continue",
        "_flow",
        "_is_closed",
        "_is_streamed",
        "_limit",
        "_num_reserved",
        "_of_tenant",
        "_refusal",
        "_reserved",
        "_share",
        "_waiter",
        "data",
        "files",
        "is_incomplete",
        "is_kept",
        "refused_by_protocol",
    )

    def __init__(self, flow: ClientFlow, budget: AdmissionLimit, *, expects_continue: bool = False) -> None:
        """``flow``: of the connection. ``budget``: for the bodies of all requests of the gateway.
        ``expects_continue``: the client sends the body once it was invited to."""
        self.data = bytearray()
        self.files: HeldFiles | None = None
        self.is_incomplete = True
        self.is_kept = False
        self.refused_by_protocol: tuple[int, str] | None = None
        self._flow = flow
        self._budget = budget
        self._expects_continue = expects_continue
        self._share: TenantShare | None = None
        self._reserved: Reservation | None = None  # of the budget
        self._num_reserved = 0  # what it holds
        self._of_tenant: Reservation | None = None  # the same bytes, once the tenant is known
        self._limit: int | None = None  # set once the handler reads
        self._refusal: errors.TokenloomError | None = None
        self._is_closed = self._is_streamed = False
        self._waiter: asyncio.Future[None] | None = None  # of the handler that waits for more

    def __enter__(self) -> "RequestBody":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def arrive(self, piece: bytes) -> None:
        """Add bytes that the connection delivers, or ignore them when they exceed a limit or are not wanted."""
        if self._is_closed:
            return
        size = len(self.data) + len(piece)
        if self._limit is not None and size > self._limit:
            self._refuse(too_large(self._limit))
            return
        if not self._make_room(size):
            return
        self.data += piece
        # Before the key is checked, a client can reserve only what it has sent: at most this, and one read.
        if self._limit is None and size > UNREAD_BYTES:
            self._flow.hold(self)
        if self._is_streamed:
            self._wake()

    def end(self) -> None:
        """Note that the connection has delivered the last byte of the body and of its trailers."""
        self.is_incomplete = False
        if self._waiter is not None:
            self._wake()

    def count_for(self, share: TenantShare) -> None:
        """Count the bytes for a tenant. The handler that reads a body beyond the tenant's limit gets the error."""
        try:
            self._of_tenant = share.take_bytes(self._num_reserved, self._num_reserved)
        except errors.TokenloomError as refusal:
            self._refuse(refusal)
        else:
            self._share = share

    async def read(self, limit: int, length: int | None) -> None:
        """Return when ``data`` is the whole body.

        Args:
            limit: The most bytes that the body may have.
            length: How many bytes the client has announced; they are reserved before they arrive. None: unknown.

        Raises :class:`errors.PayloadTooLarge`, :class:`errors.ResourceExhausted` when the budget has no room,
        :class:`errors.RateLimitExceeded` when the tenant has none, :class:`BodyTimeout` and
        :class:`ClientDisconnected`.
        """
        self._limit = limit
        if self._flow.read_paused:
            self._flow.release(self)  # a body that is there already may have been held back
        if len(self.data) > limit:
            self._refuse(too_large(limit))
        elif length is not None and length > self._num_reserved and self._refusal is None:
            # The announced length is reserved at once: otherwise several bodies would each fill a part of the budget,
            # and all of them would be refused in the middle.
            self._make_room(length)
        if self.is_incomplete and self._refusal is None:
            await self._complete()
        if self._refusal is not None:
            raise self._refusal
        if self._flow.is_lost:
            raise ClientDisconnected

    async def stream(self, limit: int, length: int | None) -> AsyncIterator[bytes]:
        """Yield the body in pieces, each of which is dropped when the next one is asked for.

        The client has the time of a whole body for each piece. Arguments and errors as for :meth:`read`.
        """
        self._is_streamed = True
        if length is not None and length > limit:
            self._refuse(too_large(limit))
        self._continue()
        num_bytes = 0
        while self._refusal is None:
            if self._flow.is_lost:
                raise ClientDisconnected
            if piece := bytes(self.data):
                num_bytes += len(piece)
                if num_bytes > limit:
                    self._refuse(too_large(limit))
                    break
                self.data = bytearray()
                self._release()
                yield piece
            elif self.is_incomplete:
                await self._more()
            else:
                return
        assert self._refusal is not None
        raise self._refusal

    def take_media(self, size: int, room: DividedLimit) -> Reservation:
        """Return room for the bytes of this body's files. ``room``: the gateway's. Raises ``ResourceExhausted``."""
        assert self._share is not None, "routes without keys take no files"
        return self._share.take_media(size, room)

    def keep(self, text: bytearray, files: "HeldFiles | None") -> None:
        """Hold a body that was streamed, without the files that were in it. Raises as :meth:`read`."""
        self.is_kept = True
        self.data, self.files = text, files
        if not self._make_room(len(text)):
            assert self._refusal is not None
            raise self._refusal

    def close_files(self) -> None:
        """Let go of the files; those that use them hold them too."""
        if self.files is not None:
            self.files.close()
            self.files = None

    async def _more(self) -> None:
        """Wait until more of a streamed body has arrived, or it has ended."""
        self._flow.release(self)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                await self._wait()
        except TimeoutError:
            raise BodyTimeout(f"no more of the body arrived within {BODY_SECONDS:g} s") from None

    def close(self) -> None:
        """Drop the bytes and release their reservation; ignore bytes that arrive later."""
        if self._is_closed:
            return
        self._is_closed = True
        self.data = bytearray()
        self._release()
        if self._flow.read_paused:
            self._flow.release(self)

    def _release(self) -> None:
        self._num_reserved = 0
        if self._reserved is not None:
            self._reserved.release()
        if self._of_tenant is not None:
            self._of_tenant.release()

    def _continue(self) -> None:
        """Invite the client to send the body, if it waits for that."""
        if self._expects_continue and not self._flow.transport.is_closing():
            self._expects_continue = False
            self._flow.transport.write(_CONTINUE)

    async def _complete(self) -> None:
        """Wait until the body is complete or refused. Raises :class:`BodyTimeout` and :class:`ClientDisconnected`."""
        self._continue()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while self.is_incomplete and self._refusal is None:
                    await self._wait()
        except TimeoutError:
            raise BodyTimeout(f"the body did not arrive within {BODY_SECONDS:g} s") from None

    async def _wait(self) -> None:
        """Wait for a call of :meth:`_wake`. Raises :class:`ClientDisconnected` when the client has left."""
        self._waiter = asyncio.get_running_loop().create_future()
        stop = self._flow.watch(self._wake)
        try:
            await self._waiter
        finally:
            stop()
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _make_room(self, size: int) -> bool:
        """Reserve the bytes of a body of this size; refuse the request and return False if one budget is too small."""
        added = size - self._num_reserved
        if added <= 0:
            return True
        try:
            of_tenant = None if self._share is None else self._share.take_bytes(added, size)
        except errors.TokenloomError as refusal:
            self._refuse(refusal)
            return False
        if self._reserved is None:
            self._reserved = self._budget.take(added)
            has_room = self._reserved is not None
        else:
            has_room = self._budget.grow(self._reserved, added)
        if not has_room:
            if of_tenant is not None:
                of_tenant.release()
            message = "the gateway holds as many bytes of request bodies as it may; retry"
            self._refuse(errors.ResourceExhausted(message, retry_after=RETRY_SECONDS))
            return False
        if of_tenant is not None:
            assert self._of_tenant is not None
            self._of_tenant.absorb(of_tenant)
        self._num_reserved = size
        return True

    def _refuse(self, refusal: errors.TokenloomError) -> None:
        """Drop the body; its handler raises the error when it reads."""
        self._refusal = refusal
        self.close()
        self._wake()


def too_large(limit: int) -> errors.PayloadTooLarge:
    """Return the error for a body of more than ``limit`` bytes."""
    return errors.PayloadTooLarge(f"the body is larger than {limit} bytes")


class BodyParser:
    """Decodes bodies and reads them, one large body at a time; the bodies that wait are bounded by their bytes."""

    def __init__(self, names: Collection[str], ignored: Collection[str]) -> None:
        """Args:
        names: The fields that some endpoint reads. Of large bodies, others are not built.
        ignored: Known fields that no endpoint reads; their values are never built from large bodies.
        """
        fields = [(name, msgspec.Raw, msgspec.UNSET) for name in {*names, *ignored}]
        self._names = tuple(names)
        self._ignored = tuple({*ignored} - {*names})
        self._lenient = msgspec.json.Decoder(msgspec.defstruct("KnownFields", fields))
        self._strict = msgspec.json.Decoder(msgspec.defstruct("KnownFields", fields, forbid_unknown_fields=True))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="body parser")

    async def read(self, data: Data, read: Callable[[dict[str, Any]], T]) -> T:
        """Decode a body and return what ``read`` makes of it. Raises what ``read`` raises, and ``InvalidArgument``.

        Of a large body, ``read`` gets the known fields and the name of one unknown field; it is called in a thread.
        Fields without effect have the value True there.
        """
        if len(data) <= OFF_LOOP_BYTES:
            return read(decode_object(data))
        # The decoder holds the interpreter's lock: 8 MB of `{},` took 0.2 to 0.34 s and 400 MB in one piece, thread or
        # not.
        return await self.run(lambda: read(self._decode(data)))

    async def run(self, call: Callable[[], T]) -> T:
        """Call in the thread, after the calls that wait already."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def close(self) -> None:
        """End the thread; calls that wait are dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _decode(self, data: Data) -> dict[str, Any]:
        num_values = check_amount(data)
        try:
            return self._build(data, num_values)
        except _DECODER_ERRORS as error:
            raise _invalid(error, data) from None

    def _build(self, data: Data, num_values: int) -> dict[str, Any]:
        fields, unknown = self._known_fields(data)
        body: dict[str, Any] = dict.fromkeys(unknown, True)
        for name in self._ignored:
            raw = getattr(fields, name)
            if raw is not msgspec.UNSET and bytes(memoryview(raw)[:5]) != b"null":
                body[name] = True
        for name in self._names:
            raw = getattr(fields, name)
            if raw is not msgspec.UNSET:
                try:
                    body[name] = build_value(raw, num_values)
                except _DECODER_ERRORS as error:
                    raise _invalid(error, memoryview(raw)) from None
        return body

    def _known_fields(self, data: Data) -> tuple[msgspec.Struct, list[str]]:
        """Return the fields' JSON, and the name of one unknown field if the body has any."""
        try:
            return self._strict.decode(data), []
        except msgspec.ValidationError as error:
            _, is_unknown, rest = str(error).partition("unknown field `")
            if not is_unknown:
                raise errors.InvalidArgument("the body must be a JSON object") from None
            return self._lenient.decode(data), [rest.removesuffix("`")]


def decode_object(data: Data) -> dict[str, Any]:
    """Return the JSON object in ``data``, which should not be large.

    Raises ``InvalidArgument`` for anything else, NaN, infinities, numbers beyond float64, bad UTF-8 and deep nesting.
    """
    try:
        value = msgspec.json.decode(data)
    except _DECODER_ERRORS as error:
        raise _invalid(error, data) from None
    if not isinstance(value, dict):
        raise errors.InvalidArgument("the body must be a JSON object")
    return value


def _invalid(error: Exception, data: Data | memoryview) -> errors.InvalidArgument:
    """Return the client's error for one of the decoder's about ``data``."""
    if isinstance(error, RecursionError):
        return errors.InvalidArgument("the body is nested too deeply")
    # msgspec raises Python's own error up to 0.22, and from 0.23 on one of its own without a position.
    if isinstance(error, UnicodeDecodeError) or "UTF-8" in str(error):
        return errors.InvalidArgument("the body is not valid UTF-8")
    # What the decoder says of half a pair depends on what follows: truncated data, or the end of an escape. It is
    # searched for only where the decoder stopped: a search of 8 MB takes 0.3 s under the interpreter's lock.
    stopped = _STOPPED_AT.search(str(error))
    at = int(stopped[1]) if stopped else len(data)
    if half := _HALF_PAIR.search(data[max(at - 64, 0) : at + 12]):
        return errors.InvalidArgument(f"the body is not valid JSON: {half[1].decode()} is half a surrogate pair")
    return errors.InvalidArgument(f"the body is not valid JSON: {error}")


_FRAMING = (b"content-length", b"transfer-encoding")


class IgnoredUpgrade:
    """Passes a parser's calls on to the protocol, but for those of the first head, which another parser has read.

    httptools ends its work behind the head of a request with ``Upgrade``, whatever its framing: the body that Java's
    client and ``curl --http2`` send with ``Upgrade: h2c`` was dropped. RFC 9110 lets a server ignore the header.
    """

    def __init__(self, protocol: object) -> None:
        self._protocol = protocol
        self._is_muted = True

    def __getattr__(self, name: str) -> object:
        """Return the protocol's method; httptools asks for each once."""
        method = getattr(self._protocol, name)
        if name in ("on_message_begin", "on_url", "on_header"):
            return lambda *arguments: None if self._is_muted else method(*arguments)
        return method

    def on_headers_complete(self) -> None:
        if self._is_muted:
            self._is_muted = False
        else:
            self._protocol.on_headers_complete()  # type: ignore[attr-defined]


def parser_behind(protocol: object, headers: list[tuple[bytes, bytes]]) -> httptools.HttpRequestParser:
    """Return a parser that expects the body of a request with these headers, and then further requests."""
    parser = httptools.HttpRequestParser(IgnoredUpgrade(protocol))
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    framing = [b"%b: %b\r\n" % header for header in headers if header[0] in _FRAMING]
    parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(framing))
    return parser
