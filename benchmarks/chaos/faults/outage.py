"""Takes all engines of a mesh away at once and lets them come back later."""

import asyncio
import os
import signal

from tokenloom.supervisor.mesh import Mesh

from . import processes
from .fault import Fault, Injection
from .injector import RETURN_SECONDS

_POLL_SECONDS = 0.01
_MODULE = "tokenloom.services.engine"


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


def _engine_processes() -> list[int]:
    """Return the engines' own processes, those that are about to become one included."""
    return [
        pid
        for pid in processes.children(os.getpid())
        if processes.state(pid) is not None and _MODULE in processes.command(pid)
    ]
