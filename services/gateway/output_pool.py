"""Which output processor takes the next request."""

from collections.abc import Sequence

from tokenloom.v1 import types_pb2

from ..runtime import errors
from ..runtime.channels import Channels
from ..runtime.host import Host
from .output_link import OutputLink, ProcessStream


class OutputPool:
    """Round-robin over the output processors whose stream is up."""

    def __init__(self, addresses: Sequence[str], peer_id: str, epoch: int, channels: Channels) -> None:
        self._links = [OutputLink(address, peer_id, epoch, channels) for address in addresses]
        self._turn = 0

    @property
    def healthy(self) -> bool:
        return any(link.stream for link in self._links)

    def start(self, host: Host, fingerprint: types_pb2.Fingerprint) -> None:
        """Connects all of them, and keeps them connected for as long as the host lives."""
        for link in self._links:
            host.spawn(link.run(fingerprint), name=f"link to output processor {link.address}")

    def pick(self) -> ProcessStream:
        """The next healthy stream. Raises :class:`errors.Unavailable` when there is none."""
        for _ in self._links:
            self._turn = (self._turn + 1) % len(self._links)
            if (stream := self._links[self._turn].stream) is not None:
                return stream
        raise errors.Unavailable("no output processor is connected; try again")
