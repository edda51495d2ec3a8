"""Loads, unloads and pins LoRA adapters on all engines of a mesh, or on none."""

import asyncio
import logging
from collections.abc import Mapping
from typing import TypeVar

from tokenloom.request import errors
from tokenloom.v1 import coordinator_pb2, types_pb2
from tokenloom.v1 import engine_pb2 as pb

from ..records.model_names import LISTING
from .engine_calls import Ask, EngineCalls, alive, checked
from .mesh_view import MeshView

log = logging.getLogger(__name__)

SEEN_SECONDS = 5.0
"""How long an operator's call waits at most until this gateway's requests can name what was loaded."""

T = TypeVar("T")


class MeshAdapters:
    """Changes the adapters of one mesh, one change after the other.

    The coordinator keeps what was done everywhere, and brings engines that join later to the same state. An engine that
    cannot load adapters takes no part: requests with adapters pass it over.
    """

    def __init__(self, mesh: MeshView, calls: EngineCalls) -> None:
        self._mesh = mesh
        self._calls = calls
        self._turn = asyncio.Lock()

    async def load(self, name: str, path: str, *, in_place: bool) -> dict[str, str]:
        """Load an adapter on all engines. Returns for each why it does not have it, because it ended meanwhile: it
        loads the adapter when it joins again; empty: it has it.

        ``in_place``: replace another adapter of this name. Raises the first other error of an engine after the others
        have forgotten the adapter again, or have the former one back.
        """
        async with self._turn:
            old = self._mesh.adapters.get(name)
            if old is not None and not in_place:
                message = f"the LoRA adapter {name!r} is loaded already; set load_inplace to replace it"
                raise errors.InvalidArgument(message, "lora_name")
            request = pb.LoadLoraRequest(name=name, path=path, in_place=in_place)
            try:
                answers = await self._ask(lambda stub: stub.LoadLora(request))
                done, causes = _without_lost(answers)
                digest = _agreed(done)
                pinned = old is not None and old.pinned
                # Recorded once all engines have it, and not before: the coordinator brings engines that join later to
                # what is recorded, and gateways let requests name it.
                await self._record(types_pb2.Adapter(name=name, digest=digest, path=path, pinned=pinned))
            except BaseException:  # a gateway that stops included: all engines shall have the same
                await self._restore(name, old)
                raise
            return causes

    async def unload(self, name: str) -> dict[str, str]:
        """Unload an adapter everywhere; returns as :meth:`load`. Requests that name it are refused from the beginning
        on.

        An engine that fails keeps it in memory only: no request reaches it there. Raises ``NotFound`` if no engine had
        it, otherwise the first engine's error.
        """
        async with self._turn:
            was_known = name in self._mesh.adapters
            # Recorded first, the other way round than loading: no gateway lets a request name it any more, so it does
            # no harm that an engine which fails keeps it.
            await self._record(types_pb2.Adapter(name=name), unloaded=True)
            answers = await self._ask(lambda stub: stub.UnloadLora(pb.UnloadLoraRequest(name=name)))
            # Again: a coordinator that was restarted meanwhile took the adapter over from the engines that had it.
            await self._record(types_pb2.Adapter(name=name), unloaded=True)
            had = {engine: each for engine, each in answers.items() if not isinstance(each, errors.NotFound)}
            if not (had or was_known):
                raise errors.NotFound(f"no LoRA adapter {name[:128]!r} is loaded; {LISTING} those that are")
            lost = _lost(had)
            checked({engine: each for engine, each in had.items() if engine not in lost})
            return dict.fromkeys(answers, "") | lost

    async def pin(self, name: str, *, pinned: bool) -> dict[str, str]:
        """Keep an adapter on the device of all engines, or end that. Returns and raises as :meth:`load`."""
        async with self._turn:
            if (adapter := self._mesh.adapters.get(name)) is None:
                raise errors.NotFound(f"no LoRA adapter {name[:128]!r} is loaded; {LISTING} those that are")
            try:
                _, causes = _without_lost(await self._pin(name, pinned))
                changed = types_pb2.Adapter()
                changed.CopyFrom(adapter)
                changed.pinned = pinned
                await self._record(changed)
            except BaseException:  # as in :meth:`load`
                await self._pin(name, adapter.pinned)
                raise
            return causes

    async def states(self) -> dict[str, pb.ListLorasResponse]:
        """Return what each engine has loaded, by its name. Raises the first engine's error."""
        return checked(await self._ask(lambda stub: stub.ListLoras(pb.ListLorasRequest())))

    async def _pin(self, name: str, pinned: bool) -> dict[str, pb.PinLoraResponse | errors.TokenloomError]:
        request = pb.PinLoraRequest(name=name, pinned=pinned)
        return await self._ask(lambda stub: stub.PinLora(request))

    async def _ask(self, send: "Ask[T]") -> dict[str, T | errors.TokenloomError]:
        """Ask the engines that can load adapters. Raises ``FailedPrecondition`` if none can."""
        engines = [engine for engine in alive(self._mesh) if engine.limits.max_lora_rank]
        if not engines and alive(self._mesh):
            raise errors.FailedPrecondition("no engine can load LoRA adapters; start the engines with --enable-lora")
        return await self._calls.ask({engine.engine_id: engine.address for engine in engines}, send)

    async def _restore(self, name: str, old: types_pb2.Adapter | None) -> None:
        """Bring all engines back to what they had. One that fails is corrected when it joins the coordinator again."""
        if old is None:
            answers: Mapping[str, object] = await self._ask(
                lambda stub: stub.UnloadLora(pb.UnloadLoraRequest(name=name))
            )
        else:
            request = pb.LoadLoraRequest(name=name, path=old.path, digest=old.digest, in_place=True)
            answers = await self._ask(lambda stub: stub.LoadLora(request))
        for answer in answers.values():
            if isinstance(answer, errors.TokenloomError) and not isinstance(answer, errors.NotFound):
                log.warning("adapter %s: the change could not be undone: %s", name, answer.message)

    async def _record(self, adapter: types_pb2.Adapter, *, unloaded: bool = False) -> None:
        """Record at the coordinator what is true everywhere, and wait until this gateway's requests follow it."""
        request = coordinator_pb2.SetAdapterRequest(adapter=adapter, unloaded=unloaded)
        await self._calls.ask_coordinator(
            self._mesh, lambda stub, left: stub.SetAdapter(request, timeout=min(left, SEEN_SECONDS))
        )
        try:
            async with asyncio.timeout(SEEN_SECONDS):
                await self._mesh.wait_adapter(adapter)
        except TimeoutError:
            log.warning("adapter %s: the coordinator's snapshot does not show the change yet", adapter.name)


def _without_lost(answers: Mapping[str, T | errors.TokenloomError]) -> tuple[dict[str, T], dict[str, str]]:
    """Return the answers, and for each engine why it gave none; empty: it did. Raises the first error of an engine that
    lives, and that of a lost one if no other has answered."""
    lost = _lost(answers)
    done = checked({name: each for name, each in answers.items() if name not in lost} or answers)
    return done, dict.fromkeys(answers, "") | lost


def _lost(answers: Mapping[str, object]) -> dict[str, str]:
    """Return the engines that were lost, and how."""
    return {name: each.message for name, each in answers.items() if isinstance(each, errors.Unavailable)}


def _agreed(answers: Mapping[str, pb.LoadLoraResponse]) -> bytes:
    """Return the digest that all engines report. Raises ``FailedPrecondition`` if their files differ."""
    digests = {answer.adapter.digest for answer in answers.values()}
    if len(digests) > 1:
        raise errors.FailedPrecondition(f"the adapter's files differ between {' and '.join(answers)}")
    return digests.pop()
