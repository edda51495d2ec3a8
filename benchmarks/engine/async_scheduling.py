"""Measures what async scheduling gains: the same batch with it and without, in turns, in one process.

``python -m tokenloom.bench.engine.async_scheduling`` runs the demo model on this machine's processor, which also
schedules, and a worker that only waits, as it would for an accelerator. The order within a pair alternates. It then
prints how long such an accelerator has nothing to do between two steps that overlap, with drafts and without.
"""

import argparse
import statistics
import time
from dataclasses import dataclass

from tokenloom.engine_core.client.core_client import InprocClient
from tokenloom.engine_core.data.config import (
    CacheConfig,
    EngineConfig,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.data.scheduler_output import SchedulerOutput
from tokenloom.engine_core.executor.make_executor import make_executor
from tokenloom.engine_core.executor.uniproc import TimedExecutor
from tokenloom.engine_core.fake_workers.timed_worker import TimedWorker
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.services.engine.core.workers import make_worker

from ..load.datasets import DatasetOptions, make_prompts

_BLOCK = 16
_ACCURACY = 0.7
"""Share of drafts that are right."""


@dataclass(frozen=True)
class Case:
    """Says what computes, and how many requests of how many tokens it gets at once."""

    title: str
    worker: WorkerConfig
    requests: int = 64
    input_len: int = 32
    output_len: int = 64


CASES = (
    Case("demo model", WorkerConfig(model=str(DEMO_MODEL), dtype="float32")),
    Case("waits 5 ms a step", WorkerConfig(model=str(DEMO_MODEL), worker="timed", step_seconds=0.005), requests=128),
)


GAPS = Case(
    "waits 5 ms a step",
    WorkerConfig(model=str(DEMO_MODEL), worker="timed", step_seconds=0.005, draft_accuracy=_ACCURACY),
    output_len=1500,
)


def run_case(case: Case, pairs: int) -> list[tuple[float, float]]:
    """Return the output tokens per second of each pair, off and on. A first, untimed pair warms both up."""
    off, on = (_open(case, overlaps=overlaps) for overlaps in (False, True))
    try:
        speeds = []
        for pair in range(pairs + 1):
            order = (off, on) if pair % 2 else (on, off)
            measured = {id(client): _throughput(client, case) for client in order}
            speeds.append((measured[id(off)], measured[id(on)]))
        return speeds[1:]
    finally:
        off.close()
        on.close()


class GapExecutor(TimedExecutor):
    """Notes how long its device has nothing to do before each step in which requests only decode."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(TimedWorker(config), overlaps=True)
        self.gaps: list[float] = []
        """In seconds."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        super().execute_model(scheduler_output)
        if not scheduler_output.scheduled_new_reqs:
            self.gaps.append(self.idle_seconds)


def measure_gaps(case: Case, num_drafts: int) -> list[float]:
    """Return, in ascending order, the seconds between the end of each step and the begin of the next one, with so many
    drafts a request; 0: none. The case's worker only waits."""
    speculative = SpeculativeConfig("ngram", num_drafts) if num_drafts else None
    config = _config(case, overlaps=True, speculative=speculative)
    executor = GapExecutor(config)
    client = InprocClient(config, executor)
    try:
        _throughput(client, case)
    finally:
        client.close()
    return sorted(executor.gaps)


def _open(case: Case, *, overlaps: bool) -> InprocClient:
    config = _config(case, overlaps=overlaps)
    return InprocClient(config, make_executor(config, make_worker))


def _config(case: Case, *, overlaps: bool, speculative: SpeculativeConfig | None = None) -> EngineConfig:
    num_tokens = case.input_len + case.output_len
    return EngineConfig(
        worker=case.worker,
        cache=CacheConfig(block_size=_BLOCK, num_blocks=case.requests * (num_tokens // _BLOCK + 2)),
        scheduler=SchedulerConfig(max_num_seqs=case.requests, async_scheduling=overlaps),
        speculative=speculative,
    )


def _throughput(client: InprocClient, case: Case) -> float:
    client.call_utility("reset_prefix_cache")
    dataset = DatasetOptions(num_prompts=case.requests, input_len=case.input_len)
    prompts = make_prompts(dataset, client.ready.vocab_size)
    params = CoreSamplingParams(max_tokens=case.output_len, seed=0, temperature=0.0)
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        client.add_request(EngineCoreRequest(f"{index}", prompt.token_ids, params))
    left = case.requests
    while left:
        left -= sum(output.finish_reason is not None for output in client.get_output().outputs)
    return case.requests * case.output_len / (time.perf_counter() - started)


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=8)
    pairs = parser.parse_args().pairs
    for case in CASES:
        speeds = run_case(case, pairs)
        off, on = (statistics.median(column) for column in zip(*speeds, strict=True))
        ratios = sorted(on / off for off, on in speeds)
        print(
            f"{case.title}: off {off:,.0f}, on {on:,.0f} output tokens/s; on / off {statistics.median(ratios):.3f} "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f}, {len(ratios)} pairs)"
        )
    for num_drafts in (0, 4):
        gaps = measure_gaps(GAPS, num_drafts)
        print(
            f"{GAPS.title}, {GAPS.requests} requests with {num_drafts} drafts each, overlapping steps: idle between "
            f"steps {statistics.median(gaps) * 1e3:.3f} ms (median), {gaps[len(gaps) * 99 // 100] * 1e3:.3f} ms (p99) "
            f"of {len(gaps)} steps"
        )


if __name__ == "__main__":
    main()
