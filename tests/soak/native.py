"""``python -m tests.soak.native``: what schedulers plan and kernels compute at the edges of counts, seats, shares and
blocks, compared with numpy and PyTorch; with ``--sanitize`` the kernels watch their memory and their arithmetic.

Half of the seeds run a scheduler, whose steps two batches gather, one with the kernel and one with numpy. Others ask
for steps and tokens that are not there, which must be refused, or compute a kernel on a random shape.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.engine_core.helpers import make_request
from tests.engine_core.invariants import check_counts, check_scheduler
from tests.engine_core.planned_steps import make_scheduler
from tests.gpu_worker.attention.steps import BLOCK_SIZE, CPU, make_step, rules, run_rule, shape
from tests.gpu_worker.kernels.own_builds import builder, use_builds
from tests.gpu_worker.lora.test_slots import INPUTS, TOLERANCE, Layer
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.embedding_rows import EmbedsSpan
from tokenloom.engine_core.data.scheduler_output import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from tokenloom.engine_core.scheduling.scheduler import Scheduler
from tokenloom.gpu_worker.attention.attention_backend import ScoreRule
from tokenloom.gpu_worker.attention.cpu_backend import CPUBackend
from tokenloom.gpu_worker.attention.torch_backend import ReferenceBackend
from tokenloom.gpu_worker.batch.batch_arrays import KernelSampler, StepRows
from tokenloom.gpu_worker.batch.input_batch import InputBatch, StepInputs
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.gpu_worker.kernels.prebuilt import Variant
from tokenloom.gpu_worker.layers.panel_linear import PanelLinear
from tokenloom.gpu_worker.ops.cpu_ops import CPUOps
from tokenloom.gpu_worker.ops.torch_ops import TorchOps
from tokenloom.gpu_worker.sampler.host.sampler import Sampler
from tokenloom.process import cache_directory

BUILDS = cache_directory() / "sanitized"
SANITIZERS = ("-O1", "-g1", "-march=native", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
EDGES = (-(1 << 63), -(1 << 32), -(1 << 31), -2, -1, 0, 1, 2, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 63) - 1)
NEEDED: tuple[Variant, ...] = (
    ("attention", {"HEAD_SIZE": 32}),
    ("attention", {"HEAD_SIZE": 32, "KV_INT8": 1}),
    *((source, {}) for source in ("bfloat16", "bfloat16_dots", "bfloat16_tiles", "floats", "fused")),
    *((source, {}) for source in ("batch", "draw", "lora", "pool")),
)
"""The kernels of all cases, those first that take longest to build."""
SEEDS_OF_A_PROCESS, WEEK = 500, 7 * 24 * 3600.0
MAX_MODEL_LEN, MOST_STEPS = 96, 30


def batches(num_seqs: int, block_size: int, num_blocks: int) -> tuple[InputBatch, InputBatch]:
    """Return a batch whose steps the kernel gathers, and one whose steps numpy gathers."""
    both = [InputBatch(num_seqs, MAX_MODEL_LEN, block_size, num_blocks=num_blocks) for _ in range(2)]
    both[1]._gatherer = None
    return both[0], both[1]


def check_equal(one: StepInputs, other: StepInputs) -> None:
    for one_part, other_part in zip(one.embeds, other.embeds, strict=True):
        assert one_part.start == other_part.start
        np.testing.assert_array_equal(one_part.rows, other_part.rows)
    for field in fields(StepInputs):
        if field.name == "embeds":
            continue
        np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name), err_msg=field.name)


# Schedulers


def random_scheduler(rng: random.Random) -> tuple[Scheduler, int]:
    """Return a scheduler around the borders of its settings, and how many steps are in flight."""
    seats = rng.choice([1, 2, 3, 8, 17, 32])
    budget = rng.choice([seats, seats + 1, 2 * seats, 4 * seats, 128])
    depth = rng.choice([1, 1, 2])
    scheduler = make_scheduler(
        num_blocks=rng.choice([MAX_MODEL_LEN // 4, 2 * MAX_MODEL_LEN // 4 + 1, seats * MAX_MODEL_LEN // 4]),
        max_model_len=MAX_MODEL_LEN,
        caching=rng.random() < 0.7,
        num_stages=depth,
        max_num_seqs=seats,
        max_num_batched_tokens=max(budget, seats),
        prefill_tokens_beside_decode=rng.choice([None, 1, 2, 8, seats, seats + 1]),
        long_prefill_token_threshold=rng.choice([0, 1, 4, 5]),
        policy=rng.choice(["fcfs", "priority"]),
        watermark=rng.choice([0.0, 0.1]),
    )
    if (share := scheduler._planner.prompt_share) is not None and rng.random() < 0.7:
        share.observe(1 << 20, (1 << 20) / rng.choice([1.0, 40.0, 800.0, 1e6]))
        share.observe(0, rng.choice([1e-6, 0.01, 3.0]))
    return scheduler, depth


def add_some(scheduler: Scheduler, rng: random.Random, names: list[str], *, with_embeds: bool) -> None:
    # At first as many as there are seats: they begin in one step, in which no other request decodes.
    for _ in range(rng.choice([0, 1, 1, 3, 20] if names else [1, 20, scheduler.config.max_num_seqs])):
        name = f"r{len(names)}"
        names.append(name)
        length = rng.choice([1, 2, 3, 4, 5, 8, 9, 16, 31, 40, MAX_MODEL_LEN - 1])
        prompt = [rng.randrange(3)] * (length // 2) + [rng.randrange(50) for _ in range(length - length // 2)]
        request = make_request(name, prompt, rng.choice([1, 2, 4, 5, 30]), tenant=rng.choice("aab"))
        if scheduler.config.policy == "priority":
            request.priority = rng.choice([-1, 0, 1])
        if rng.random() < 0.3:
            request = replace(request, sampling_params=replace(request.sampling_params, logprobs=2))
        if with_embeds and rng.random() < 0.5:
            position = rng.randrange(length)
            request.prompt_embeds = [EmbedsSpan(position, np.ones((rng.randint(1, length - position), 8), np.float32))]
        scheduler.add_request(request)


def run_scheduler(rng: random.Random) -> None:
    """Every planned step has tokens for each of its requests, and both batches gather the same of it."""
    scheduler, depth = random_scheduler(rng)
    both = batches(scheduler.config.max_num_seqs, scheduler.kv.block_size, scheduler.kv.pool.num_blocks)
    names, with_embeds = list[str](), rng.random() < 0.2
    begun: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []
    for number in range(MOST_STEPS):
        if number < MOST_STEPS // 2:
            add_some(scheduler, rng, names, with_embeds=with_embeds)
        elif not scheduler.requests:
            break
        if names and rng.random() < 0.05:
            scheduler.abort_requests([rng.choice(names)])
        scheduled = scheduler.schedule()
        check_counts(scheduler, scheduled)
        if scheduled.num_scheduled_tokens:
            begun.append((scheduled, execute(both, scheduled, rng)))
        if begun and (len(begun) == depth or not scheduled.num_scheduled_tokens):
            scheduler.results.apply(*begun.pop(0))
        if not with_embeds and number % 4 == 0:  # blocks of embeddings have other hashes, and the check takes long
            check_scheduler(scheduler)


def execute(both: tuple[InputBatch, InputBatch], scheduled: SchedulerOutput, rng: random.Random) -> ModelRunnerOutput:
    for batch in both:
        batch.update(scheduled)
    found, expected = (batch.prepare(scheduled.num_scheduled_tokens) for batch in both)
    check_equal(found, expected)
    tokens = [rng.randrange(50) for _ in found.sampled]
    for batch, inputs in zip(both, (found, expected), strict=True):
        batch.append(inputs.rows[inputs.sampled], np.array(tokens, dtype=np.int64))
    sampled: list[list[int]] = [[] for _ in found.req_ids]
    for place, token_id in zip(found.sampled.tolist(), tokens, strict=True):
        sampled[place] = [token_id]
    return ModelRunnerOutput(list(scheduled.num_scheduled_tokens), sampled)


# Steps that a scheduler must never ask for


def ask_for_what_is_not_there(rng: random.Random) -> None:
    """A step at the edges is refused by both batches, or gathered the same; the one after it is as ever."""
    block_size, num_blocks = rng.choice([1, 3, 16]), rng.choice([8, 40])
    both = batches(3, block_size, num_blocks)
    lengths = {name: rng.choice([1, block_size, block_size + 1, 7]) for name in "abc"}
    blocks = {n: [rng.randrange(num_blocks) for _ in range(-(-length // block_size))] for n, length in lengths.items()}
    new = [
        NewRequestData(name, list(range(n)), [], CoreSamplingParams(max_tokens=5, seed=0), blocks[name], 0)
        for name, n in lengths.items()
    ]
    nothing = CachedRequestData([], [], [], {})
    room = {name: len(table) * block_size for name, table in blocks.items()}
    counts = {name: rng.choice([1, n, room[name], room[name] + 1, *EDGES]) for name, n in lengths.items()}
    starts = [rng.choice([0, 0, 0, room[name] - 1, room[name], *EDGES]) for name in lengths]
    outcomes = []
    for batch in both:
        batch.update(SchedulerOutput(new, nothing, lengths, 0, [], []))
        batch.update(SchedulerOutput([], CachedRequestData([*"abc"], [[], [], []], starts, {}), counts, 0, [], []))
        try:
            outcomes.append(batch.prepare(counts))
        except (AssertionError, MemoryError, OverflowError, ValueError):
            outcomes.append(None)
        batch.update(SchedulerOutput([], CachedRequestData([*"abc"], [[], [], []], [0, 0, 0], {}), lengths, 0, [], []))
    if outcomes[0] is None or outcomes[1] is None:
        assert outcomes == [None, None], (counts, starts)
    else:
        check_equal(*outcomes)
    check_equal(*(batch.prepare(lengths) for batch in both))


def draw(rng: random.Random) -> None:
    """The kernel draws numpy's tokens, and refuses places that are not there."""
    vocab, num_rows = rng.choice([1, 2, 15, 16, 17, 63, 64, 65, 1023, 1025, 3000]), rng.choice([1, 2, 5])
    params = [
        CoreSamplingParams(
            max_tokens=9,
            seed=rng.choice([0, 1, (1 << 32) - 1, 1 << 32, (1 << 63) - 1]),
            temperature=rng.choice([0.0, 0.0, 1.0, 0.01]),
            top_k=rng.choice([0, 1, 2, vocab - 1, vocab, vocab + 1]) if rng.random() < 0.5 else 0,
            top_p=rng.choice([1.0, 1e-6, 0.5]),
            min_p=rng.choice([0.0, 0.0, 1.0, 0.1]),
        )
        for _ in range(num_rows)
    ]
    known = np.array([rng.choice([1, 4, 8]) for _ in range(num_rows)], dtype=np.int64)
    tokens, prompts = np.zeros((num_rows, 8), np.int32), np.ones(num_rows, np.int64)
    drawer = KernelSampler(tokens, known, prompts)
    members = StepRows.find(
        [str(n) for n in range(num_rows)], {str(n): n for n in range(num_rows)}, dict(enumerate(params))
    )
    logits = np.random.default_rng(rng.randrange(1 << 30)).normal(0, 3, (num_rows, vocab)).astype(np.float32)
    indices = known - prompts
    places = np.arange(num_rows)
    bad = places.copy()
    bad[rng.randrange(num_rows)] = rng.choice([num_rows, *(edge for edge in EDGES if not 0 <= edge < num_rows)])
    with pytest.raises(AssertionError, match="one is not there"):
        drawer.append(members, bad, torch.from_numpy(logits))
    found = drawer.append(members, places, torch.from_numpy(logits))
    assert found is not None
    assert found.tolist() == Sampler().sample(logits.copy(), params, indices)


