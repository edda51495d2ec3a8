"""Sends prompts at their times and collects the outcomes."""

import asyncio
import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

from .datasets import Prompt
from .events import Outcome
from .http_client import Client

Done = Callable[[Outcome], None]


class Pace(Struct, frozen=True):
    """Says when requests begin."""

    request_rate: Annotated[Annotated[float, Meta(gt=0)], "Requests that arrive per second; inf: all at once."] = (
        math.inf
    )
    burstiness: Annotated[Annotated[float, Meta(gt=0)], "1: Poisson arrivals; smaller: burstier."] = 1.0
    """The shape of the gamma distribution of intervals."""
    max_concurrency: Annotated[Annotated[int, Meta(ge=1)] | None, "Most requests in flight."] = None
    """A request whose time has come waits for its turn, and its clock starts then."""
    ramp_up: float = 0.0
    """Seconds over which the first `max_concurrency` requests begin when the rate is infinite."""
    seed: int = 0


@dataclass(frozen=True)
class LoadResult:
    """Holds all requests in the order of the prompts, and the seconds from the first start to the last end."""

    outcomes: list[Outcome]
    seconds: float


def arrival_times(count: int, pace: Pace, recorded: Sequence[float | None] = ()) -> list[float]:
    """Return the ascending seconds since the start at which the requests begin: those that were recorded, if all have
    such times."""
    if times := [at for at in recorded if at is not None]:
        return sorted(times) if len(times) == count else arrival_times(count, pace)
    if math.isinf(pace.request_rate):
        width = min(count, pace.max_concurrency or count)
        return [min(i / width, 1.0) * pace.ramp_up for i in range(count)]
    generator = random.Random(pace.seed)
    scale = 1 / (pace.request_rate * pace.burstiness)
    intervals = [generator.gammavariate(pace.burstiness, scale) for _ in range(count - 1)]
    return list(itertools.accumulate(intervals, initial=0.0))


async def run_load(client: Client, prompts: Sequence[Prompt], pace: Pace, on_done: Done | None = None) -> LoadResult:
    """Run all of them; ``on_done`` is called with each outcome as it arrives."""
    places = asyncio.Semaphore(pace.max_concurrency or len(prompts) or 1)
    started = time.perf_counter()

    async def one(prompt: Prompt) -> Outcome:
        try:
            outcome = await client.stream(prompt, started)
        finally:
            places.release()
        if on_done is not None:
            on_done(outcome)
        return outcome

    times = arrival_times(len(prompts), pace, [prompt.arrival for prompt in prompts])
    async with asyncio.TaskGroup() as group:
        tasks = []
        for prompt, arrival in zip(prompts, times, strict=True):
            wait = started + arrival - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            await places.acquire()
            tasks.append(group.create_task(one(prompt)))
    return LoadResult([task.result() for task in tasks], time.perf_counter() - started)
