"""Loads, forgets and pins LoRA adapters of an engine."""

import logging
from collections.abc import Awaitable, Sequence
from pathlib import Path

import msgspec

from tokenloom.engine_core.data.lora import LoraAnswer, LoraErrorKind, LoraState
from tokenloom.request.errors import FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted, TokenloomError
from tokenloom.request.wire_errors import of_exception
from tokenloom.v1 import coordinator_pb2, engine_pb2, types_pb2

from ..core.core_link import CoreLink
from ..records.load import LoadTracker

log = logging.getLogger(__name__)

_ERRORS: dict[LoraErrorKind, type[TokenloomError]] = {
    LoraErrorKind.INVALID: InvalidArgument,
    LoraErrorKind.CONFLICT: FailedPrecondition,
    LoraErrorKind.FULL: ResourceExhausted,
    LoraErrorKind.NOT_FOUND: NotFound,
}


class Loras:
    """Passes operations on adapters to the core, and what is loaded to the next report.

    Every method raises ``FailedPrecondition`` without --enable-lora, ``Unavailable`` if the core is dead, and what
    ``EngineAdmin`` documents.
    """

    def __init__(self, core: CoreLink, load: LoadTracker, *, are_enabled: bool) -> None:
        self._core = core
        self._load = load
        self._are_enabled = are_enabled

    async def load(self, name: str, path: str, digest: bytes, *, in_place: bool) -> LoraState:
        """Load the adapter in a directory of this host; return its state."""
        if not Path(path).is_absolute():
            raise InvalidArgument("path must be the absolute path of a directory on this host", "path")
        loaded = await self._call("load_lora", name, path, digest, in_place)
        return next(each for each in loaded if each.name == name)

    async def unload(self, name: str) -> None:
        """Forget an adapter."""
        await self._call("unload_lora", name)

    async def pin(self, name: str, *, pinned: bool) -> None:
        """Keep an adapter in a slot, or end that."""
        await self._call("pin_lora", name, pinned)

    async def list(self) -> Sequence[LoraState]:
        """Return the adapters that are loaded, by name."""
        return await self._call("list_loras")

    async def apply(self, changes: coordinator_pb2.AdapterChanges) -> None:
        """Do what the coordinator asks for, as far as possible. The next report names the result."""
        # Unloading comes first: an adapter that was replaced is in both lists, and its name is taken until the old one
        # is gone.
        for name in changes.unload:
            await self._attempt(self.unload(name), f"unload {name}")
        for each in changes.load:
            await self._attempt(self.load(each.name, each.path, each.digest, in_place=False), f"load {each.name}")
            if each.pinned:
                await self._attempt(self.pin(each.name, pinned=True), f"pin {each.name}")
        self._load.changed.set()

    async def _attempt(self, call: Awaitable[object], what: str) -> None:
        try:
            await call
        except Exception as error:  # of any kind: an adapter must not end the engine
            log.warning("cannot %s for the coordinator: %s", what, of_exception(error).message)

    async def _call(self, method: str, *args: object) -> Sequence[LoraState]:
        if not self._are_enabled:
            raise FailedPrecondition("LoRA adapters are off; start the engine with --enable-lora")
        answer = msgspec.convert(await self._core.call(method, *args), LoraAnswer)
        self._load.set_loras(answer.adapters)
        if answer.error:
            raise _ERRORS[answer.kind](answer.error)
        return answer.adapters


def to_adapter(state: LoraState) -> types_pb2.Adapter:
    """Return an adapter for the mesh."""
    return types_pb2.Adapter(digest=state.digest, name=state.name, pinned=state.pinned, path=state.path)


def to_state(state: LoraState) -> engine_pb2.LoraState:
    """Return the state of an adapter for ``EngineAdmin``."""
    return engine_pb2.LoraState(
        adapter=to_adapter(state),
        rank=state.rank,
        in_slot=state.in_slot,
        requests=state.num_waiting + state.num_running,
    )