# Kernels


def attend(rng: random.Random) -> None:
    num_heads, num_kv_heads = rng.choice([(4, 4), (4, 2), (6, 2), (6, 1), (16, 1)])
    dtype, kv_dtype = rng.choice([(torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.int8)])
    config = shape(num_kv_heads, dtype, num_heads, kv_dtype=kv_dtype)
    seq_lens = [rng.choice([1, 2, 15, 16, 17, 31, 33, 64, 65, 130, 260]) for _ in range(rng.choice([1, 2, 5]))]
    query_lens = [rng.choice([1, 1, min(length, 17), length]) for length in seq_lens]
    step = make_step(query_lens, seq_lens, num_heads, config)
    if len(seq_lens) > 1 and min(seq_lens) > BLOCK_SIZE and rng.random() < 0.5:
        step.arrays["block_tables"][:, 0] = step.arrays["block_tables"][0, 0]
    window = rng.choice([None, 1, 16, 40])
    rule = rng.choice([ScoreRule(0.2, window), rules(num_heads, window)["sinks"]])
    expected, _ = run_rule(ReferenceBackend(config, BLOCK_SIZE, CPU), step, rule)
    found, _ = run_rule(CPUBackend(config, BLOCK_SIZE, CPU), step, rule)
    tolerance = 5e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def add_adapters(rng: random.Random) -> None:
    """Rows get the change of their adapter, and a slot that is not there is refused."""
    dtype, ranks = rng.choice([torch.float32, torch.bfloat16]), [rng.choice([1, 7, 8, 15, 16, 17, 33]) for _ in "abc"]
    slots = [rng.choice([-1, 0, 1, 2]) for _ in range(rng.choice([1, 2, 3, 31, 33, 65]))]
    slots[rng.randrange(len(slots))] = rng.randrange(3)
    layer = Layer(dtype, ranks, use_kernel=True)
    x = torch.randn(len(slots), INPUTS, generator=torch.Generator().manual_seed(rng.randrange(1 << 30))).to(dtype)
    found, expected = layer(x, slots).float(), layer.expected(x, slots)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=TOLERANCE[dtype] * float(expected.abs().max()))
    slots[rng.randrange(len(slots))] = rng.choice([3, 4, (1 << 31) - 1])
    with pytest.raises(AssertionError, match="is not there"):
        layer(x, slots)


