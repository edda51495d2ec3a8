"""Takes all engines of a mesh away at once, or the whole mesh, and lets them come back later."""

import asyncio
import os
import random
import signal

from tokenloom.supervisor.mesh import Mesh

from . import processes
from .fault import Fault, Injection
from .injector import RETURN_SECONDS

_POLL_SECONDS = 0.01
_APART_SECONDS = 0.5
"""Within this time the processes of a host that was paused run again, one after the other."""
_SERVICES = "tokenloom.services."
_MODULE = _SERVICES + "engine"


async def engines_lost(mesh: Mesh, fault: Fault, now: float) -> Injection:
    """Kill every engine, and stop each process that the supervisor starts in its place until the fault is over.

    Return once every engine serves again. ``now``: seconds since the beginning of the faults.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    killed = _engine_processes()
    for pid in killed:
        processes.send_signal(pid, signal.SIGKILL)
    injection = Injection(fault, "all engines", killed[0] if killed else 0, now)
    gone = await processes.until(lambda: all(processes.state(pid) is None for pid in killed), 2.0)
    held: set[int] = set()
    while loop.time() < began + fault.seconds:
        for pid in set(_engine_processes()) - held - set(killed):
            if processes.send_signal(pid, signal.SIGSTOP):
                held.add(pid)
        await asyncio.sleep(_POLL_SECONDS)
    stayed = [pid for pid in held if processes.state(pid) == "T"]
    for pid in held:
        processes.send_signal(pid, signal.SIGCONT)
    injection.ended = now + loop.time() - began
    engines = [part for part in mesh.parts if part.spec.service == "engine"]
    if killed and gone and len(stayed) == len(engines):
        injection.effect = f"{len(killed)} processes were gone, {len(stayed)} successors waited {fault.seconds:g} s"
    if await processes.until(lambda: all(part.serving.is_set() for part in engines), RETURN_SECONDS):
        injection.served_again = loop.time() - began
    return injection


async def host_paused(mesh: Mesh, fault: Fault, now: float, rng: random.Random) -> Injection:
    """Stop every process of the mesh, as a machine that is moved or starved does, and let them run again one after the
    other, in any order. Each sees some of its peers silent; none may take another one's silence for its end.

    Return once every part serves. ``now``: seconds since the beginning of the faults.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    stopped = [pid for pid in _mesh_processes() if processes.send_signal(pid, signal.SIGSTOP)]
    injection = Injection(fault, "all parts", 0, now)
    try:
        await asyncio.sleep(fault.seconds)
        stayed = [pid for pid in stopped if processes.state(pid) in ("T", None)]
        rng.shuffle(stopped)
        for pid in stopped:
            processes.send_signal(pid, signal.SIGCONT)
            await asyncio.sleep(rng.random() * 2 * _APART_SECONDS / len(stopped))
    finally:
        for pid in stopped:
            processes.send_signal(pid, signal.SIGCONT)
    injection.ended = now + loop.time() - began
    if stopped and len(stayed) == len(stopped):
        injection.effect = f"{len(stopped)} processes were stopped for {fault.seconds:.1f} s"
    if await processes.until(lambda: all(part.serving.is_set() for part in mesh.parts), RETURN_SECONDS):
        injection.served_again = loop.time() - began
    return injection


def _mesh_processes() -> list[int]:
    """Return every process that runs a part or was started by one; not the proxies that stand for the network."""
    return [
        pid
        for part in processes.children(os.getpid())
        if any(argument.startswith(_SERVICES) for argument in processes.command(part))
        for pid in (part, *processes.descendants(part))
        if processes.state(pid) is not None
    ]


def _engine_processes() -> list[int]:
    """Return the engines' own processes, those that are about to become one included."""
    return [
        pid
        for pid in processes.children(os.getpid())
        if processes.state(pid) is not None and _MODULE in processes.command(pid)
    ]
