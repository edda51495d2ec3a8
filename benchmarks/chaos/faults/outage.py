"""Takes all engines of a mesh away at once, or the whole mesh, and lets them come back later; or stops and continues
each of its processes by itself."""

import asyncio
import os
import random
import signal

from tokenloom.supervisor.mesh import Mesh

from . import processes
from .fault import Action, Fault, Injection, Kind
from .injector import RETURN_SECONDS, Injector

_POLL_SECONDS = 0.01
_APART_SECONDS = 0.5
"""Within this time the processes of a host that was paused run again, one after the other."""
_STOP_SECONDS = (1.0, 6.0)
_RUN_SECONDS = (0.2, 1.0)
"""Least and most seconds for which a process that stutters is stopped, and runs."""
_LOOK_SECONDS = 0.25
"""How often the processes are looked for that began meanwhile."""
VICTIMS = (None, *(Kind(name, name) for name in ("gateway", "output_processor", "coordinator")))
"""What is killed while the processes stutter, in turns; None: nothing."""
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


async def host_stutters(
    mesh: Mesh, fault: Fault, injector: Injector, rng: random.Random, victim: Kind | None
) -> Injection:
    """Stop and continue each process of the mesh by itself, at random, as on a machine with far too few processors:
    every part sees others silent, and links break in any combination, some of them several times.

    Return once every part serves. ``victim``: a part of this kind is killed in the middle, if one may be; None: none.
    """
    loop = asyncio.get_running_loop()
    began, injection = loop.time(), Injection(fault, "all parts", 0, injector.now)
    ends = began + fault.seconds
    counts: dict[int, int] = {}
    async with asyncio.TaskGroup() as group:
        while loop.time() < ends:
            for pid in set(_mesh_processes()) - set(counts):
                counts[pid] = 0
                group.create_task(_stutter(pid, ends, rng, counts))
            if victim is not None and loop.time() > began + fault.seconds / 2:
                kill = Fault(Action.KILL, victim, 0.0, rng.random())
                if injector.is_possible(kill):
                    await injector.inject(kill)
                    victim = None
            await asyncio.sleep(_LOOK_SECONDS)
    injection.ended = injector.now
    if counts and sum(map(bool, counts.values())) > len(counts) / 2:
        times = sum(counts.values())
        injection.effect = f"{len(counts)} processes were stopped {times} times within {fault.seconds:.1f} s"
    if await processes.until(lambda: all(part.serving.is_set() for part in mesh.parts), RETURN_SECONDS):
        injection.served_again = loop.time() - began
    return injection


async def _stutter(pid: int, ends: float, rng: random.Random, counts: dict[int, int]) -> None:
    """Stop and continue a process until ``ends``, and count in ``counts`` how often it was seen stopped."""
    loop = asyncio.get_running_loop()
    try:
        while (left := ends - loop.time()) > 0:
            await asyncio.sleep(min(rng.uniform(*_RUN_SECONDS), left))
            if not processes.send_signal(pid, signal.SIGSTOP):
                return
            await asyncio.sleep(min(rng.uniform(*_STOP_SECONDS), max(ends - loop.time(), 0.0)))
            counts[pid] += processes.state(pid) == "T"
            processes.send_signal(pid, signal.SIGCONT)
    finally:
        processes.send_signal(pid, signal.SIGCONT)


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
