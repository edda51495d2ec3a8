"""Serves a connection whose responses are held: what arrives and what is written is stored, so that another gateway can
go on where this one is killed; and goes on where another one was."""

import asyncio
import re
from functools import partial
from typing import Any, cast

from ..client_flow import ClientDisconnected, ResponseWriter
from ..held_response import HeldResponse, hold_arrival, hold_response
from ..held_table import FOLLOWED, HeldTable, PastResponse
from ..http_exchange import HttpExchange
from ..tcp_counters import cookie_of, num_read
from .connections import NO_RESPONSE
from .http_protocol import HttpContext, HttpProtocol

_ASKS_FOR_END = re.compile(rb"\r\nconnection:(?:[^\r\n]*,)?[ \t]*close[ \t]*(?:,|\r|$)", re.IGNORECASE)
_LOOK_SECONDS = 0.05
_ENDS = "ends"
"""Why the protocol holds reading back until it leaves: no request that follows would be answered."""


class HeldProtocol(HttpProtocol, asyncio.BufferedProtocol):
    """Serves a connection whose responses another gateway may continue, or continues that of another gateway.

    Attributes:
        found: How much there was of the response of another gateway: ``not_begun``, ``begun``, ``complete``, or
            ``refused`` if it cannot be continued; ``idle`` if there was no request.
    """

    def __init__(
        self, *, context: HttpContext, table: HeldTable, past: PastResponse | None = None, **named: Any
    ) -> None:
        """``past``: what another gateway has done of a response on this connection."""
        super().__init__(**named, context=context)
        self._table = table
        self._past = past
        self._latest: HeldResponse | None = None
        self._arrives = False  # whether the latest one stores what arrives of a request
        self._num_received = self._cookie = 0
        self._ends = past is not None and bool(past.state & FOLLOWED)  # with the next response
        self._goes_on = False  # while the request of a response that has begun is read again
        self._reads_again = False  # while what another gateway has read is
        self._stays = False  # with this gateway, between requests: the latest one was for what it alone has
        self._is_taken = past is not None
        self.found = "refused"
        if past is not None:
            self.refusal = b""  # within a response there is no place for the words of another one

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        connection = transport.get_extra_info("socket")
        self._cookie = cookie_of(connection)
        super().connection_made(transport)
        past, self._past = self._past, None
        if past is not None and not self._is_leaving:
            self._num_received = num_read(connection.fileno())
            self.found = self._go_on(past)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._latest is not None:
            self._latest.close()
        super().connection_lost(exc)

    def end_response(self, *, keep_alive: bool, lingers: bool) -> None:
        # Now: the task may run on while the next response is written.
        if self._latest is not None:
            if lingers or not keep_alive:  # the response says so to the client; another gateway would read on
                self._latest.mark_followed()
            self._latest.close()
            self._arrives = False
        # What the client has sent behind its request was read by the gateway that was killed. A client that is answered
        # nothing would wait; one whose connection ends sends it again.
        lingers = lingers or self._ends
        super().end_response(keep_alive=keep_alive, lingers=lingers)
        if keep_alive and not lingers:
            self._note_idle()

    def _note_idle(self) -> None:
        """Note that no request is in work, once the kernel has all that was written or a slot has the rest: otherwise
        another gateway would not write that, and its first words would be taken for it."""
        if self.transport.is_closing() or not self._is_between_requests or self._stays:
            return
        if self.transport.get_write_buffer_size() and (self._latest is None or self._latest.is_free):
            self._loop.call_later(_LOOK_SECONDS, self._note_idle)
            return
        descriptor = self.transport.get_extra_info("socket").fileno()
        self._table.note_idle(descriptor, self._cookie, self._num_received)

    @property
    def _is_between_requests(self) -> bool:
        is_reading = self._in_head or self._framing_bytes or self._held or self._is_leaving
        return self._answered is None and not self._pipeline and not is_reading

    def get_buffer(self, sizehint: int) -> memoryview:
        # Not the event loop's own: what the kernel has given away, this process may not live to store.
        self._table.begin_reading(self._cookie, self._num_received)
        return self._table.inbox

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(self._table.read(nbytes))

    def data_received(self, data: bytes) -> None:
        # Here: what waits for a turn of the event loop is read, and is lost with this process.
        self._num_received += len(data)
        latest, answered = self._latest, self._answered
        if self._ends and answered is not None and not answered.body.is_incomplete:
            # The rest of what the killed gateway has read a part of: it is no request, and would end the response.
            self.flow.hold(_ENDS)
            self._table.end_reading()
            return
        if self._arrives and latest is not None:
            if not latest.arrive(data):
                self._let_go()
        elif self._is_between_requests and (latest is None or latest.free_if_taken()):
            self._latest = hold_arrival(self._table, self.flow, data, self._num_received)
            self._arrives = self._latest is not None
        elif latest is not None:
            latest.mark_followed()
        self._table.end_reading()
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._answered is not None and self._latest is not None:
            self._latest.mark_followed(is_stored=True)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self._upgrading is None:  # otherwise the body of a request that asks for another protocol follows
            self._arrives = False

    def _refuse(self, status: bytes, text: bytes, reason: str) -> None:
        if self._goes_on:
            self._context.connections.on_refused(NO_RESPONSE, reason)
            self.transport.abort()
        else:
            super()._refuse(status, text, reason)

    def _start(self, exchange: HttpExchange) -> None:
        exchange.hold, exchange.let_go = partial(self._hold, exchange), partial(self._give_up, exchange)
        self._stays, exchange.was_read = False, self._reads_again
        # A client of HTTP/1.0 takes the end of its connection for that of the response, and one that waits for
        # permission to send its body gets it once.
        if self._expects_continue or not cast(ResponseWriter, exchange.response).speaks_1_1:
            exchange.let_go()
        super()._start(exchange)

    def _on_answered(self, exchange: HttpExchange, task: "asyncio.Task[None]") -> None:
        if exchange.held is not None:
            exchange.held.close()
        # They refer to it, and would keep it for the garbage collector.
        exchange.hold = exchange.let_go = None
        super()._on_answered(exchange, task)

    def _let_go(self) -> None:
        """Store a request and its response no more: answered once more, it would have effects twice, or it is too
        large. Does nothing to a response that has ended."""
        if self._latest is not None and not self._latest.is_closed:
            self._latest.close()
            self._latest = None
        self._arrives = False

    def _give_up(self, exchange: HttpExchange) -> None:
        """Raises ``ClientDisconnected``, and ends the connection, for a request that only the killed gateway could
        answer: a client that has lost its connection asks again, one that has got a 404 does not."""
        self._stays = exchange.stays
        self._let_go()
        exchange.hold = exchange.held = None
        if self._stays and self._is_taken:
            self.transport.abort()
            raise ClientDisconnected

    def _hold(self, exchange: HttpExchange, body: bytes | bytearray) -> HeldResponse | None:
        if exchange.past is not None:
            return exchange.held
        has_more = bool(self._in_head or self._held)
        if self._pipeline or not cast(ResponseWriter, exchange.response).speaks_1_1:
            self._let_go()
            return None
        # The latest one may be closed: it is that of an earlier request then, or the client has left.
        if (latest := self._latest) is not None and latest.is_arriving:
            if not has_more:
                latest.know()
                return latest
            self._let_go()  # what follows the request is stored with it
        if self._latest is not None and not self._latest.free_if_taken():
            return None
        if exchange.body.files is not None:  # a request that is written anew would lack them
            return None
        held = self._latest = hold_response(self._table, self.flow, exchange, body, self._num_received)
        if held is not None and (has_more or self._ends):
            held.mark_followed()
        return held

    def _go_on(self, past: PastResponse) -> str:
        """Write what the kernel has not got of a response, and let the application make what is missing."""
        if past.is_over:
            self.transport.write(past.tail)
            self._stop_framing_timer()  # the connection is idle now, and has had its first request
            is_last = _ASKS_FOR_END.search(past.request.partition(b"\r\n\r\n")[0])
            self.end_response(keep_alive=is_last is None, lingers=False)
            return "complete"
        if not past.is_known:
            return self._read_again(past.request)
        self._goes_on = past.has_begun
        self._receive(past.request)
        self._goes_on = False
        exchange = self._answered
        if exchange is None:
            self.transport.abort()
            return "refused"
        exchange.past, exchange.was_read = past, True
        exchange.held = self._latest = hold_response(self._table, self.flow, exchange, b"", self._num_received, past)
        if not past.has_begun:
            return "not_begun"
        exchange.started, exchange.status = True, 200
        cast(ResponseWriter, exchange.response).go_on()
        self.transport.write(past.tail)  # not by what stores the response, which has the tail
        return "begun"

    def _read_again(self, data: bytes) -> str:
        """Read what another gateway has read of a request that it has not answered; empty: of none."""
        if data:
            self._num_received -= len(data)
            self._reads_again = True
            self.data_received(data)
            self._reads_again = False
            if self._ends and self._latest is not None:
                self._latest.mark_followed()  # a second gateway may be killed too
            return "not_begun"
        self._stop_framing_timer()
        self.end_response(keep_alive=True, lingers=False)
        return "idle"
