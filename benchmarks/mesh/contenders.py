"""Runs servers side by side, and loads them in turns with the same prompts."""

import asyncio
import contextlib
import itertools
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from urllib.request import urlopen

import msgspec

from ..load.arrivals import Done, LoadResult
from ..load.datasets import Prompt
from .serve import ServeOptions, prompts_for, run_serve

_START_SECONDS = 300.0
_STOP_SECONDS = 40.0
_POLL_SECONDS = 0.2


class ServerBroke(Exception):
    """Raised when a server does not start; the message ends with its last output."""


@dataclass(frozen=True)
class Contender:
    """Describes one server of the comparison."""

    name: str
    command: tuple[str, ...]
    """The command that starts it in the foreground."""
    base_url: str


def serve_command(model: str, port: int, *flags: str) -> tuple[str, ...]:
    """Return the command ``tokenloom serve`` for this interpreter."""
    return (sys.executable, "-P", "-m", "tokenloom.cli.main", "serve", model, "--port", str(port), *flags)


async def compare(
    contenders: Sequence[Contender],
    options: ServeOptions,
    rounds: int,
    on_round: Callable[[str, int], Done],
) -> dict[str, list[LoadResult]]:
    """Start all servers, then load one after the other, `rounds` times, each with the same prompts in a round.

    Every round has its own prompts, and the order of the servers alternates.
    """
    results: defaultdict[str, list[LoadResult]] = defaultdict(list)
    async with contextlib.AsyncExitStack() as stack:
        for contender in contenders:
            await stack.enter_async_context(running(contender))
        for index in range(rounds):
            dataset = msgspec.structs.replace(options.dataset, seed=options.dataset.seed + index)
            prompts = prompts_for(msgspec.structs.replace(options, dataset=dataset))
            turn = itertools.islice(itertools.cycle(contenders), index % len(contenders), None)
            for contender in itertools.islice(turn, len(contenders)):
                run = await load(contender, options, prompts, on_round(contender.name, len(prompts)))
                results[contender.name].append(run)
    return dict(results)


@contextlib.asynccontextmanager
async def running(contender: Contender) -> AsyncIterator[None]:
    """Run the server during the block; it is ready at the beginning and has ended at the end."""
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *contender.command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
        )
        try:
            await _until_healthy(contender, process)
            yield
        except ServerBroke as error:
            log.seek(0)
            raise ServerBroke(f"{error}\n{log.read()[-3000:].decode(errors='replace')}") from None
        finally:
            await _stop(process)


async def load(contender: Contender, options: ServeOptions, prompts: list[Prompt], on_done: Done) -> LoadResult:
    """Send the prompts to a server that runs."""
    mine = msgspec.structs.replace(options, base_url=contender.base_url)
    return (await run_serve(mine, prompts, on_done)).result


async def _until_healthy(contender: Contender, process: asyncio.subprocess.Process) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not await asyncio.to_thread(_is_healthy, contender.base_url):
        if process.returncode is not None:
            raise ServerBroke(f"{contender.name} ended with status {process.returncode}")
        if time.monotonic() > deadline:
            raise ServerBroke(f"{contender.name} was not healthy after {_START_SECONDS:.0f} s")
        await asyncio.sleep(_POLL_SECONDS)


def _is_healthy(base_url: str) -> bool:
    try:
        with urlopen(base_url + "/health", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
