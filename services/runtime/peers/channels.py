"""Opens client channels. As measured, a process with few of them notices a dead or frozen peer within 2.6 s, its
return within 0.1 s."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, cast
from weakref import WeakSet

import grpc
import grpc.aio

from tokenloom.request.limits import MAX_MESSAGE_BYTES

from ..local_streams.channel import LocalChannel
from ..local_streams.socket_end import path_beside
from ..tasks import Tasks
from .certificate_files import dns_name
from .keepalive import Keepalive
from .tls import MeshTLS

log = logging.getLogger(__name__)


class _Connected:
    """Holds a gRPC channel and the number of its live calls."""

    def __init__(self, channel: grpc.aio.Channel, generation: int) -> None:
        self.channel = channel
        self.generation = generation
        self.num_calls = 0


class RenewedChannel(grpc.aio.Channel):
    """Opens another gRPC channel when the certificate has changed, because a gRPC channel keeps its credentials for
    life. Calls in progress stay on their channel, which is closed when the last of them has ended."""

    def __init__(self, connect: Callable[[], grpc.aio.Channel], generation: Callable[[], int]) -> None:
        """Args:
        connect: Returns a channel with the current certificate.
        generation: Returns a number that changes with the certificate.
        """
        self._connect = connect
        self._generation = generation
        self._current = _Connected(connect(), generation())
        self._replaced: dict[_Connected, None] = {}  # each leaves when its last call has ended
        self._tasks = Tasks(lambda error: log.error("a channel could not be closed", exc_info=error))

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._begin(lambda channel: channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._begin(lambda channel: channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._begin(lambda channel: channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._begin(lambda channel: channel.stream_stream(*args, **kwargs))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._renewed().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._renewed().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._renewed().channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        """Cancel all calls after ``grace`` seconds, and close."""
        replaced, self._replaced = self._replaced, {}
        for each in (self._current, *replaced):
            await each.channel.close(grace)
        await self._tasks.close()

    async def __aenter__(self) -> "RenewedChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _begin(self, bind: Callable[[grpc.aio.Channel], Any]) -> Any:
        """Return what begins a call of one method, on the channel of that time."""
        bound_to = self._current
        method = bind(bound_to.channel)

        def begin(*args: Any, **kwargs: Any) -> Any:
            nonlocal bound_to, method
            # Checked when a call begins, not by a timer; this takes 2.4 µs. Calls that run keep the channel that they
            # began on.
            connected = self._renewed()
            if connected is not bound_to:
                bound_to, method = connected, bind(connected.channel)
            call = method(*args, **kwargs)
            connected.num_calls += 1
            call.add_done_callback(lambda _: self._ended(connected))
            return call

        return begin

    def _renewed(self) -> _Connected:
        generation = self._generation()
        before = self._current
        if generation != before.generation:
            self._replaced[before] = None
            self._current = _Connected(self._connect(), generation)
            self._close_unused(before)
        return self._current

    def _ended(self, connected: _Connected) -> None:
        connected.num_calls -= 1
        self._close_unused(connected)

    def _close_unused(self, connected: _Connected) -> None:
        if connected in self._replaced and not connected.num_calls:
            del self._replaced[connected]
            self._tasks.spawn(connected.channel.close(), name="close a replaced channel")


KEEPALIVE_OPTIONS = Keepalive().options(num_links=1)
"""Of a process with few links, and of servers: these are asked, too, by each of their clients."""

CHANNEL_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # By default a peer that was away for 8 s is found only after 5 more seconds.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # By default a name is looked up again only after 30 s, in which both pods behind it may have been replaced.
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    # gRPC would repeat a call that the peer has not seen. Where the link is cut in one direction, the repeated call
    # waits on the next connection for the same time again. Callers retry elsewhere instead.
    ("grpc.enable_retries", 0),
    # A closed channel's backoff must not delay a new channel to the same address.
    ("grpc.use_local_subchannel_pool", 1),
    # Traffic inside the mesh must not use the proxy that the environment names.
    ("grpc.enable_http_proxy", 0),
]

COORDINATOR_OPTIONS = [("grpc.min_reconnect_backoff_ms", 3000), ("grpc.max_reconnect_backoff_ms", 300)]
"""A coordinator that was restarted is called by a thousand engines at one moment, and needs longer than the tenth of a
second that an attempt to connect lasts otherwise: those that were given up would come again, and it would be longer.
One that takes the place of another listens up to 2.3 s after its death, and must not be looked for a second later."""


def open_channel(
    address: str, keepalive: Sequence[tuple[str, int]] = KEEPALIVE_OPTIONS, service: str = ""
) -> grpc.aio.Channel:
    """Return a lazily connecting, unencrypted channel to ``host:port`` or ``unix:/path``; the caller closes it.

    ``service``: what is there, if that matters for the options.
    """
    # The authority of an HTTP/2 request is a host's name, which the path of a unix socket is not.
    options = [*_options(service), *keepalive, ("grpc.default_authority", "localhost")]
    return grpc.aio.insecure_channel(address, options=options)


def _options(service: str) -> list[tuple[str, int | str]]:
    """Return the options of a channel to a service, of which gRPC takes the first of two values."""
    return [*(COORDINATOR_OPTIONS if service == "coordinator" else ()), *CHANNEL_OPTIONS]


class Channels:
    """Opens channels from one service to others, encrypted where the mesh has certificates."""

    def __init__(self, tls: MeshTLS | None = None) -> None:
        """``tls``: the caller's certificate; None: the mesh has none."""
        self._tls = tls
        self._open = WeakSet[grpc.aio.Channel]()
        self.keepalive = Keepalive()
        """Widens the patience of channels that open while this process is starved, once its ``run`` runs."""

    def open(self, address: str, service: str) -> grpc.aio.Channel:
        """Return a lazily connecting channel to ``host:port`` or ``unix:/path``; the caller closes it.

        With TLS it connects only to a peer whose certificate names ``service``. Without, calls to a unix socket are
        local streams where they can be.
        """
        channel = self._connect(address, service)
        self._open.add(channel)
        return channel

    def _connect(self, address: str, service: str) -> grpc.aio.Channel:
        if (tls := self._tls) is None:
            channel, path = open_channel(address, self._asking(), service), path_beside(address)
            if path is None:
                return channel
            return cast(grpc.aio.Channel, LocalChannel(channel, path, MAX_MESSAGE_BYTES))
        # Certificates name services and not hosts, because pods move. gRPC is made to compare that name instead of the
        # address.
        options = [*_options(service), ("grpc.ssl_target_name_override", dns_name(service))]

        def connect() -> grpc.aio.Channel:
            return grpc.aio.secure_channel(address, tls.channel_credentials(), options=[*options, *self._asking()])

        return RenewedChannel(connect, lambda: tls.generation)

    def _asking(self) -> list[tuple[str, int]]:
        return self.keepalive.options(len(self._open))
