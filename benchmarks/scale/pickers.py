"""Asks for picks in a process of its own, so that their latencies contain no other work of the benchmark."""

import asyncio
import functools
import gc
import sys
import time
from collections.abc import Sequence

import uvloop

from tokenloom.v1.coordinator_pb2 import PickBatch

from .child import answer
from .patient_channels import PatientChannels
from .pick_load import flood, offer, requests

_NUM_REQUESTS = 4000


@functools.cache
def _asked(num_hashes: int) -> Sequence[bytes]:
    """Return messages with one pick each. They stay, and the garbage collector need not walk them."""
    asked = [PickBatch(pick=[each]).SerializeToString() for each in requests(_NUM_REQUESTS, num_hashes)]
    gc.collect()
    gc.freeze()
    return asked


async def obey(coordinator: str, order: str) -> dict[str, float]:
    """Carry out ``offer RATE HASHES SECONDS`` or ``flood RATE HASHES SECONDS``, which needs no rate. Returns the picks
    that were answered, the seconds until all were, and percentiles of their latencies in seconds; or how many were
    answered in a second."""
    kind, rate, num_hashes, seconds = order.split()
    asked = _asked(int(num_hashes))
    async with PatientChannels().open(coordinator, "coordinator") as channel:
        if kind == "flood":
            return {"picks_per_second": await flood(channel, asked, float(seconds))}
        began = time.monotonic()
        latencies = sorted(await offer(channel, asked, int(rate), float(seconds)))
        elapsed, count = time.monotonic() - began, len(latencies)
    return {"picks": count, "seconds": elapsed, "p50": latencies[count // 2], "p99": latencies[count * 99 // 100]}


async def run(coordinator: str) -> None:
    """Obey orders until cancelled."""
    loop = asyncio.get_running_loop()
    answer(lambda order: asyncio.run_coroutine_threadsafe(obey(coordinator, order), loop).result())
    await loop.create_future()


if __name__ == "__main__":
    uvloop.run(run(sys.argv[1]))
