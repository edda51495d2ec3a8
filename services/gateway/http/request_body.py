"""The body of one HTTP request: collects its bytes within limits, and returns them to the gateway's budget and to its
tenant's."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, cast

from tokenloom.request import errors
from tokenloom.request.reservation import Reservation

from ..tenants.tenant_share import TenantShare
from .byte_budget import ByteBudget
from .client_flow import ClientFlow

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

BODY_SECONDS = 60.0
"""Limit on the time from the end of a request's head to the end of its body, trailers included."""
UNREAD_BYTES = 64 * 1024
"""A connection is paused when so many bytes of a body have arrived before its handler reads them."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class BodyTimeout(errors.InvalidArgument):
    """Raised for a body that is incomplete when its time is over."""

    http_status = 408
    reason = "BODY_TIMEOUT"


class ClientDisconnected(Exception):
    """Raised when the client has left; no response is possible any more."""


class RequestBody:
    """Collects the bytes of a body as the connection delivers them. Every byte that it holds is reserved in the budget,
    and counts for the tenant as soon as the client's key is known.

    Use it as ``with``: at the end of the block the bytes are dropped and their reservation is released.

    Attributes:
        data: The bytes that have arrived; empty after :meth:`close`.
        refused_by_protocol: Status and reason of the response by which the connection has refused the request, in place
            of the application; None: it has not.
    """

    __slots__ = (
        "_budget",
        "_cycle",
        "_flow",
        "_is_closed",
        "_is_streamed",
        "_limit",
        "_of_tenant",
        "_refusal",
        "_reserved",
        "_share",
        "data",
        "refused_by_protocol",
    )

    def __init__(self, cycle: "RequestResponseCycle", budget: ByteBudget) -> None:
        """``cycle``: uvicorn's state of the request, a private part."""
        self.data = bytearray()
        self.refused_by_protocol: tuple[int, str] | None = None
        self._cycle = cycle
        self._flow = cast(ClientFlow, cycle.flow)
        self._budget = budget
        self._share: TenantShare | None = None
        self._reserved = budget.empty()
        self._of_tenant: Reservation | None = None  # the same bytes, once the tenant is known
        self._limit: int | None = None  # set once the handler reads
        self._refusal: errors.TokenloomError | None = None
        self._is_closed = self._is_streamed = False

    def __enter__(self) -> "RequestBody":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_incomplete(self) -> bool:
        """Whether the connection has bytes to deliver that belong to this body or to its trailers."""
        return bool(self._cycle.more_body)

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
            self._cycle.message_event.set()

    def count_for(self, share: TenantShare) -> None:
        """Count the bytes for a tenant. The handler that reads a body beyond the tenant's limit gets the error."""
        try:
            self._of_tenant = share.take_bytes(self._reserved.amount, self._reserved.amount)
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
        self._flow.release(self)  # a body that is there already may have been held back
        if len(self.data) > limit:
            self._refuse(too_large(limit))
        elif length is not None and self._refusal is None:
            # The announced length is reserved at once: otherwise several bodies would each fill a part of the budget,
            # and all of them would be refused in the middle.
            self._make_room(length)
        if self._cycle.more_body and self._refusal is None:
            await self._complete()
        if self._refusal is not None:
            raise self._refusal
        if self._cycle.disconnected:
            raise ClientDisconnected

    async def stream(self, limit: int, length: int | None) -> AsyncIterator[bytes]:
        """Yield the body in pieces, each of which is dropped when the next one is asked for.

        The client has the time of a whole body for each piece. Arguments and errors as for :meth:`read`.
        """
        cycle = self._cycle
        self._is_streamed = True
        if length is not None and length > limit:
            self._refuse(too_large(limit))
        self._continue()
        num_bytes = 0
        while self._refusal is None:
            if cycle.disconnected:
                raise ClientDisconnected
            if piece := bytes(self.data):
                num_bytes += len(piece)
                if num_bytes > limit:
                    self._refuse(too_large(limit))
                    break
                self.data = bytearray()
                self._release()
                yield piece
            elif cycle.more_body:
                await self._more()
            else:
                return
        assert self._refusal is not None
        raise self._refusal

    async def _more(self) -> None:
        """Wait until more of a streamed body has arrived, or it has ended."""
        cycle = self._cycle
        cycle.message_event.clear()
        self._flow.release(self)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                await cycle.message_event.wait()
        except TimeoutError:
            raise BodyTimeout(f"no more of the body arrived within {BODY_SECONDS:g} s") from None

    def close(self) -> None:
        """Drop the bytes and release their reservation; ignore bytes that arrive later."""
        if self._is_closed:
            return
        self._is_closed = True
        self.data = bytearray()
        self._release()
        self._flow.release(self)

    def _release(self) -> None:
        self._reserved.release()
        if self._of_tenant is not None:
            self._of_tenant.release()

    def _continue(self) -> None:
        """Invite the client to send the body, if it waits for that."""
        cycle = self._cycle
        if cycle.waiting_for_100_continue and not cycle.transport.is_closing():
            cycle.waiting_for_100_continue = False
            cycle.transport.write(_CONTINUE)

    async def _complete(self) -> None:
        """Wait until the body is complete, is refused or the client has left."""
        cycle = self._cycle
        self._continue()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while cycle.more_body and self._refusal is None and not cycle.disconnected:
                    cycle.message_event.clear()
                    await cycle.message_event.wait()
        except TimeoutError:
            raise BodyTimeout(f"the body did not arrive within {BODY_SECONDS:g} s") from None

    def _make_room(self, size: int) -> bool:
        """Reserve the bytes of a body of this size; refuse the request and return False if one budget is too small."""
        added = size - self._reserved.amount
        if added > 0:
            try:
                self._reserve(added, size)
            except errors.TokenloomError as refusal:
                self._refuse(refusal)
                return False
        return True

    def _reserve(self, added: int, size: int) -> None:
        if self._share is None:
            self._reserved.absorb(self._budget.reserve(added))
            return
        assert self._of_tenant is not None
        with self._share.take_bytes(added, size) as of_tenant:  # given back if the gateway's budget is too small
            self._reserved.absorb(self._budget.reserve(added))
            self._of_tenant.absorb(of_tenant)

    def _refuse(self, refusal: errors.TokenloomError) -> None:
        """Drop the body; its handler raises the error when it reads."""
        self._refusal = refusal
        self.close()
        self._cycle.message_event.set()


def too_large(limit: int) -> errors.PayloadTooLarge:
    """Return the error for a body of more than ``limit`` bytes."""
    return errors.PayloadTooLarge(f"the body is larger than {limit} bytes")
