"""``python -m tokenloom.bench.mesh.tails``: how late first tokens come under load, in the last hundredth of requests.

A mesh around an engine that only waits is measured first: its tokens a second with every seat taken. Then requests
arrive at random times: ``quiet`` at a tenth of that rate, ``busy`` at nine tenths, and ``hogs`` at half of it beside
busy loops. The p99 from a request's arrival to its first token, less what the engine's core took, may be 2.5 times that
of the quiet load; otherwise the status is 1.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.supervisor.mesh import Mesh

from ..load.arrivals import Pace, run_load
from ..load.bodies import CompletionBody
from ..load.datasets import DatasetOptions, Prompt, make_prompts
from ..load.http_client import Client, Endpoint
from ..report.machine import Load
from ..report.stats import Distribution
from .local_mesh import http_url, with_mesh
from .mesh import MeshCase, added_ms, mesh_options, steady_rate
from .observer import hogs

LIMIT = 2.5
"""How many times as late as under the quiet load the p99 may be."""
_FEWEST = 200
"""Requests of a load: of fewer, the last hundredth would be one request."""


@dataclass(frozen=True)
class TailCase:
    """Describes a run."""

    mesh: MeshCase
    hogs: int = 2


LOADS = {"quiet": 0.1, "busy": 0.9, "hogs": 0.5}
"""The loads, in shares of the tokens a second with every seat taken."""


def prompts_of(case: MeshCase, count: int, vocab_size: int) -> list[Prompt]:
    options = DatasetOptions(num_prompts=count, input_len=case.input_len, output_len=case.output_len, range_ratio=0.25)
    return make_prompts(options, vocab_size)


async def run_case(model: Path, case: TailCase) -> dict[str, Any]:
    """Start a mesh, measure its peak and the loads, and stop it."""
    vocab_size = load_tokenizer(model).get_vocab_size(with_added_tokens=True)
    body = CompletionBody("bench", {"temperature": 0, "ignore_eos": True, "return_timeline": True})
    report: dict[str, Any] = {}

    async def work(mesh: Mesh) -> None:
        async with Client(Endpoint.of(http_url(mesh), "/v1/completions"), body) as client:
            await run_load(client, prompts_of(case.mesh, case.mesh.num_streams, vocab_size), Pace())  # warm-up
            full = prompts_of(case.mesh, case.mesh.num_prompts, vocab_size)
            peak = await run_load(client, full, Pace(max_concurrency=case.mesh.num_streams))
            report["tokens_per_second"] = round(rate := steady_rate([each for each in peak.outcomes if not each.error]))
            for name, share in LOADS.items():
                per_second = share * rate / case.mesh.output_len
                prompts = prompts_of(case.mesh, max(_FEWEST, round(per_second * case.mesh.seconds)), vocab_size)
                with hogs(case.hogs) if name == "hogs" else nullcontext():
                    load = Load()
                    result = await run_load(client, prompts, Pace(request_rate=per_second))
                    report[name] = summarize(case.mesh, result.outcomes) | load.cores()

    await with_mesh(mesh_options(model, case.mesh), work)
    return report | {"failures": failures(report)}


def summarize(case: MeshCase, outcomes: Sequence[Any]) -> dict[str, Any]:
    """Report the ms that the mesh added until first tokens, and how many requests failed."""
    good = [outcome for outcome in outcomes if not outcome.error]
    added = Distribution.of(added_ms(case, good)["added_ttft_ms"], (90, 99))
    return {"requests": len(outcomes), "failed": len(outcomes) - len(good), **added.fields("added_ttft_ms")}


def failures(report: dict[str, Any]) -> list[str]:
    """Return what is not as it should be, in sentences."""
    most = LIMIT * report["quiet"]["p99_added_ttft_ms"]
    late = [name for name in LOADS if report[name]["p99_added_ttft_ms"] > most]
    found = [f"{name}: p99 is above {most:.1f} ms, {LIMIT:g} times that of the quiet load" for name in late]
    return found + [f"{name}: {report[name]['failed']} requests failed" for name in LOADS if report[name]["failed"]]


def main() -> int:
    """Run the case that the arguments name, and print its report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="A folder with the tokenizer of the mesh.")
    parser.add_argument("--batch", type=int, default=64, help="Seats of the engine.")
    parser.add_argument("--step-ms", type=float, default=4.0, help="How long a step waits.")
    parser.add_argument("--output-len", type=int, default=64, help="Tokens of an answer.")
    parser.add_argument("--seconds", type=float, default=10.0, help="About how long each load lasts.")
    parser.add_argument("--hogs", type=int, default=2, help="Busy loops of the last load.")
    asked = parser.parse_args()
    mesh = MeshCase(asked.step_ms, asked.batch, asked.seconds, output_len=asked.output_len)
    report = asyncio.run(run_case(asked.model, TailCase(mesh, asked.hogs)))
    print(json.dumps(report, indent=1))
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
