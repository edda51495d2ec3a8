"""Starts the first process of each part as a fork of this one; later processes of a part are started anew."""

import os
from collections.abc import Sequence
from importlib import import_module

from tokenloom.services.runtime.host.uncollected_imports import uncollected_imports

from .forked_process import PYTHON_MODULE, can_fork
from .output import LineCopier
from .part_spec import PartSpec
from .process import Process

_SHARED = "tokenloom.services.runtime.host.service"
"""Every part imports it; it is most of what a coordinator imports."""


def fork_first(specs: Sequence[PartSpec], output: LineCopier) -> dict[str, Process]:
    """Return a process for each part by the part's name, without those that have to be started in the ordinary way."""
    if not can_fork():
        return {}
    # Imported here once: of five processes each spent a quarter of a second of CPU on it. A second start of the demo
    # mesh took 4.2 instead of 7.7 s of CPU until the first chat was answered.
    with uncollected_imports():
        import_module(_SHARED)
    processes: dict[str, Process] = {}
    pipes: dict[str, int] = {}
    # Engines take longest to start.
    for spec in sorted(specs, key=lambda spec: spec.service != "engine"):
        if spec.command[: len(PYTHON_MODULE)] == PYTHON_MODULE:
            _fork(spec, processes, pipes)
    for name, pipe in pipes.items():  # last, because it starts threads
        output.follow(name, pipe)
    return processes


def _fork(spec: PartSpec, processes: dict[str, Process], pipes: dict[str, int]) -> None:
    read_end, write_end = os.pipe()
    try:
        processes[spec.name] = Process.fork(spec, write_end)
        pipes[spec.name] = read_end
    except OSError:  # such as a limit of processes; the ordinary start reports it
        os.close(read_end)
    finally:
        os.close(write_end)
