"""The network between simulated processes: who listens where, how long bytes take, and which links are cut."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from .lies import Lies
from .virtual_loop import Process, VirtualLoop

if TYPE_CHECKING:
    from .pipe import Pipe

Find = Callable[[str], Any]
"""Returns the handler of a method, given its full name; None if there is none."""

KEEPALIVE_SECONDS = 2.6
"""As long as gRPC's pings take to notice a link that is cut."""


class Network:
    """Carries bytes between processes, in the order of each connection.

    Attributes:
        num_frames: Writes so far.
        mean_delay: Seconds that a write takes on average.
        lies: What processes say that lie.
    """

    def __init__(self, loop: VirtualLoop, random: Random, mean_delay: float) -> None:
        self.loop = loop
        self.mean_delay = mean_delay
        self.num_frames = 0
        self.lies = Lies()
        self._random = random
        self._trace = hashlib.blake2b(digest_size=16)
        self._listening: dict[str, tuple[Process, Find]] = {}  # by address
        self._awaited: dict[str, list[asyncio.Future[None]]] = {}  # by address, until it changes who listens there
        self._cut: Counter[tuple[str, str]] = Counter()  # by names of sender and receiver
        self._slow: dict[str, float] = {}  # seconds that are added to each write from and to a part
        self.pipes: dict[Pipe, None] = {}

    def trace(self) -> str:
        """Return a hash of every write so far: when, from where, to where, which bytes."""
        return self._trace.hexdigest()

    def note(self, sender: str, receiver: str, data: bytes) -> None:
        """Add a write to the trace."""
        self.num_frames += 1
        self._trace.update(f"{self.loop.time():.9f} {sender}>{receiver} {len(data)} ".encode())
        self._trace.update(data)

    def delay(self, sender: str, receiver: str) -> float:
        """Return the seconds that the next write takes."""
        delay = self._random.expovariate(1.0) * self.mean_delay
        if self._slow:
            delay += self._slow.get(sender, 0.0) + self._slow.get(receiver, 0.0)
        return delay

    # Listening

    def listen(self, address: str, process: Process, find: Find) -> None:
        """Serve what ``find`` finds at ``address`` until the process ends."""
        self._listening[address] = process, find
        self._announce(address)

    def unlisten(self, address: str, process: Process) -> None:
        """Stop serving at ``address``, unless another process has taken it over."""
        if (entry := self._listening.get(address)) is not None and entry[0] is process:
            del self._listening[address]
            self._announce(address)

    def find(self, address: str) -> tuple[Process, Find] | None:
        """Return the process that listens there and what it serves; None: connections are refused."""
        return self._listening.get(address)

    async def changed(self, address: str) -> None:
        """Wait until a process begins to listen at ``address``, or none does any more."""
        change: asyncio.Future[None] = self.loop.create_future()
        self._awaited.setdefault(address, []).append(change)
        await change

    # Faults

    def is_cut(self, sender: str, receiver: str) -> bool:
        return (sender, receiver) in self._cut

    def cut(self, sender: str, receiver: str) -> None:
        """Keep everything back that ``sender`` writes to ``receiver``, until the link is healed. The transport notices
        after :data:`KEEPALIVE_SECONDS`, in both directions."""
        self._cut[sender, receiver] += 1
        for pipe in (*self._between(sender, receiver), *self._between(receiver, sender)):
            self.loop.call_later(KEEPALIVE_SECONDS, pipe.give_up)

    def heal(self, sender: str, receiver: str) -> None:
        """Undo a cut: deliver what was kept back, and carry bytes again."""
        self._cut[sender, receiver] -= 1
        if self._cut[sender, receiver] > 0:
            return  # another fault has cut it too
        del self._cut[sender, receiver]
        for pipe in self._between(sender, receiver):
            pipe.flush()

    def slow_down(self, name: str, seconds: float) -> None:
        """Add ``seconds`` to each write from and to a part; 0: none."""
        self._slow.pop(name, None)
        if seconds:
            self._slow[name] = seconds

    def reset(self, one: str, other: str) -> None:
        """Break every connection between two parts."""
        for pipe in (*self._between(one, other), *self._between(other, one)):
            pipe.lose()

    def froze(self, process: Process) -> None:
        """Let the peers of a process that was stopped notice it after :data:`KEEPALIVE_SECONDS`."""
        for pipe in [pipe for pipe in self.pipes if pipe.there is process]:
            self.loop.call_later(KEEPALIVE_SECONDS, pipe.give_up)

    def died(self, process: Process) -> None:
        """Close what the process had open: its peers notice when the news arrives."""
        for address in [address for address, entry in self._listening.items() if entry[0] is process]:
            del self._listening[address]
            self._announce(address)
        for pipe in [pipe for pipe in self.pipes if pipe.here is process]:
            pipe.die()

    def _announce(self, address: str) -> None:
        for change in self._awaited.pop(address, []):
            if not change.done():
                change.set_result(None)

    def _between(self, sender: str, receiver: str) -> list["Pipe"]:
        return [pipe for pipe in self.pipes if (pipe.here.name, pipe.there.name) == (sender, receiver)]
