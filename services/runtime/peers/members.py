"""Finds the replicas of a service: given addresses, and DNS names with one entry per replica; and the position of this
process among those of its own service, by which it works with a subset of them in a large mesh."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NoReturn

import grpc
import grpc.aio

from tokenloom.v1 import coordinator_pb2, coordinator_pb2_grpc

from .. import addresses
from ..addresses import DNS, Address
from . import subset
from .subset import ReplicaPosition

log = logging.getLogger(__name__)

REFRESH_SECONDS = 2.0
WIDE_SECONDS = 60.0
"""How long a process works with all replicas, once it sought something that may be at any of them."""

_AGAIN_SECONDS = 0.2
_OLD_COORDINATOR_SECONDS = 10.0
"""The pause after a coordinator has answered that it has no such call: an update of the mesh replaces it."""

Resolve = Callable[[str, int], Awaitable[Iterable[str]]]
"""Returns the IP addresses of a name and port. Raises ``OSError`` when they are not known now."""


class PeerMembers:
    """Holds the current addresses of the replicas that this process works with: all, or its subset of a large mesh. One
    that left may finish what it has begun, but gets no new work.

    Attributes:
        chosen: The addresses.
    """

    def __init__(self, given: Sequence[str], resolve: Resolve | None = None, *, size: int | None = None) -> None:
        """``size``: of the subset, see :mod:`.subset`; None: no subset is made."""
        self._fixed = frozenset(address for address in given if not address.startswith(DNS))
        self._names = [addresses.parse(name.removeprefix(DNS)) for name in given if name.startswith(DNS)]
        self._resolve = resolve or _resolve
        self._size = size
        self._position: ReplicaPosition | None = None
        self._found: dict[Address, frozenset[str]] = {}
        self.chosen: frozenset[str] = frozenset()
        self._joined: Callable[[str], object] = lambda address: None
        self._widened: asyncio.TimerHandle | None = None
        self._choose()

    @property
    def is_narrow(self) -> bool:
        """Whether there are replicas that this process does not work with."""
        return len(self.chosen) < len(self._known())

    @property
    def is_wide(self) -> bool:
        """Whether this process works with all replicas for a while, although its subset is smaller."""
        return self._widened is not None

    def is_left_to_others(self, address: str) -> bool:
        """Return whether a replica is there, but is not among those that this process works with."""
        return address not in self.chosen and address in self._known()

    def move(self, position: ReplicaPosition) -> None:
        """Take this process's position among the processes that choose subsets of these replicas."""
        self._position = position
        self._choose()

    def widen(self) -> None:
        """Work with all replicas for :data:`WIDE_SECONDS`."""
        if self._widened is not None:
            self._widened.cancel()
        elif not self.is_narrow:
            return
        self._widened = asyncio.get_running_loop().call_later(WIDE_SECONDS, self._narrow)
        self._choose()

    async def watch(self, joined: Callable[[str], object]) -> None:
        """Call ``joined`` for each address that appears, or appears again, until cancelled."""
        self._joined = joined
        try:
            for address in sorted(self.chosen):
                joined(address)
            while self._names:
                for name in self._names:
                    await self._look_up(name)
                await asyncio.sleep(REFRESH_SECONDS)
            await asyncio.Event().wait()
        finally:
            if self._widened is not None:
                self._widened.cancel()

    async def _look_up(self, name: Address) -> None:
        try:
            # A name that does not resolve now keeps its last addresses: DNS that is away must not take the mesh down
            # with it.
            hosts = await self._resolve(name.host, name.port)
        except OSError as error:  # the known addresses stay
            log.debug("%s cannot be resolved: %s", name, error)
            return
        self._found[name] = frozenset(str(Address(host=host, port=name.port)) for host in hosts)
        self._choose()

    def _narrow(self) -> None:
        self._widened = None
        self._choose()

    def _known(self) -> frozenset[str]:
        return self._fixed.union(*self._found.values())

    def _choose(self) -> None:
        known, before = self._known(), self.chosen
        self.chosen = known
        # Sorted before the callbacks, so that connections are made in the same order in each process and each simulated
        # run.
        if self._size is not None and self._position is not None and self._widened is None:
            self.chosen = frozenset(subset.choose(known, self._position, self._size))
        for address in sorted(self.chosen - before):
            self._joined(address)


class ReplicaIndex:
    """Learns from the coordinator which of its service's replicas this process is. The last position stays while the
    coordinator is away.

    Attributes:
        position: None until the coordinator has sent it; the process then works with all members.
    """

    def __init__(self, service: str, instance_id: str) -> None:
        self._request = coordinator_pb2.EnrollRequest(service=service, instance_id=instance_id)
        self.position: ReplicaPosition | None = None

    async def run(
        self, stub: "coordinator_pb2_grpc.CoordinatorAsyncStub", moved: Callable[[], object] = lambda: None
    ) -> NoReturn:
        """Stay enrolled until cancelled. ``moved``: called when the position has changed."""
        while True:
            call, wait = stub.Enroll(self._request), _AGAIN_SECONDS
            try:
                while isinstance(message := await call.read(), coordinator_pb2.Position):
                    if message.count and (position := ReplicaPosition(message.index, message.count)) != self.position:
                        self.position = position
                        moved()
            except grpc.aio.AioRpcError as error:
                log.debug("enrolment: %s", error.code().name)
                # During a rolling update the coordinator may be of the release before; all members are then used, as in
                # that release.
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    wait = _OLD_COORDINATOR_SECONDS
            except Exception:  # also of an impossible position: the last one stays
                log.exception("a position of the coordinator cannot be taken")
            finally:
                call.cancel()
            await asyncio.sleep(wait)


async def _resolve(host: str, port: int) -> Iterable[str]:
    entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in entries]