def compute_layer(rng: random.Random) -> None:
    """A product, a norm and a gate."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    rows, outputs = rng.choice([1, 2, 5, 6, 7, 13, 132, 133]), rng.choice([1, 15, 16, 17, 63, 64, 65, 130])
    inputs, dtype = rng.choice([1, 2, 16, 31, 64, 130]), rng.choice([torch.float32, torch.bfloat16])
    weight, x = (torch.randn(n, inputs, generator=generator).to(dtype) for n in (outputs, rows))
    try:
        found = PanelLinear(weight)(x)
    except KernelsUnavailable:
        found = torch.nn.functional.linear(x, weight)
    exact = torch.nn.functional.linear(x.double(), weight.double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-2)
    stream, scale = x.clone(), torch.rand(inputs, generator=generator).to(dtype)
    results = [
        (ops.add_norm(stream.clone(), x, scale, 1e-5), ops.gate(torch.cat((x, x), 1), "silu"))
        for ops in (TorchOps(), CPUOps())
    ]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one, rtol=3e-2, atol=3e-2)


CASES: dict[str, tuple[int, Callable[[random.Random], None]]] = {
    "schedulers": (5, run_scheduler),
    "steps that are not there": (2, ask_for_what_is_not_there),
    "draws": (1, draw),
    "attention": (1, attend),
    "layers": (1, compute_layer),
    "adapters": (1, add_adapters),
}


def fuzz(
    seeds: range, cases: Collection[str] = CASES.keys(), begin: Callable[[int, str], object] = lambda seed, case: None
) -> Counter[str]:
    """Run the seeds that draw one of these cases. Calls ``begin`` with each seed and its case. Raises what is wrong,
    with the seed. Returns how many of each case ran."""
    seen: Counter[str] = Counter()
    names, weights = list(CASES), [weight for weight, _ in CASES.values()]
    for seed in seeds:
        rng = random.Random(seed)
        case = rng.choices(names, weights)[0]
        if case not in cases:
            continue
        begin(seed, case)
        try:
            CASES[case][1](rng)
        except BaseException as error:
            error.add_note(f"seed {seed}: {case}")
            raise
        seen[case] += 1
    return seen


# Processes


def build_needed(folder: Path, jobs: int) -> None:
    """Build the kernels of all cases with sanitizers, unless the folder has them, and remove those that are a week old
    and not needed."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    build = builder(folder, SANITIZERS)
    with ThreadPoolExecutor(jobs) as pool:
        needed = set(pool.map(lambda variant: build(variant[0], **variant[1]), NEEDED))
    for other in set(folder.glob("*.so")) - needed:
        if time.time() - other.stat().st_mtime > WEEK:
            other.unlink(missing_ok=True)


