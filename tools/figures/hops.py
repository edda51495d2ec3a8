"""Counts the hops of one request from what the processes of a mesh recorded."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

WORKER = "gpu_worker/"
"""The folder of the worker: the road of a request ends there."""
FORWARD = ("_forward", "forward")
"""Names of functions that run the model; the first call of one in the worker's folder is the forward pass."""
EXECUTE = ("execute_model",)
"""The worker's method that the engine core hands a step to."""
STEP = "EngineCore.step"
"""The method that plans and runs one step of the engine."""


@dataclass(frozen=True, order=True)
class Function:
    """Names a function by its file in the checkout, its qualified name and its first line."""

    file: str
    name: str
    line: int

    @property
    def bare_name(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Call:
    """Records one call."""

    moment: int
    """When, in nanoseconds of CLOCK_MONOTONIC."""
    process: str
    function: Function
    resumed: bool
    """Whether a paused generator or coroutine continued, rather than a function being called."""


@dataclass(frozen=True)
class Share:
    """Counts calls and what they reached: in one process, or in several together."""

    calls: int
    """Calls as a profile hook sees them: functions that are called and coroutines that continue."""
    resumed: int
    """How many of `calls` are coroutines that continue after they waited."""
    functions: int
    """Distinct pairs of file and bare name: the `__init__` methods of two classes in one file are one."""
    files: int
    """Distinct ones."""


@dataclass(frozen=True)
class Hops:
    """Describes the road of one request."""

    forward: str
    """The function at the end of the road."""
    total: Share
    """The whole road; a function or file that several processes reach counts once."""
    processes: dict[str, Share]
    """The processes that the request reached, by calls, most first."""
    until_execute: Share
    """The road until the worker is handed the step."""
    step: Share
    """From the engine's step until the worker is handed it, both calls included; in the core's process alone."""


def cut(calls: Iterable[Call], sent: int) -> list[Call]:
    """Merge the calls of all processes and keep those between the moment ``sent`` and the first forward pass after it.

    Raises ``ValueError`` when no forward pass follows.
    """
    road = [call for call in sorted(calls, key=lambda call: call.moment) if call.moment >= sent]
    end = _first(road, FORWARD)
    if end is None:
        raise ValueError("no forward pass of the worker was recorded after the request was sent")
    return road[: end + 1]


def without_strays(roads: Sequence[Sequence[Call]]) -> list[list[Call]]:
    """Leave out of each road the calls of a function beyond the number that three quarters of the roads have.

    Such calls are those of periodic work that falls into a road: the coordinator publishes ten times a second, and on a
    slow machine a road takes long enough for clocks and keep-alives too.
    """
    counts = [Counter(call.function for call in road) for road in roads]
    usual = {
        function: sorted(count[function] for count in counts)[len(counts) // 4] for function in set().union(*counts)
    }
    return [_at_most(usual, road) for road in roads]


def _at_most(counts: Mapping[Function, int], road: Sequence[Call]) -> list[Call]:
    """Return a road with the first ``counts`` calls of each function."""
    seen: Counter[Function] = Counter()
    kept = []
    for call in road:
        seen[call.function] += 1
        if seen[call.function] <= counts[call.function]:
            kept.append(call)
    return kept


def count_hops(road: Sequence[Call]) -> Hops:
    """Count the calls of a road that :func:`cut` returned."""
    by_process: dict[str, list[Call]] = {}
    for call in road:
        by_process.setdefault(call.process, []).append(call)
    shares = {process: _share(calls) for process, calls in by_process.items()}
    return Hops(
        forward=f"{road[-1].function.file}:{road[-1].function.name}",
        total=_share(road),
        processes=dict(sorted(shares.items(), key=lambda item: (-item[1].calls, item[0]))),
        until_execute=_share(_until_execute(road)),
        step=_share(_step(by_process[road[-1].process])),
    )


def typical(roads: Sequence[Hops]) -> Hops:
    """Return the road with the median number of calls.

    Roads differ a little: processes that run at the same time as the last part of the road get further or less far
    before the forward pass begins.
    """
    return sorted(roads, key=lambda hops: hops.total.calls)[(len(roads) - 1) // 2]


def read_calls(process: str, dump: Mapping[str, list[list[object]]], files: Mapping[str, str]) -> list[Call]:
    """Return the calls of one process's dump.

    Args:
        process: The name to give the process.
        dump: What the process wrote: ``functions`` and ``calls``.
        files: The path in the checkout of each file name that counts; calls into other files are left out.
    """
    functions = [
        Function(files[str(file)], str(name), int(str(line))) if str(file) in files else None
        for file, name, line in dump["functions"]
    ]
    calls = []
    for moment, index, resumed in dump["calls"]:
        function = functions[int(str(index))]
        if function is not None:
            calls.append(Call(int(str(moment)), process, function, bool(resumed)))
    return calls


def process_name(command: Sequence[str]) -> str:
    """Name a process after the module that it runs: ``python -m tokenloom.services.gateway …`` is ``gateway``."""
    if "-m" in command[:-1]:
        module = command[command.index("-m") + 1]
        return module.removeprefix("tokenloom.").removeprefix("services.")
    return " ".join(command[:3])


def _share(calls: Sequence[Call]) -> Share:
    return Share(
        calls=len(calls),
        resumed=sum(call.resumed for call in calls),
        functions=len({(call.function.file, call.function.bare_name) for call in calls}),
        files=len({call.function.file for call in calls}),
    )


def _until_execute(calls: Sequence[Call]) -> Sequence[Call]:
    end = _first(calls, EXECUTE)
    return [] if end is None else calls[: end + 1]


def _step(calls: Sequence[Call]) -> Sequence[Call]:
    """Cut one process's calls down to the last step before the worker is handed it; empty where either is missing."""
    handed = _until_execute(calls)
    starts = [index for index, call in enumerate(handed) if call.function.name == STEP]
    return handed[starts[-1] :] if starts else []


def _first(calls: Sequence[Call], names: Sequence[str]) -> int | None:
    """Return the index of the first call of a function in the worker's folder that has one of these bare names."""
    for index, call in enumerate(calls):
        if call.function.file.startswith(WORKER) and call.function.bare_name in names:
            return index
    return None
