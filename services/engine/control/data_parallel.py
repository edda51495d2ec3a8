"""The engine's place in a data-parallel group: the waves that it begins and the size of its group."""

import logging
from collections.abc import Awaitable, Callable

from tokenloom.engine_core.data.errors import EngineDeadError, NotSentError
from tokenloom.engine_core.data.messages import GroupState
from tokenloom.request.errors import FailedPrecondition, InvalidArgument

from ..core.core_link import CoreLink
from ..records.load import LoadTracker

log = logging.getLogger(__name__)


class DataParallel:
    """Passes starts of waves and changes of size to the core.

    The ranks of a model without experts compute on their own: such an engine only notes the size of its group.
    """

    def __init__(self, core: CoreLink, load: LoadTracker, rank: int, size: int) -> None:
        self._core = core
        self._load = load
        self._rank = rank
        self._has_waves = core.ready.has_waves
        self._wanted = 0  # the size of the latest change; 0: there was none
        self._has_left = False
        load.group = GroupState(0, False, None, None) if self._has_waves else GroupState(size, True, None, None)

    @property
    def is_removed(self) -> bool:
        """Whether the group goes on without this engine."""
        return not self._state.is_member and self._state.size > 0

    async def wait_member(self) -> None:
        """Wait until the engine is a member of its group: the first ranks become members together, a later one when the
        group is resized."""
        if not self._state.is_member:
            log.info("rank %d waits for its data-parallel group", self._rank)
            await self._load.until(lambda: self._state.is_member)

    async def start_wave(self, wave: int) -> None:
        """Begin a wave that another rank has begun."""
        try:
            await self._core.client.start_wave(wave)
        except (EngineDeadError, NotSentError) as error:
            log.debug("wave %d is not started: %s", wave, error)

    async def resize(self, size: int, leave: Callable[[], Awaitable[None]]) -> None:
        """Agree with the other ranks on a group of ``size`` ranks, and return when it has them. A rank that leaves ends
        its requests first, and computes nothing any more; it stays up until it is stopped.

        ``leave`` ends the live requests, which continue elsewhere, and returns when none is left.

        Raises ``InvalidArgument`` for a size of 0, ``FailedPrecondition`` if the core refuses, if an earlier change
        made this rank leave, or if a later change overtakes this one.
        """
        if size < 1:
            raise InvalidArgument("data_parallel_size must be at least 1", "data_parallel_size")
        leaves = self._rank >= size
        # Its requests go on elsewhere, and it refuses new ones for good: as a member it would serve nothing.
        if self._has_left and not leaves:
            raise FailedPrecondition(
                f"rank {self._rank} has left its data-parallel group, or is leaving it; stop it and start it again"
            )
        self._wanted, self._has_left = size, leaves
        log.info("data-parallel group: %d ranks wanted; this one is %s", size, "removing" if leaves else "existing")
        if leaves:
            await leave()
        if not self._has_waves:
            self._load.set_group(GroupState(self._wanted, not leaves, None, None))
            return
        if not self._state.is_member:
            return  # a newcomer: the members admit it
        await self._core.call("resize_group", size)
        await self._load.until(lambda: self._state.size == size or not self._state.is_member or self._wanted != size)
        if self._state.is_member and self._state.size != size:
            raise FailedPrecondition(
                f"another change of the data-parallel group, to {self._wanted} ranks, overtook this"
            )
        if leaves:
            await self._core.client.close()  # it would keep its memory
        log.info("data-parallel group: %s", "shutdown complete" if leaves else "reconfigure finished")

    @property
    def _state(self) -> GroupState:
        assert self._load.group is not None
        return self._load.group
