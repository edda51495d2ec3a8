"""Spreads requests over the output processors, and moves those whose output processor is lost or leaves."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from tokenloom.request import errors
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.peers import hello
from tokenloom.services.runtime.peers.channels import Channels
from tokenloom.services.runtime.peers.members import Members
from tokenloom.v1 import output_processor_pb2 as pb
from tokenloom.v1 import output_processor_pb2_grpc, types_pb2

from .collector import Collector
from .output_link import INITIAL_CREDIT, OutputLink, ProcessStream
from .submission import KeptPrompts, Submission

Cancel: TypeAlias = Callable[[], None]

_PLACED_AT_ONCE = 16
"""Requests that are moved before the event loop serves other work."""


class OutputPool:
    """Sends requests to the output processors that are connected, in turn.

    A request whose output processor is lost, or ends it with ``TryElsewhere``, continues on another one. It waits while
    none is connected; the time limit of the client's request ends the wait. Fulfils ``StreamOwner``.
    """

    def __init__(
        self,
        members: Members,
        peer_id: str,
        epoch: int,
        channels: Channels,
        *,
        max_kept_bytes: int,
        on_moved: Callable[[], object],
    ) -> None:
        """Args:
        max_kept_bytes: Limits the prompts that are kept for requests in work.
        on_moved: Called for each request that is sent again.
        """
        self._members = members
        self._peer_id = peer_id
        self._epoch = epoch
        self._channels = channels
        self._kept = KeptPrompts(max_kept_bytes)
        self._count_moved = on_moved
        self._links: list[OutputLink] = []  # one for each output processor
        self._turn = 0
        self._waiting: dict[Submission, None] = {}  # in order of arrival; bounded by what the gateway admits
        self._wake = asyncio.Event()

    @property
    def num_connected(self) -> int:
        """Return how many output processors take requests."""
        return sum(map(self._may_run, self._links))

    @property
    def num_known(self) -> int:
        """Return how many output processors should take requests."""
        return sum(link.address in self._members for link in self._links)

    def start(self, host: Host, fingerprint: types_pb2.Fingerprint) -> None:
        """Connect to all of them, and keep them connected for as long as the host lives."""
        ours = hello.make_hello(self._peer_id, self._epoch, fingerprint=fingerprint, initial_credit=INITIAL_CREDIT)

        def joined(address: str) -> None:
            if all(link.address != address for link in self._links):
                host.spawn(self._keep(address, ours), name=f"link to output processor {address}")

        host.spawn(self._members.watch(joined), name="output processors")
        host.spawn(self._place_waiting(), name="requests without an output processor")

    def submit(self, submit: pb.Submit, collector: Collector, index: int) -> Cancel:
        """Send a request to the next output processor in turn, or keep it until one is connected; its samples go to the
        collector, from ``index`` on. ``submit`` must not change any more.

        Returns what cancels it, which must be called when the collector's request has ended.
        """
        now = asyncio.get_running_loop().time()
        submission = Submission(submit, collector, index, self._kept, now=now)
        if (stream := self._choose(submission)) is not None:
            self._send(submission, stream)
        else:
            self._wait(submission)
        return partial(self._cancel, submission)

    def on_open(self) -> None:
        """Send the requests that wait."""
        self._wake.set()

    def on_moved(self, stream: ProcessStream, submission: Submission, error: errors.TokenloomError) -> None:
        """Place a request that an output processor has refused, or has ended before its end."""
        submission.refused(stream, error)
        self._wait(submission)

    def on_lost(self, stream: ProcessStream, submissions: list[Submission]) -> None:
        """Place the requests of a stream that has ended."""
        was_alone = len(submissions) == 1 and not stream.leaving
        for submission in submissions:
            submission.lost(was_alone=was_alone)
            self._wait(submission)

    def _choose(self, submission: Submission) -> ProcessStream | None:
        """Return the stream that is next in turn, among those that have not refused the request."""
        for _ in self._links:
            self._turn = (self._turn + 1) % len(self._links)
            link = self._links[self._turn]
            if self._may_run(link) and link.stream not in submission.refused_by:
                return link.stream
        return None

    def _may_run(self, link: OutputLink) -> bool:
        return link.stream is not None and not link.stream.leaving and link.address in self._members

    def _send(self, submission: Submission, stream: ProcessStream, *, again: bool = False) -> None:
        slot = stream.submit(submission, again=again)
        submission.withdraw = partial(stream.cancel, slot)

    def _wait(self, submission: Submission) -> None:
        """Let a request wait until :meth:`_place_waiting` finds a stream for it, unless it has ended."""
        if not submission.collector.failed:
            self._waiting[submission] = None
            self._wake.set()

    def _cancel(self, submission: Submission) -> None:
        self._waiting.pop(submission, None)
        submission.cancel()

    async def _place_waiting(self) -> None:
        """Send requests that wait, until cancelled. A request that every output processor has refused ends."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            num_placed = 0
            while self._waiting:
                submission = next(iter(self._waiting))
                if (stream := self._choose(submission)) is not None:
                    if submission.withdraw is not None:  # otherwise it has only waited
                        self._count_moved()
                    self._send(submission, stream, again=True)
                elif any(map(self._may_run, self._links)):
                    submission.fail_as_refused()
                else:
                    break
                del self._waiting[submission]
                num_placed += 1
                if num_placed % _PLACED_AT_ONCE == 0:
                    await asyncio.sleep(0)

    async def _keep(self, address: str, ours: types_pb2.Hello) -> None:
        link = OutputLink(address, ours, self)
        self._links.append(link)
        try:
            async with self._channels.open(address, "output_processor") as channel:
                stub = output_processor_pb2_grpc.OutputProcessorStub(channel)
                while address in self._members:  # requests that have begun continue to their end
                    await link.connect(stub)
        finally:
            self._links.remove(link)
