"""Keeps the data-parallel groups: which ranks have joined, which of them must begin a wave, and changes of size.
Decides which ranks of a group are asked to begin a wave.

No I/O: commands are returned, by the name of the engine.
"""

import asyncio
from dataclasses import dataclass, field

from tokenloom.request.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, NotFound
from tokenloom.v1.coordinator_pb2 import EngineCommand, EngineIdentity, EngineReport

Commands = list[tuple[str, EngineCommand]]
"""Commands and the engines that get them."""

SCALE_SECONDS = 60.0
"""How long the ranks of a group may take to agree on another size."""


@dataclass(slots=True)
class RankState:
    """What one rank has reported, and was asked.

    Attributes:
        started: The wave that it has begun; None at rest.
        completed: The last wave that has ended for it; -1 before the first.
        sent_start: The last wave that it was asked to begin; -1: none.
    """

    started: int | None = None
    completed: int = -1
    sent_start: int = -1


@dataclass(slots=True)
class WaveStarts:
    """Holds the ranks of one group that are joined. A rank is asked to begin the wave that another one has begun.

    The decision follows from the latest reports alone, so that a lost or late report, or another coordinator, delays a
    start and never loses it. A start that comes too late is stale: the rank ignores it.
    """

    ranks: dict[str, RankState] = field(default_factory=dict)
    """By the name of the engine."""

    def report(self, name: str, started: int | None, completed: int | None) -> None:
        """Take a rank's report."""
        state = self.ranks.setdefault(name, RankState())
        state.started, state.completed = started, -1 if completed is None else completed

    def leave(self, name: str) -> None:
        """Forget a rank, or what it was asked: a rank that joins again is asked again."""
        self.ranks.pop(name, None)

    def due(self) -> list[tuple[str, int]]:
        """Return who must begin which wave, and note that they were asked."""
        # The latest one: a rank that reports an older wave has not yet seen that the others went on.
        wave = max((state.started for state in self.ranks.values() if state.started is not None), default=None)
        if wave is None:
            return []
        due = [
            name
            for name, state in self.ranks.items()
            if state.started is None and state.completed < wave and state.sent_start < wave
        ]
        for name in due:
            self.ranks[name].sent_start = wave
        return [(name, wave) for name in due]


@dataclass(slots=True)
class _Member:
    identity: EngineIdentity
    size: int = 0
    """Ranks of the group, as this one knows it; 0: it is no member."""
    leaves: bool = False
    """Whether it was asked to leave, which it does not take back: its requests go on elsewhere."""


