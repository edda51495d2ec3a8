"""Makes faults in the parts of a running mesh, and records what was seen of each."""

import asyncio
import os
import signal
from collections.abc import Mapping

from tokenloom.supervisor.mesh import Mesh
from tokenloom.supervisor.part import SupervisedPart

from . import processes
from .fault import Action, Fault, Injection, Kind
from .part_link import Link

_EFFECT_SECONDS = 2.0
"""Within this time a signal must have taken effect."""
_DRAIN_SECONDS = 45.0
"""Within this time a part must have ended after SIGTERM."""
RETURN_SECONDS = 90.0
"""Within this time a part must serve again."""


class Injector:
    """Owns the faults of one mesh. ``links``: the link of each part by name, for faults of links."""

    def __init__(self, mesh: Mesh, links: Mapping[str, Link]) -> None:
        self.injections: list[Injection] = []
        self._mesh = mesh
        self._links = links
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._under_fault: set[str] = set()
        self._returning: list[asyncio.Task[None]] = []

    @property
    def now(self) -> float:
        """Seconds since the beginning of the faults."""
        return self._loop.time() - self._began

    def is_possible(self, fault: Fault) -> bool:
        """Return whether some part of the kind may meet the fault now."""
        return bool(self._candidates(fault))

    async def inject(self, fault: Fault) -> Injection:
        """Make a possible fault and return when it is over. The return of the part is awaited by :meth:`settle`."""
        candidates = self._candidates(fault)
        part, pids = candidates[int(fault.choice * len(candidates))]
        pid = pids[int(fault.choice * len(candidates) % 1 * len(pids))]
        injection = Injection(fault, part.spec.name, pid, self.now)
        self.injections.append(injection)
        self._under_fault.add(part.spec.name)
        try:
            await self._make(injection)
        finally:
            injection.ended = self.now
            if fault.action in (Action.KILL, Action.TERM):
                self._returning.append(asyncio.create_task(self._await_return(part, injection)))
            else:
                self._under_fault.discard(part.spec.name)
        return injection

    async def settle(self) -> None:
        """Wait until every part that was ended serves again, or has not come back in time."""
        await asyncio.gather(*self._returning)

    async def _make(self, injection: Injection) -> None:
        match injection.fault.action:
            case Action.KILL:
                await self._end_process(injection, signal.SIGKILL, _EFFECT_SECONDS)
            case Action.TERM:
                await self._end_process(injection, signal.SIGTERM, _DRAIN_SECONDS)
            case Action.FREEZE:
                await self._freeze(injection)
            case Action.STARVE:
                await self._starve(injection)
            case _:
                await self._disturb_link(injection, self._links[injection.part])

    async def _end_process(self, injection: Injection, number: signal.Signals, seconds: float) -> None:
        processes.send_signal(injection.pid, number)
        if await processes.until(lambda: processes.state(injection.pid) is None, seconds):
            injection.effect = f"process {injection.pid} was gone after {self.now - injection.began:.2f} s"

    async def _freeze(self, injection: Injection) -> None:
        pid = injection.pid
        processes.send_signal(pid, signal.SIGSTOP)
        stopped = await processes.until(lambda: processes.state(pid) == "T", _EFFECT_SECONDS)
        try:
            await asyncio.sleep(injection.fault.seconds)
            still = processes.state(pid)
        finally:
            processes.send_signal(pid, signal.SIGCONT)
        if stopped:
            end = {"T": "and continued", None: "and was replaced meanwhile"}.get(still, "but did not stay stopped")
            injection.effect = f"process {pid} was in state T {end}" if still in ("T", None) else ""

    async def _starve(self, injection: Injection) -> None:
        starved = processes.policies(injection.pid, os.SCHED_IDLE) == {os.SCHED_IDLE}
        try:
            await asyncio.sleep(injection.fault.seconds)
        finally:
            left = processes.policies(injection.pid, os.SCHED_OTHER)
        if starved:
            end = "" if left else ", which ended meanwhile"
            injection.effect = f"process {injection.pid}{end} ran only where no other one wanted to"

    async def _disturb_link(self, injection: Injection, link: Link) -> None:
        action = injection.fault.action
        connections = link.begin(action)
        try:
            await asyncio.sleep(injection.fault.seconds)
            held, delayed = link.held_bytes(), link.delayed_bytes()
        finally:
            link.end()
        if action is Action.RESET:
            injection.effect = f"{connections} connections were reset" if connections else ""
        elif action is Action.DELAY:
            injection.effect = f"{delayed} bytes were delayed" if delayed else ""
        else:
            injection.effect = f"{held} bytes were held" if held else ""

    async def _await_return(self, part: SupervisedPart, injection: Injection) -> None:
        """Wait until another process is in the place of the ended one and the part serves."""
        module = injection.fault.kind.process

        def is_back() -> bool:
            if not part.serving.is_set() or part.state is None:
                return False
            if injection.fault.kind.is_helper:
                return True
            pids = _processes_of(part, module)
            return bool(pids) and injection.pid not in pids

        if await processes.until(is_back, RETURN_SECONDS):
            injection.served_again = self.now - injection.began
        self._under_fault.discard(part.spec.name)

    def _candidates(self, fault: Fault) -> list[tuple[SupervisedPart, list[int]]]:
        """Return the parts that may meet the fault, with the processes of each: another part of their kind must be
        healthy."""
        kind = fault.kind
        healthy = [part for part in self._members(kind) if self._is_healthy(part)]
        if len(healthy) < 2 and not kind.may_be_last:
            return []
        if fault.action.is_of_link:
            healthy = [part for part in healthy if part.spec.name in self._links]
        found = ((part, _processes_of(part, kind.process)) for part in healthy)
        return [(part, pids) for part, pids in found if pids]

    def _is_healthy(self, part: SupervisedPart) -> bool:
        return part.serving.is_set() and part.state is not None and part.spec.name not in self._under_fault

    def _members(self, kind: Kind) -> list[SupervisedPart]:
        return [part for part in self._mesh.parts if part.spec.service == kind.service and part.spec.role == kind.role]


def _processes_of(part: SupervisedPart, module: str | None) -> list[int]:
    if part.state is None:
        return []
    return [part.state.pid] if module is None else processes.running_module(part.state.pid, module)
