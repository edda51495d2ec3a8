"""Keeps the engine's ``Join`` stream: reports changed counts, and joins again when the coordinator comes back."""

import asyncio
import contextlib
import logging
from typing import NoReturn, Protocol, TypeAlias

import grpc
import grpc.aio

from tokenloom.process.fall_backs import FallBacks
from tokenloom.request.errors import Aborted, FailedPrecondition, Unavailable
from tokenloom.request.wire_errors import of_exception
from tokenloom.services.runtime.peers.hello import HELLO_SECONDS, MAX_REVISION, check_hello
from tokenloom.services.runtime.tasks import first_of
from tokenloom.v1 import coordinator_pb2, coordinator_pb2_grpc, types_pb2

from ..records.identity import Identity
from ..records.load import LoadTracker
from .loras import to_adapter

log = logging.getLogger(__name__)

MIN_REPORT_SECONDS = 0.03
"""Time between two reports unless the coordinator asks for another one. It counts its own picks at once; only ends are
reported later."""
MAX_REPORT_SECONDS = 1.0
_MOST_TOKENS = (1 << 32) - 1
"""What the report's fields hold at most: a long queue of long prompts has more."""
_TOKENS = ("waiting_tokens", "prefilling_tokens")
_RATES = (
    *("prefill_tokens_per_second", "starts_per_second", "computed_tokens_per_second", "prompt_tokens_per_second"),
    *("step_seconds", "step_requests"),
)
MIN_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 1.0

_Call: TypeAlias = "grpc.aio.StreamStreamCall[coordinator_pb2.EngineReport, coordinator_pb2.EngineCommand]"


class Commands(Protocol):
    """Obeys what the coordinator asks of an engine. No method waits."""

    def drain(self, grace: float) -> None:
        """Drain within ``grace`` seconds."""

    def change_adapters(self, changes: coordinator_pb2.AdapterChanges) -> None:
        """Load and unload LoRA adapters."""

    def start_wave(self, wave: int) -> None:
        """Begin a wave that another rank of the data-parallel group has begun."""

    def resize_group(self, size: int) -> None:
        """Agree with the other ranks on a group of ``size`` ranks."""

    def refused(self, reason: str) -> None:
        """Show that the coordinator refuses the engine, so that it gets no requests; empty: it does not any more."""

    def take_state(self, wanted: coordinator_pb2.DesiredState) -> None:
        """Reach the state that operators want; with revision 0 none is wanted."""

    def relieve(self, relief: coordinator_pb2.Relief) -> None:
        """Let running requests go on at another engine, which has less to do."""

    def wait_aside(self, reason: str) -> None:
        """Note that the engine gets no requests, because others serve its model's name; with an empty ``reason`` that
        it gets some again."""


