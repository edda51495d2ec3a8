"""An operator pauses the mesh and puts it to sleep while parts fail, and looks whether the engines obey."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

import grpc.aio

from tokenloom.services.coordinator.engines.engine_stream import to_duration
from tokenloom.v1 import engine_pb2 as pb
from tokenloom.v1.coordinator_pb2 import SetDesiredStateRequest, SetDesiredStateResponse
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub

from .mesh import Mesh, SimulatedEngine, address
from .parts import Part
from .plan import SECONDS, Call, Fault, Plan
from .surroundings import Channel
from .virtual_loop import Process

PATIENCE_SECONDS = 1.0
_AGAIN_SECONDS = 0.2
_GIVES_UP_SECONDS = 40.0
"""By then a coordinator answers in every run."""
_LOOK_SECONDS = 0.05
_CHANGES = {
    "pause": SetDesiredStateRequest(pause=pb.PauseRequest(mode=pb.PAUSE_MODE_KEEP)),
    "resume": SetDesiredStateRequest(resume=pb.ResumeRequest()),
    "sleep": SetDesiredStateRequest(sleep=pb.SleepRequest(level=1, mode=pb.PAUSE_MODE_KEEP)),
    "wake_up": SetDesiredStateRequest(wake_up=pb.WakeUpRequest()),
}


def with_administration(plan: Plan) -> Plan:
    """Return the plan with calls of an operator, the last of which lets requests run again, and with kills of engines
    and of the coordinator about each of them."""
    random = Random(f"administration {plan.seed}")
    calls, faults, at = [], [*plan.faults], random.uniform(0.0, SECONDS / 2)

    def kill(target: str, at: float) -> Fault:
        return Fault("crash", max(at + random.uniform(-0.05, 0.3), 0.0), random.uniform(0.1, 0.5), target)

    for _ in range(random.choice((1, 1, 2))):
        begin, end = random.choice((("pause", "resume"), ("sleep", "wake_up"), ("sleep", "resume")))
        calls += [Call(begin, at), Call(end, at + random.uniform(0.2, 2.5))]
        for call in calls[-2:]:
            targets = [random.choice(plan.engines), "coordinator-0"]
            faults += [kill(target, call.at) for target in targets if random.random() < 0.5]
        at = calls[-1].at + random.uniform(0.0, 0.5)
    return replace(plan, calls=calls, faults=sorted(faults, key=lambda fault: fault.at))


@dataclass
class Wanted:
    """What an answer said.

    Attributes:
        revision: Of the state that is wanted.
        pauses: Whether the engines should be paused.
        sleeps: Whether they should sleep.
        done: Processes that were said to be in that state.
        before: Processes that had started before the answer.
    """

    revision: int
    pauses: bool
    sleeps: bool
    done: list[Process]
    before: list[Process]


class Operator:
    """Makes the calls of a plan, and looks at the engines between them."""

    def __init__(self, mesh: Mesh) -> None:
        self.violations: list[str] = []
        self._mesh = mesh
        self._loop = mesh.network.loop
        self._process = Process("operator")
        self._is_lost = False  # the state is, with all that knew it

    async def run(self) -> None:
        """Make the calls, each until it is answered."""
        began_at, calls = self._loop.time(), self._mesh.plan.calls
        for call, following in zip(calls, [*calls, None][1:], strict=True):
            await asyncio.sleep(max(began_at + call.at - self._loop.time(), 0.0))
            answer = await self._call(call.kind)
            if answer is None:
                self.violations.append(f"no coordinator answered {call.kind}")
                return
            wanted, self._is_lost = self._wanted(call.kind, answer), False
            while following is not None and self._loop.time() < began_at + following.at:
                self._look(wanted)
                await asyncio.sleep(_LOOK_SECONDS)

    async def _call(self, kind: str) -> SetDesiredStateResponse | None:
        ends_at = self._loop.time() + _GIVES_UP_SECONDS
        request = SetDesiredStateRequest(patience=to_duration(PATIENCE_SECONDS))
        request.MergeFrom(_CHANGES[kind])
        channel = Channel(self._mesh.network, self._process, address("coordinator-0"))
        while self._loop.time() < ends_at:
            try:
                answer: SetDesiredStateResponse = await CoordinatorStub(channel).SetDesiredState(
                    request, timeout=2 * PATIENCE_SECONDS
                )
            except grpc.aio.AioRpcError:
                await asyncio.sleep(_AGAIN_SECONDS)
            else:
                return answer
        return None

    def _wanted(self, kind: str, answer: SetDesiredStateResponse) -> Wanted:
        parts = self._mesh.of_kind("engine")
        names = [each.engine_id for each in answer.engines if each.is_done]
        coordinators = self._mesh.active_coordinators()
        revision = max((_revision(part) for part in coordinators), default=0)
        return Wanted(
            revision,
            pauses=kind in ("pause", "sleep"),
            sleeps=kind == "sleep",
            done=[part.process for part in parts if part.name in names and part.process is not None],
            before=[part.process for part in parts if part.process is not None],
        )

    def _look(self, wanted: Wanted) -> None:
        """Compare every engine that must be in the state: one that was said to be, or that has started since."""
        self._is_lost = self._is_lost or not any(_knows(part, wanted.revision) for part in self._mesh.parts.values())
        if self._is_lost:
            return
        for part in self._mesh.of_kind("engine"):
            process = part.process
            if process is None or not part.is_ready or (process in wanted.before and process not in wanted.done):
                continue
            for wrong in _compare(part, wanted):
                self.violations.append(f"{part.name} {wrong}")


def _compare(part: Part, wanted: Wanted) -> Iterator[str]:
    assert isinstance(part.service, SimulatedEngine)
    if part.service.core._dead is not None or not part.is_serving:
        return  # it is about to end
    is_paused = bool(part.service.engine.pause.mode)
    is_sleeping = part.service.core.core.sleeping.is_sleeping()
    if is_paused != wanted.pauses or is_sleeping != wanted.sleeps:
        yield f"is paused: {is_paused}, asleep: {is_sleeping}; wanted: {wanted.pauses}, {wanted.sleeps}"


def _revision(part: Part) -> int:
    servicer = part.service.servicer
    return 0 if servicer is None else int(servicer._registry.wanted.revision)


def _knows(part: Part, revision: int) -> bool:
    """Return whether a part that lives has a state, or a later one: the coordinator, its standby or an engine."""
    if part.process is None:
        return False
    if part.kind == "coordinator":
        return max(_revision(part), int(part.service._predecessor.desired.revision)) >= revision
    if part.kind == "engine" and part.is_ready:
        known: int = part.service.engine.identity.facts.desired.revision
        return known >= revision
    return False


_MOVE_SECONDS = 0.4
"""Between two moves, at most."""


class Mover:
    """Moves requests from engine to engine while clients wait for them.

    Attributes:
        moved, stayed: How many outputs have.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.moved = self.stayed = 0
        self._mesh = mesh
        self._random = Random(f"mover {mesh.plan.seed}")
        self._process = Process("mover")

    async def run(self) -> None:
        """Ask one engine after the other, without end."""
        random = self._random
        while True:
            await asyncio.sleep(random.uniform(0.01, _MOVE_SECONDS))
            source = random.choice(self._mesh.plan.engines)
            target = random.choice((*self._mesh.plan.engines, "", "", "engine-9"))
            channel = Channel(self._mesh.network, self._process, address(source))
            try:
                answer: pb.MoveRequestsResponse = await EngineAdminStub(channel).MoveRequests(
                    pb.MoveRequestsRequest(target=target), timeout=PATIENCE_SECONDS
                )
            except grpc.aio.AioRpcError:
                continue
            self.moved += answer.moved
            self.stayed += answer.stayed