@dataclass(slots=True)
class _Group:
    members: dict[str, _Member] = field(default_factory=dict)
    starts: WaveStarts = field(default_factory=WaveStarts)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class DataParallelGroups:
    """Holds the groups of the engines that have joined."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def join(self, identity: EngineIdentity) -> None:
        """Take an engine; one outside of groups is ignored. Raises ``InvalidArgument``, naming the other engine, if it
        cannot be a rank of its group."""
        if not (name := identity.data_parallel_group):
            return
        group = self._groups.setdefault(name, _Group())
        for other in (member.identity for member in group.members.values()):
            if other.engine_id == identity.engine_id:
                continue
            here = f"of data-parallel group {name!r}, which engine {other.engine_id!r} has joined"
            if other.data_parallel_rank == identity.data_parallel_rank:
                raise InvalidArgument(
                    f"rank {identity.data_parallel_rank} {here}, is taken", "identity.data_parallel_rank"
                )
            # Ranks with different options would call different collective operations, and all of them would hang.
            if other.parallel_config_hash != identity.parallel_config_hash:
                raise InvalidArgument(
                    f"the configuration of rank {identity.data_parallel_rank} differs from that {here} as rank "
                    f"{other.data_parallel_rank}; start all ranks with equal options and the same model",
                    "identity.parallel_config_hash",
                )
        group.members[identity.engine_id] = _Member(identity)
        group.starts.leave(identity.engine_id)  # what it was asked on an earlier stream may be lost

    def report(self, identity: EngineIdentity, report: EngineReport) -> Commands:
        """Take a report. Returns which ranks must begin a wave."""
        group = self._groups.get(identity.data_parallel_group)
        if group is None or (member := group.members.get(identity.engine_id)) is None:
            return []
        if member.size != report.group_size:
            member.size = report.group_size
            group.changed.set()
        if not identity.computes_in_waves or not report.group_size:
            return []
        started = report.start_wave if report.HasField("start_wave") else None
        completed = report.wave_complete if report.HasField("wave_complete") else None
        group.starts.report(identity.engine_id, started, completed)
        return [(name, EngineCommand(start_wave=wave)) for name, wave in group.starts.due()]

    def not_asked(self, identity: EngineIdentity) -> None:
        """Note that a rank could not be asked to begin a wave; the next report of its group tries again."""
        if (group := self._groups.get(identity.data_parallel_group)) is not None:
            group.starts.ranks[identity.engine_id].sent_start = -1

    def leave(self, identity: EngineIdentity) -> None:
        """Forget an engine that left."""
        if (group := self._groups.get(identity.data_parallel_group)) is None:
            return
        member = group.members.get(identity.engine_id)
        if member is not None and member.identity is identity:  # otherwise a newer stream has its name
            del group.members[identity.engine_id]
            group.starts.leave(identity.engine_id)
            group.changed.set()
        if not group.members:
            del self._groups[identity.data_parallel_group]

    def resize(self, name: str, size: int) -> Commands:
        """Return the commands that change the size of a group. Raises ``InvalidArgument`` for a size of 0, ``NotFound``
        for an unknown group, ``FailedPrecondition`` naming the ranks that must be started first, or started again
        because an earlier change made them leave."""
        if size < 1:
            raise InvalidArgument("data_parallel_size must be at least 1", "data_parallel_size")
        group = self._find(name)
        ranks = {member.identity.data_parallel_rank for member in group.members.values()}
        if missing := ", ".join(map(str, sorted(set(range(size)) - ranks))):
            raise FailedPrecondition(
                f"ranks {missing} of data-parallel group {name!r} have not joined; start them first"
            )
        leaving = sorted(rank for member in group.members.values() if member.leaves and (rank := _rank(member)) < size)
        if leaving:
            raise FailedPrecondition(
                f"ranks {', '.join(map(str, leaving))} of data-parallel group {name!r} leave it by an earlier change "
                "of its size; stop them and start them again first"
            )
        for member in group.members.values():
            member.leaves = _rank(member) >= size
        return [(engine, EngineCommand(data_parallel_size=size)) for engine in group.members]

    async def wait_resized(self, name: str, size: int) -> None:
        """Wait until all ranks of a group have a size, and those beyond it have left. Raises ``DeadlineExceeded``, and
        ``NotFound`` if the whole group is lost."""
        try:
            async with asyncio.timeout(SCALE_SECONDS):
                while True:
                    group = self._find(name)
                    group.changed.clear()
                    ranks = {member.identity.data_parallel_rank: member.size for member in group.members.values()}
                    if all(known == (size if rank < size else 0) for rank, known in ranks.items()):
                        return
                    await group.changed.wait()
        except TimeoutError:
            known = ", ".join(f"rank {rank}: {size}" for rank, size in sorted(ranks.items()))
            raise DeadlineExceeded(
                f"data-parallel group {name!r} has not agreed on {size} ranks within {SCALE_SECONDS:g} s ({known})"
            ) from None

    def _find(self, name: str) -> _Group:
        if (group := self._groups.get(name)) is None:
            raise NotFound(f"No rank of data-parallel group {name!r} has joined.")
        return group


def _rank(member: _Member) -> int:
    return member.identity.data_parallel_rank