def run_process(seeds: range, cases: Collection[str], folder: Path | None) -> tuple[Counter[str], str]:
    """Run seeds in a process of their own, with kernels and the runtime of the sanitizers if there is a folder of
    builds. Returns how many of each case ended well, and what was wrong; empty: nothing."""
    chosen = [argument for case in cases for argument in ("--case", case)]
    command = [sys.executable, "-m", "tests.soak.native", "--here", f"--first={seeds.start}", f"--seeds={len(seeds)}"]
    environment = {**os.environ}
    if folder is not None:
        command.append(f"--builds={folder}")
        runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True)
        environment |= {
            "LD_PRELOAD": runtime.stdout.strip(),
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:allocator_may_return_null=1",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        }
    done = subprocess.run([*command, *chosen], check=False, env=environment, capture_output=True, text=True)
    begun = done.stdout.splitlines()
    if done.returncode == 0:
        return Counter(line.partition(": ")[2] for line in begun), ""
    ended = Counter(line.partition(": ")[2] for line in begun[:-1])
    return ended, f"{begun[-1] if begun else f'{seeds}'}: exit status {done.returncode}\n{done.stderr}"


def run_processes(options: argparse.Namespace) -> bool:
    """Run the seeds in several processes at a time, and print what was wrong. Returns whether nothing was."""
    started, end = time.monotonic(), options.first + options.seeds
    if options.sanitize:
        build_needed(options.builds, options.jobs)
        print(f"the kernels are there after {time.monotonic() - started:.0f} s", flush=True)
    folder = options.builds if options.sanitize else None
    parts = [range(n, min(n + SEEDS_OF_A_PROCESS, end)) for n in range(options.first, end, SEEDS_OF_A_PROCESS)]
    seen, faults = Counter[str](), 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for ended, fault in pool.map(lambda part: run_process(part, options.case, folder), parts):
            seen += ended
            faults += bool(fault)
            print(fault, end="", flush=True)
    how = "with sanitizers, " if options.sanitize else ""
    result = f"{faults} processes violated something" if faults else "no violation"
    seconds = time.monotonic() - started
    print(f"{seen.total()} of the seeds {options.first} to {end - 1}, {how}{seconds:.0f} s: {result}")
    print(", ".join(f"{count} {case}" for case, count in sorted(seen.items())))
    return not faults


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.native", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run (1000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0); so the seeds can be run in shards")
    parser.add_argument("--case", action="append", choices=CASES, help="run the seeds that draw this case (all)")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time (all cores)"
    )
    parser.add_argument("--sanitize", action="store_true", help="under AddressSanitizer and UndefinedBehaviorSanitizer")
    parser.add_argument("--builds", type=Path, help=f"where kernels with sanitizers are kept ({BUILDS})")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.case = options.case or list(CASES)
    if not options.here:
        options.builds = options.builds or BUILDS
        sys.exit(0 if run_processes(options) else 1)
    with pytest.MonkeyPatch.context() as patch:
        if options.builds is not None:
            use_builds(patch, builder(options.builds, SANITIZERS))
        # Each line is written at once: a sanitizer ends the process without writing what is buffered.
        seeds = range(options.first, options.first + options.seeds)
        fuzz(seeds, options.case, lambda seed, case: print(f"seed {seed}: {case}", flush=True))


if __name__ == "__main__":
    main()
