"""Gives a simulated process its sockets: channels to its peers, and the addresses at which it listens."""

import asyncio
from random import Random
from typing import Any

import grpc
import grpc.aio

from tokenloom.request.limits import MAX_MESSAGE_BYTES
from tokenloom.services.runtime.host.host_dependencies import Clock, HostDependencies, Port
from tokenloom.services.runtime.host.host_dependencies import Network as HostNetwork
from tokenloom.services.runtime.host.limits import GrpcLimits
from tokenloom.services.runtime.host.listener import ServiceListener
from tokenloom.services.runtime.host.service_settings import ServiceSettings
from tokenloom.services.runtime.host.servicer_edge import Edge
from tokenloom.services.runtime.local_streams.channel import LocalCall
from tokenloom.services.runtime.local_streams.server import CallDetails, ServerCall
from tokenloom.services.runtime.local_streams.socket_end import Kind, encode_frame
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.peers.tls import MeshTLS
from tokenloom.services.runtime.tasks import Tasks

from .exchange import Exchange, Served, packed
from .network import Find, Network
from .pipe import Pipe
from .virtual_loop import Process


def surroundings(network: Network, process: Process, random: Random) -> HostDependencies:
    """Return the surroundings of one simulated process."""
    loop = network.loop
    clock = Clock(loop.time, lambda: round(loop.time() * 1e9), lambda: round(loop.time() * 1e3))
    return HostDependencies(_Sockets(network, process), random, clock)


class _LocalCall(LocalCall):
    """Learns from the network whether its peer is stopped."""

    def _is_peer_stopped(self) -> bool:
        assert isinstance(self.transport, Pipe)
        return self.transport.is_peer_stopped()


class _ServerCall(ServerCall):
    """Learns from the network whether its peer is stopped."""

    _is_peer_stopped = _LocalCall._is_peer_stopped


class _Listening(ServiceListener):
    """Serves an edge at an address of the network."""

    def __init__(self, network: Network, process: Process, address: str, edge: Edge) -> None:
        self._network = network
        self._process = process
        self._address = address
        self._find: Find = lambda method: edge.service(CallDetails(method))

    async def open(self, *_: object) -> str:
        self._network.listen(self._address, self._process, self._find)
        return self._address

    async def serve(self) -> None:
        """Do nothing: it serves since it was opened."""

    async def leave(self, grace: float) -> None:
        """Accept no more connections."""
        self._network.unlisten(self._address, self._process)

    async def close(self, grace: float) -> None:
        """Stop accepting connections. Those that are open break when the process ends."""
        self._network.unlisten(self._address, self._process)


class _Port(Port):
    """A further address of a process."""

    def __init__(self, listening: _Listening, address: str) -> None:
        self._listening = listening
        self.address = address

    async def start(self) -> None:
        await self._listening.open()

    async def close(self, grace: float) -> None:
        await self._listening.close(grace)


class _Sockets(HostNetwork):
    """Makes the sockets of one simulated process."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process

    def listener(self, settings: ServiceSettings, edge: Edge) -> ServiceListener:
        return _Listening(self._network, self._process, settings.listen, edge)

    def port(
        self, edge: Edge, listen: str, limits: GrpcLimits, tls: MeshTLS | None, *, insecure: bool, field: str
    ) -> Port:
        edge.is_ready = True
        return _Port(_Listening(self._network, self._process, listen, edge), listen)

    def channels(self, tls: MeshTLS | None = None) -> Channels:
        return _Channels(self._network, self._process)


class _Channels(Channels):
    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process

    def open(self, address: str, service: str) -> grpc.aio.Channel:
        return Channel(self._network, self._process, address)


class Channel(grpc.aio.Channel):
    """Calls what listens at one address when the call begins."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self._network = network
        self._process = process
        self._address = address
        self._calls: dict[Any, None] = {}

    def stream_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        def begin() -> LocalCall:
            opening = encode_frame(Kind.OPEN, method.encode())
            serialize, deserialize = self._said(request_serializer), self._heard(response_deserializer)
            call = _LocalCall(opening, serialize, deserialize, MAX_MESSAGE_BYTES, self._calls.pop)
            self._calls[call] = None
            self._network.loop.call_soon(self._connect_stream, call)
            return call

        return begin

    def unary_stream(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        def begin(request: Any, timeout: float | None = None, metadata: object = None) -> Exchange:
            return self._exchange(method, request_serializer(request), response_deserializer, timeout)

        return begin

    def unary_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        def begin(request: Any, timeout: float | None = None, metadata: object = None) -> Any:
            exchange = self._exchange(method, request_serializer(request), response_deserializer, timeout)
            return asyncio.ensure_future(exchange.unary())

        return begin

    def stream_unary(
        self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **_: Any
    ) -> Any:
        """All requests of a call are sent at once."""

        async def run(requests: Any, timeout: float | None) -> Any:
            request = packed([request_serializer(each) async for each in requests])
            return await self._exchange(method, request, response_deserializer, timeout).unary()

        def begin(requests: Any, timeout: float | None = None, metadata: object = None) -> Any:
            return asyncio.ensure_future(run(requests, timeout))

        return begin

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return whether a process listens there: each call of a simulated channel connects by itself."""
        states = grpc.ChannelConnectivity
        return states.TRANSIENT_FAILURE if self._network.find(self._address) is None else states.READY

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        while self.get_state() == last_observed_state:
            await self._network.changed(self._address)

    async def channel_ready(self) -> None:
        raise NotImplementedError

    async def close(self, grace: float | None = None) -> None:
        for call in list(self._calls):
            call.cancel()

    async def __aenter__(self) -> "Channel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _said(self, serialize: Any) -> Any:
        """Return what encodes the messages of this process, which may lie."""
        return lambda message: serialize(self._network.lies.hear(self._process, message))

    def _heard(self, deserialize: Any) -> Any:
        """Return what decodes the messages of the process that listens there, which may lie."""

        def hear(data: bytes) -> Any:
            message, found = deserialize(data), self._network.find(self._address)
            return message if found is None else self._network.lies.hear(found[0], message)

        return hear

    def _connect_stream(self, call: LocalCall) -> None:
        if call.done():
            return
        if (found := self._network.find(self._address)) is None:
            call.on_lost()
            return
        server, find = found
        served = _ServerCall(lambda details: find(details.method), Tasks(_ignore), MAX_MESSAGE_BYTES, _ignore)
        Pipe.connect(self._network, self._process, call, server, served)

    def _exchange(self, method: str, request: bytes, deserialize: Any, timeout: float | None) -> Exchange:
        exchange = Exchange(method, request, self._heard(deserialize))
        if timeout is not None:
            exchange.set_deadline(timeout)
        if (found := self._network.find(self._address)) is None:
            self._network.loop.call_soon(exchange.refused)
        else:
            server, find = found
            Pipe.connect(self._network, self._process, exchange, server, Served(find, Tasks(_ignore)))
        return exchange


def _ignore(_: object) -> None:
    """Do nothing: the edge has turned the error into a status."""
