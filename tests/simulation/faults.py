"""Makes things go wrong, and right again."""

import asyncio
from collections.abc import Awaitable, Callable

from .mesh import Mesh, SimulatedEngine
from .parts import Part
from .plan import Fault
from .tokenizers import SimulatedTokenizer

SLOW_SECONDS = 0.15
"""How much longer every write from and to a slow part takes."""
LOSS_SECONDS = 1.0
"""Within so many seconds a coordinator ends that has lost its lease."""
RESTART_SECONDS = 0.3
_SPARED = ("engine", "output_processor", "encoder")


async def inject(mesh: Mesh, fault: Fault, happened: list[Fault]) -> None:
    """Cause a fault when it is due, undo it, and note that it happened. A fault whose part another fault has already,
    or that would take the last part of its kind, does not happen."""
    await asyncio.sleep(fault.at)
    part = mesh.parts[fault.target]
    spares = mesh.plan.spares and not mesh.plan.stutters
    if part.is_faulty or (spares and fault.kind in _OF_PARTS and _is_last(mesh, part)):
        return
    happened.append(fault)
    if fault.kind not in _OF_PARTS:
        await _OF_LINKS[fault.kind](mesh, fault)
        return
    part.is_faulty = True
    await _OF_PARTS[fault.kind](part, fault.lasts)
    part.is_faulty = False


def _is_last(mesh: Mesh, part: Part) -> bool:
    """Return whether no other part of its kind is well."""
    others = [other for other in mesh.of_kind(part.kind) if other is not part]
    return part.kind in _SPARED and all(other.is_faulty for other in others)


async def _crash(part: Part, lasts: float) -> None:
    part.kill()
    await asyncio.sleep(lasts)
    await part.start()


async def _drain(part: Part, lasts: float) -> None:
    await part.drain()
    await asyncio.sleep(lasts)
    await part.start()


async def _freeze(part: Part, lasts: float) -> None:
    """The part is stopped for a while. A coordinator may lose its lease, and ends because of that."""
    part.expects_failure = part.may_stand_by
    part.freeze()
    await asyncio.sleep(lasts)
    part.thaw()
    if part.may_stand_by:
        await asyncio.sleep(LOSS_SECONDS)
        if part.process is None:
            await part.start()
        part.expects_failure = False


async def _core_crash(part: Part, lasts: float) -> None:
    """The core dies, and its front ends because of that."""
    assert isinstance(part.service, SimulatedEngine)
    part.expects_failure = True
    part.service.core.fail("the process of the core was killed")
    await part.ended()
    await asyncio.sleep(lasts)
    await part.start()


async def _hang(part: Part, lasts: float) -> None:
    """A step hangs. The engine may end because of that."""
    assert isinstance(part.service, SimulatedEngine)
    part.expects_failure = True
    core = part.service.core
    core.is_hung = True
    await asyncio.sleep(lasts)
    core.is_hung = False
    if part.process is None:
        await part.start()
    part.expects_failure = False


async def _helper_crash(part: Part, lasts: float) -> None:
    """The processes that render for a tokenizer die, again and again."""
    assert isinstance(part.service, SimulatedTokenizer)
    for _ in range(2):
        part.service.helpers.crash()
        await asyncio.sleep(lasts / 2)


async def _helper_stop(part: Part, lasts: float) -> None:
    assert isinstance(part.service, SimulatedTokenizer)
    part.service.helpers.stop()


async def _no_helper(part: Part, lasts: float) -> None:
    """The processes that render die, and none starts in their place for a while."""
    assert isinstance(part.service, SimulatedTokenizer)
    helpers = part.service.helpers
    helpers.may_start = False
    helpers.crash()
    await asyncio.sleep(lasts)
    helpers.may_start = True


async def _compiler_crash(part: Part, lasts: float) -> None:
    """The processes that compile for an engine die, idle or at their next grammar, again and again."""
    assert isinstance(part.service, SimulatedEngine)
    for _ in range(2):
        part.service.core.compilers.crash()
        part.service.core.compilers.num_dying = 1
        await asyncio.sleep(lasts / 2)


async def _no_compiler(part: Part, lasts: float) -> None:
    """The processes that compile die, and none starts in their place for a while."""
    assert isinstance(part.service, SimulatedEngine)
    compilers = part.service.core.compilers
    compilers.may_start = False
    compilers.crash()
    await asyncio.sleep(lasts)
    compilers.may_start = True


async def _lie(part: Part, lasts: float) -> None:
    """What the process sends is wrong at times, until an operator ends it. It may find out itself that it is not like
    the others, and end because of that."""
    part.expects_failure = True
    part.lie()
    await asyncio.sleep(lasts)
    part.kill()
    await asyncio.sleep(RESTART_SECONDS)
    await part.start()


async def _slow(mesh: Mesh, fault: Fault) -> None:
    mesh.network.slow_down(fault.target, SLOW_SECONDS)
    await asyncio.sleep(fault.lasts)
    mesh.network.slow_down(fault.target, 0.0)


async def _cut(mesh: Mesh, fault: Fault) -> None:
    network, one, other = mesh.network, fault.target, fault.other
    network.cut(one, other)
    network.cut(other, one)
    await asyncio.sleep(fault.lasts)
    network.heal(one, other)
    network.heal(other, one)


async def _one_way_cut(mesh: Mesh, fault: Fault) -> None:
    mesh.network.cut(fault.target, fault.other)
    await asyncio.sleep(fault.lasts)
    mesh.network.heal(fault.target, fault.other)


async def _reset(mesh: Mesh, fault: Fault) -> None:
    mesh.network.reset(fault.target, fault.other)


_OF_PARTS: dict[str, Callable[[Part, float], Awaitable[None]]] = {
    "crash": _crash,
    "drain": _drain,
    "freeze": _freeze,
    "core_crash": _core_crash,
    "hang": _hang,
}
_OF_LINKS: dict[str, Callable[[Mesh, Fault], Awaitable[None]]] = {
    "slow": _slow,
    "cut": _cut,
    "one_way_cut": _one_way_cut,
    "reset": _reset,
}
KINDS = (*_OF_PARTS, *_OF_LINKS)
"""Every kind of fault, but those of helpers, and lies."""
_OF_PARTS |= {
    "helper_crash": _helper_crash,
    "helper_stop": _helper_stop,
    "no_helper": _no_helper,
    "compiler_crash": _compiler_crash,
    "no_compiler": _no_compiler,
    "lie": _lie,
}
