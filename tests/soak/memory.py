"""``python -m tests.soak.memory``: several engines of one host under full load, and their memory against their plan.

The plan of an engine is what it occupies when it is ready, plus what READY promises: the blocks of the KV pool, whose
pages are taken when requests write to them, and the activations of the largest step. Pages of mapped files (the
checkpoint's embeddings, libraries) are shared between engines and can be dropped by the system: they are printed, and
no part of the plan.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tokenloom.bench.random_model import SHAPES, write_model
from tokenloom.engine_core.client.async_core_client import AsyncMPClient
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.handshake import CoreReady
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.services.engine.core.workers import CORE_COMMAND

MIB = 1 << 20
TOLERANCE = 0.05


@dataclass(frozen=True)
class Memory:
    """Proportional set sizes in bytes: a page that n processes map counts 1/n for each."""

    own: int
    """Anonymous and shared memory."""
    files: int
    """Pages of mapped files."""


@dataclass
class Engine:
    """One engine core with its load and what was seen of it."""

    client: AsyncMPClient
    block_bytes: int
    ready: CoreReady | None = None
    plan: int = 0
    peak: Memory = Memory(0, 0)
    most_used: float = 0.0
    """The largest share of KV blocks in use."""
    num_ended: int = 0
    errors: list[str] = field(default_factory=list)

    @property
    def deviation(self) -> float:
        return self.peak.own / self.plan - 1


def memory_of(pid: int) -> Memory:
    """Return the memory of a process and of those that it started."""
    own = files = 0
    process = psutil.Process(pid)
    for each in (process, *process.children(recursive=True)):
        fields = dict(
            line.split(":", 1) for line in Path(f"/proc/{each.pid}/smaps_rollup").read_text().splitlines()[1:]
        )
        sizes = {name: int(text.split()[0]) << 10 for name, text in fields.items()}
        own += sizes["Pss_Anon"] + sizes["Pss_Shmem"]
        files += sizes["Pss_File"]
    return Memory(own, files)


async def start(engine: Engine) -> None:
    """Start the core and make its plan."""
    engine.ready = ready = await engine.client.start()
    assert engine.client.pid is not None
    now = await asyncio.to_thread(memory_of, engine.client.pid)
    pool = ready.num_kv_blocks * engine.block_bytes
    engine.plan = now.own + pool + ready.warm_up.activation_bytes
    print(
        f"  ready with {now.own // MIB} MiB; plans {pool // MIB} MiB of KV in {ready.num_kv_blocks} blocks, context "
        f"{ready.max_model_len}; warm-up: {ready.warm_up}",
        flush=True,
    )


async def load(engine: Engine, seed: int, num_live: int, max_prompt: int) -> None:
    """Keep ``num_live`` requests in the engine until cancelled."""
    assert engine.ready is not None
    choose = random.Random(seed)
    longest = min(max_prompt, engine.ready.max_model_len - 64)

    async def add(number: int) -> None:
        prompt = choose.choices(range(1, engine.ready.vocab_size), k=choose.randint(longest // 8, longest))
        params = CoreSamplingParams(max_tokens=choose.randint(16, 64), seed=number, temperature=0.0)
        await engine.client.add_request(EngineCoreRequest(str(number), prompt, params))

    for number in range(num_live):
        await add(number)
    while True:
        outputs = await engine.client.get_output()
        if outputs.scheduler_stats is not None:
            engine.most_used = max(engine.most_used, outputs.scheduler_stats.kv_usage)
        for output in outputs.outputs:
            if output.finish_reason is not None:
                engine.num_ended += 1
                engine.errors += [output.error] if output.error else []
                await add(num_live + engine.num_ended)


async def watch(engines: Sequence[Engine], seconds: float) -> None:
    """Sample the memory of the engines every second."""
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        await asyncio.sleep(1.0)
        for engine in engines:
            assert engine.client.pid is not None
            seen = await asyncio.to_thread(memory_of, engine.client.pid)
            engine.peak = Memory(max(engine.peak.own, seen.own), max(engine.peak.files, seen.files))


async def soak(arguments: argparse.Namespace, model: Path) -> bool:
    """Run the engines. Returns whether every one kept to its plan."""
    shape = SHAPES[arguments.shape]
    dtype = shape["torch_dtype"] if arguments.dtype == "auto" else arguments.dtype
    itemsize = 2 if dtype == "bfloat16" else 4
    token_bytes = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * itemsize
    config = EngineConfig(
        worker=WorkerConfig(
            model=str(model), dtype=arguments.dtype, num_threads=max(1, (psutil.cpu_count() or 1) // arguments.engines)
        ),
        cache=CacheConfig(
            enable_prefix_caching=False,
            engines_on_host=arguments.engines,
            memory_bytes=arguments.kv_memory * MIB if arguments.kv_memory else None,
        ),
        scheduler=SchedulerConfig(max_num_seqs=arguments.batch, max_num_batched_tokens=arguments.budget),
    )
    free = psutil.virtual_memory().available
    print(f"{arguments.engines} engines of {arguments.shape}, {free // MIB} MiB free", flush=True)
    block_bytes = config.cache.block_size * token_bytes
    engines = [Engine(AsyncMPClient(config, CORE_COMMAND), block_bytes) for _ in range(arguments.engines)]
    try:
        await asyncio.gather(*map(start, engines))
        async with asyncio.TaskGroup() as group:
            loads = [
                group.create_task(load(engine, seed, 2 * arguments.batch, arguments.max_prompt))
                for seed, engine in enumerate(engines)
            ]
            await watch(engines, arguments.seconds)
            for task in loads:
                task.cancel()
    finally:
        await asyncio.gather(*(engine.client.close() for engine in engines))
    kept = [report(index, engine) for index, engine in enumerate(engines)]
    return all(kept)


def report(index: int, engine: Engine) -> bool:
    """Print what was seen of an engine. Returns whether it kept to its plan, with all blocks used and no error."""
    print(
        f"engine {index}: {engine.peak.own // MIB} MiB at its peak, {engine.plan // MIB} planned "
        f"({engine.deviation:+.1%}); {engine.peak.files // MIB} MiB of files; {engine.most_used:.0%} of the blocks in "
        f"use at once; {engine.num_ended} requests ended, {len(engine.errors)} with an error {engine.errors[:1]}"
    )
    return abs(engine.deviation) <= TOLERANCE and engine.most_used > 0.9 and not engine.errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=300.0, help="of full load")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="float32")
    parser.add_argument("--kv-memory", type=int, default=512, help="MiB of each engine; 0: what it plans by default")
    parser.add_argument("--batch", type=int, default=16, help="requests in a batch; twice as many are in an engine")
    parser.add_argument("--budget", type=int, default=256, help="token budget of a step")
    parser.add_argument("--max-prompt", type=int, default=400, help="tokens of the longest prompt")
    parser.add_argument("--model", type=Path, help="a checkpoint of this shape that exists already")
    arguments = parser.parse_args()
    if arguments.model is not None:
        return 0 if asyncio.run(soak(arguments, arguments.model)) else 1
    with tempfile.TemporaryDirectory(prefix="tl-memory-") as directory:
        write_model(arguments.shape, Path(directory))
        return 0 if asyncio.run(soak(arguments, Path(directory))) else 1


if __name__ == "__main__":
    sys.exit(main())
