"""Which output processor takes the next request."""

from tokenloom.request import errors
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.peers.members import Members
from tokenloom.v1 import types_pb2

from .output_link import OutputLink, ProcessStream


class OutputPool:
    """Round-robin over the output processors whose stream is up."""

    def __init__(self, members: Members, peer_id: str, epoch: int, channels: Channels) -> None:
        self._members = members
        self._peer_id = peer_id
        self._epoch = epoch
        self._channels = channels
        self._links: list[OutputLink] = []  # as many as there are output processors
        self._turn = 0

    @property
    def healthy(self) -> bool:
        return any(link.stream for link in self._links)

    def start(self, host: Host, fingerprint: types_pb2.Fingerprint) -> None:
        """Connects all of them, and keeps them connected for as long as the host lives."""

        def joined(address: str) -> None:
            if all(link.address != address for link in self._links):
                host.spawn(self._keep(address, fingerprint), name=f"link to output processor {address}")

        host.spawn(self._members.watch(joined), name="output processors")

    def pick(self) -> ProcessStream:
        """The next healthy stream. Raises :class:`errors.Unavailable` when there is none."""
        for _ in self._links:
            self._turn = (self._turn + 1) % len(self._links)
            link = self._links[self._turn]
            if (stream := link.stream) is not None and link.address in self._members:
                return stream
        raise errors.Unavailable("no output processor is connected; try again")

    async def _keep(self, address: str, fingerprint: types_pb2.Fingerprint) -> None:
        link = OutputLink(address, self._peer_id, self._epoch, self._channels)
        self._links.append(link)
        try:
            await link.run(fingerprint, while_true=lambda: address in self._members)
        finally:
            self._links.remove(link)