class CoordinatorLink:
    """Keeps the engine in the coordinator's registry while :meth:`run` runs."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        identity: Identity,
        load: LoadTracker,
        role: types_pb2.EngineRole,
        fall_backs: FallBacks | None = None,
    ) -> None:
        """``channel``: the channel to the coordinator; its owner closes it. ``fall_backs``: those of the engine, which
        its reports carry; None: it has none."""
        self._channel = channel
        self._identity = identity
        self._load = load
        self._role = role
        self._fall_backs = fall_backs or FallBacks()
        self._is_outdated = False
        self._interval = MIN_REPORT_SECONDS
        self._urgent = load.urgent  # set when a report must not wait for the interval
        self.joined = asyncio.Event()
        """Set when the engine has joined and is in the state that is wanted, for the first time."""
        self._state = coordinator_pb2.ENGINE_STATE_SERVING
        self._sent = asyncio.Event()  # set when a report has been written that holds all that was urgent
        self._refusal = ""
        self._absence = ""  # why it is not joined

    def set_role(self, role: types_pb2.EngineRole) -> None:
        """Report to the coordinator which legs the engine takes."""
        self._role = role
        self._report_now()

    def set_state(self, state: coordinator_pb2.EngineState) -> None:
        """Report to the coordinator whether the engine serves, drains or is dead."""
        self._state = state
        self._report_now()

    async def reported(self, seconds: float) -> None:
        """Return when a report of the engine as it is now has been written, after ``seconds`` at most."""
        self._sent.clear()
        self._report_now()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._sent.wait()

    def rejoin(self) -> None:
        """Join again, because the identity has changed."""
        self._is_outdated = True
        self._report_now()

    async def run(self, commands: Commands) -> None:
        """Join, and join again after failures. Returns only if another engine of this name has joined while this one
        drains.

        ``commands`` obeys what the coordinator asks for. Raises ``FailedPrecondition`` if another engine has taken the
        name.
        """
        backoff, loop = MIN_BACKOFF_SECONDS, asyncio.get_running_loop()
        stub = coordinator_pb2_grpc.CoordinatorStub(self._channel)
        while True:
            joined_at = loop.time()
            try:
                await self._join(stub.Join(), commands)
            except Exception as failure:  # of any kind: an engine that joins again serves on meanwhile
                cause = failure
                is_silent, is_answer = isinstance(cause, TimeoutError), isinstance(cause, grpc.aio.AioRpcError)
                error = Unavailable("the coordinator did not answer") if is_silent else of_exception(cause)
            if self._is_outdated:
                continue  # it left by itself, to join again
            if isinstance(error, Aborted):
                if self._state == coordinator_pb2.ENGINE_STATE_DRAINING:
                    log.info("removed from the coordinator's registry: %s", error.message)
                    return
                # It would get no request any more and look well. Its supervisor starts a process in its place, which
                # joins as soon as the name is free.
                raise FailedPrecondition(f"removed from the coordinator's registry: {error.message}")
            is_refused = is_answer and not isinstance(error, Unavailable)
            self._note_refusal(error.message if is_refused else "", commands)
            if loop.time() - joined_at > MAX_BACKOFF_SECONDS:
                backoff = MIN_BACKOFF_SECONDS
            # What clients are not shown helps here, such as a name that cannot be resolved.
            reason = (cause.details() if isinstance(cause, grpc.aio.AioRpcError) else "") or error.message
            if not is_refused and reason != self._absence:  # of a refusal the fall-back says so
                self._absence = reason  # not every second for as long as it lasts
                log.info("not in the coordinator's registry (%s); joining again until it succeeds", reason)
            await self._wait_to_join(backoff)
            backoff = min(backoff * 2, MAX_BACKOFF_SECONDS)

    async def _wait_to_join(self, seconds: float) -> None:
        """Wait for so long, or until the channel is connected again: a coordinator that was restarted is joined at
        once, and one that refuses the engine is not asked more often."""
        ready, state = grpc.ChannelConnectivity.READY, self._channel.get_state()
        if state == ready:
            await asyncio.sleep(seconds)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while state != ready:
                    await self._channel.wait_for_state_change(state)
                    state = self._channel.get_state()

    async def _join(self, call: _Call, commands: Commands) -> NoReturn:
        """Join the coordinator over ``call``: report to it and take its commands until the stream fails."""
        self._is_outdated = False
        try:
            first = self._report()
            first.hello.CopyFrom(self._identity.hello())
            first.identity.CopyFrom(self._identity.registration())
            first.join.CopyFrom(self._identity.facts)
            await _write(call, first)
            async with asyncio.timeout(HELLO_SECONDS):
                answer = await _read(call)
            check_hello(answer.hello)
            _check(answer)
            log.info("joined coordinator %s", answer.hello.peer_id)
            self._absence = ""
            self._note_refusal("", commands)
            self._obey_answer(answer, commands)
            await first_of(self._write_reports(call), self._read_commands(call, commands))
        finally:
            call.cancel()  # gRPC does not end a stream that is merely dropped
        raise AssertionError("neither task returns")

    def _obey_answer(self, answer: coordinator_pb2.EngineCommand, commands: Commands) -> None:
        self._keep_interval(answer)
        if answer.incarnation:
            self._identity.facts.incarnation = answer.incarnation
        # One that has just started sends the state later, when it knows it from other engines.
        if answer.HasField("desired") or not answer.incarnation:
            commands.take_state(answer.desired)

    def _keep_interval(self, command: coordinator_pb2.EngineCommand) -> None:
        if command.HasField("report_interval"):
            seconds = command.report_interval.ToNanoseconds() / 1e9
            self._interval = min(max(seconds, MIN_REPORT_SECONDS), MAX_REPORT_SECONDS)

    def _note_refusal(self, reason: str, commands: Commands) -> None:
        """Note why the coordinator refuses the engine; empty: it does not."""
        if reason != self._refusal:
            self._refusal = reason
            commands.refused(reason)

    async def _write_reports(self, call: _Call) -> NoReturn:
        while True:
            try:
                # An idle engine reports once a second too: its silence is how the coordinator notices that its event
                # loop hangs.
                async with asyncio.timeout(MAX_REPORT_SECONDS - self._interval):
                    await self._load.changed.wait()
            except TimeoutError:
                pass
            if self._is_outdated:
                raise Unavailable("the engine's identity changed")
            await _write(call, self._report())
            if not self._urgent.is_set():
                self._sent.set()
            await self._pause()

    async def _pause(self) -> None:
        """Let changes within the interval make one report."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._interval):
                # A drain or a change of role is not delayed by the interval, which is up to one second in a large mesh:
                # until it is known, requests are still placed here.
                await self._urgent.wait()

    def _report_now(self) -> None:
        self._load.changed.set()
        self._urgent.set()

    async def _read_commands(self, call: _Call, commands: Commands) -> NoReturn:
        while True:
            command = await _read(call)
            _check(command)
            self._keep_interval(command)
            if command.HasField("adapters"):
                commands.change_adapters(command.adapters)
            if command.HasField("drain"):
                commands.drain(command.drain.grace.ToNanoseconds() / 1e9)
            if command.HasField("start_wave"):
                commands.start_wave(command.start_wave)
            if command.HasField("desired"):
                commands.take_state(command.desired)
            if command.HasField("relief"):
                commands.relieve(command.relief)
            if command.HasField("waits_aside"):
                commands.wait_aside(command.waits_aside)
            if command.HasField("data_parallel_size"):
                commands.resize_group(command.data_parallel_size)

    def _report(self) -> coordinator_pb2.EngineReport:
        """Return a consistent report: a pick and the request that it placed are in the same one."""
        # Cleared before the counts are read, not after: a change in between would otherwise never be reported.
        self._load.changed.clear()
        self._urgent.clear()
        load, group = self._load.snapshot(), self._load.group
        counts = load._asdict()
        for name in _TOKENS:
            counts[name] = min(counts[name], _MOST_TOKENS)
        for name in _RATES:
            # Two digits: smaller changes are not worth a snapshot to every watcher.
            counts[name] = float(f"{counts[name]:.1e}")
        report = coordinator_pb2.EngineReport(
            **counts,
            role=self._role,
            state=self._reported_state(),
            picks_arrived=self._load.take_picks(),
            adapters=map(to_adapter, self._load.loras),
            progress=self._load.progress,
            start_wave=None if group is None else group.start_wave,
            wave_complete=None if group is None else group.wave_complete,
            group_size=group.size if group is not None and group.is_member else 0,
            short_of_blocks=self._load.is_short,
        )
        for each in self._fall_backs.active:
            report.fall_backs.add(kind=each.kind, detail=each.detail)
        return report

    def _reported_state(self) -> coordinator_pb2.EngineState:
        if self._state != coordinator_pb2.ENGINE_STATE_SERVING:
            return self._state
        if (group := self._load.group) is not None and not group.is_member:
            return coordinator_pb2.ENGINE_STATE_STARTING
        if self._load.is_failing:
            return coordinator_pb2.ENGINE_STATE_DEAD
        return coordinator_pb2.ENGINE_STATE_PAUSED if self._load.is_paused else self._state


async def _write(call: _Call, report: coordinator_pb2.EngineReport) -> None:
    """Write a report, unless the call has ended; reading from the call then raises the reason."""
    with contextlib.suppress(asyncio.InvalidStateError):
        await call.write(report)


def _check(command: coordinator_pb2.EngineCommand) -> None:
    """Raise ``Unavailable`` for what no coordinator takes back: an engine that believed it could never join again."""
    if max(command.incarnation, command.desired.revision) >= MAX_REVISION:
        raise Unavailable(f"the coordinator sent an incarnation or a revision that is not below {MAX_REVISION}")


async def _read(call: _Call) -> coordinator_pb2.EngineCommand:
    message = await call.read()
    if not isinstance(message, coordinator_pb2.EngineCommand):
        raise Unavailable("the coordinator ended the stream")
    return message
