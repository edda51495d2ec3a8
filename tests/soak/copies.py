"""``python -m tests.soak.copies``: what it costs to keep a copy of each request at a second output processor, or
(``--of connections``) the connections of gateways.

Two meshes that differ in one option of their gateways alone, ``--journal-copies 2`` or ``--hold-connections``, answer
the same streams in turns A B B A. Printed are the processor time of a token in each service, with the interval (95 %)
of its ratio, and the bytes of a token that are sent to copies.
"""

import argparse
import asyncio
import math
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from msgspec.structs import replace as changed

from benchmarks.load.arrivals import Pace, run_load
from benchmarks.load.bodies import CompletionBody
from benchmarks.load.datasets import DatasetOptions, make_prompts
from benchmarks.load.http_client import Client, Endpoint
from benchmarks.mesh.local_mesh import http_url, pids_by_service, with_mesh
from benchmarks.mesh.mesh import MeshCase, mesh_options
from benchmarks.report import machine
from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.supervisor.mesh import Mesh
from tokenloom.v1.output_processor_pb2 import CopiedOutput, JournalCopies, SampleJournal

MODES = (False, True)
"""Without and with the option."""
HEADERS: Mapping[str, Mapping[str, str]] = {"copies": {"Last-Event-ID": "0"}, "connections": {}}
"""Of the requests: those that are copied are those that their clients can resume; these are not held."""
VOCAB_SIZE = 32_000
"""Of the ids in the count of bytes: most of them take three."""


def bytes_of_token(tokens_per_message: int) -> float:
    """Return the bytes of a token of one request that go to its copy, when so many come between two messages."""
    journal = SampleJournal(token_ids=range(VOCAB_SIZE - tokens_per_message, VOCAB_SIZE))
    news = JournalCopies(outputs=[CopiedOutput(copy=1000, journals=[journal])])
    return news.ByteSize() / tokens_per_message


class Side:
    """One of the two meshes."""

    def __init__(self, flags: tuple[str, ...], headers: Mapping[str, str], case: MeshCase) -> None:
        """``flags``: of the gateways."""
        options = mesh_options(DEMO_MODEL, case)
        all_flags = {**options.flags, "gateway": (*options.flags["gateway"], *flags)}
        self._options = changed(options, output_processors=2, flags=all_flags)
        self._headers = headers
        self._case = case
        self._ready, self._done = asyncio.Event(), asyncio.Event()
        self._mesh: Mesh | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when it serves."""

        async def work(mesh: Mesh) -> None:
            self._mesh = mesh
            self._ready.set()
            await self._done.wait()

        self._task = asyncio.create_task(with_mesh(self._options, work))
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait((self._task, ready), return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            await self._task

    async def stop(self) -> None:
        self._done.set()
        if self._task is not None:
            await self._task

    async def turn(self) -> dict[str, float]:
        """Return microseconds of a token by service."""
        assert self._mesh is not None
        case = self._case
        size = load_tokenizer(DEMO_MODEL).get_vocab_size(with_added_tokens=True)
        shape = DatasetOptions(num_prompts=case.num_prompts, input_len=case.input_len, output_len=case.output_len)
        prompts = make_prompts(shape, size)
        endpoint = replace(Endpoint.of(http_url(self._mesh), "/v1/completions"), headers=self._headers)
        async with Client(endpoint, CompletionBody("bench", {"temperature": 0, "ignore_eos": True})) as client:
            cpu = machine.ServiceCpu(pids_by_service(self._mesh))
            result = await run_load(client, prompts, Pace(max_concurrency=case.batch))
            used = cpu.used()
        assert not [each.error for each in result.outcomes if each.error]
        tokens = sum(each.output_tokens for each in result.outcomes)
        named = {name: seconds / tokens * 1e6 for name, seconds in used.items() if name != "engine core"}
        return named | {"all but the core": sum(named.values())}


async def measure(case: MeshCase, rounds: int, of: str, directory: Path) -> None:
    """Print the cost of ``of``, a key of ``HEADERS``."""
    flags = ("--journal-copies", "2") if of == "copies" else ("--hold-connections", str(directory))
    sides = {mode: Side(flags if mode else (), HEADERS[of], case) for mode in MODES}
    figures: dict[bool, dict[str, list[float]]] = {mode: defaultdict(list) for mode in MODES}
    try:
        for side in sides.values():
            await side.start()
            await side.turn()  # warms it up
        for _ in range(rounds):
            for mode in (*MODES, *reversed(MODES)):
                for name, value in (await sides[mode].turn()).items():
                    figures[mode][name].append(value)
    finally:
        for side in sides.values():
            await side.stop()
    for name in figures[False]:
        plain, more = figures[False][name], figures[True][name]
        # Of neighbours: what else runs on the machine changes within minutes.
        ratios = [other / one for one, other in zip(plain, more, strict=True)]
        spread = 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else math.nan
        print(
            f"{name:18} {statistics.median(plain):7.2f} us a token, {statistics.median(more):7.2f} with {of}, "
            f"ratio {statistics.mean(ratios):.3f} +- {spread:.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--of", choices=HEADERS, default="copies")
    parser.add_argument("--step-ms", type=float, default=20.0, help="length of a step (20)")
    parser.add_argument("--batch", type=int, default=32, help="streams at once (32)")
    parser.add_argument("--seconds", type=float, default=6.0, help="length of a turn (6)")
    parser.add_argument("--rounds", type=int, default=4, help="of four turns (4)")
    options = parser.parse_args()
    if options.of == "copies":
        for number in (1, 2, 5, 20):
            print(f"{bytes_of_token(number):.1f} bytes a token, where {number} come in 0.1 s")
    with tempfile.TemporaryDirectory(prefix="tl-", dir="/tmp") as directory:
        case = MeshCase(options.step_ms, options.batch, options.seconds)
        asyncio.run(measure(case, options.rounds, options.of, Path(directory)))


if __name__ == "__main__":
    main()
