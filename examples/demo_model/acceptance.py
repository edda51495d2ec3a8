"""Print what drafts of the demo model gain on held-out questions, as Markdown tables: how many count under each rule of
acceptance, and how much CPU time a token of one stream takes: the least of several rounds, because other programs may
use the machine.

``--every 6`` asks every sixth question. Both rules answer the same questions with the same seeds; ``probabilistic``
gives other answers, which have the same distribution.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from transformers import AutoTokenizer

from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import (
    CacheConfig,
    Dtype,
    EngineConfig,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.draft_counts import SpecDecodingStats
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.gpu_worker.devices import make_worker

Rule = Literal["strict", "probabilistic"]
Method = Literal["draft_model", "eagle"]
FOLDERS: dict[Method, str] = {"draft_model": "draft", "eagle": "eagle"}
MAX_TOKENS = 120
ONE_STREAM = 24
"""Questions that the comparison of speed asks one after the other."""


def prompts(model: Path, heldout: Path, every: int) -> Iterator[list[int]]:
    """The token ids of every n-th question, up to where the model speaks."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    with open(heldout, encoding="utf-8") as file:
        documents = [json.loads(line) for line in itertools.islice(file, 0, None, every)]
    for document in documents:
        text = tokenizer.apply_chat_template(
            document["messages"][:-1], tools=document.get("tools"), tokenize=False, add_generation_prompt=True
        )
        yield tokenizer.encode(text, add_special_tokens=False)


def make_core(model: Path, speculative: SpeculativeConfig | None, dtype: Dtype) -> EngineCore:
    """An engine with drafts or without."""
    config = EngineConfig(
        worker=WorkerConfig(model=str(model), dtype=dtype, num_threads=1),
        cache=CacheConfig(num_blocks=1024, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=1024),
        max_model_len=1024,
        speculative=speculative,
    )
    return EngineCore(config, UniProcExecutor(make_worker(config)))


def accepted(core: EngineCore, asked: list[list[int]], temperature: float, ends: frozenset[int]) -> SpecDecodingStats:
    """The drafts of the answers to all questions."""
    assert core.scheduler.drafts is not None
    before = core.scheduler.drafts.stats()
    for number, token_ids in enumerate(asked):
        params = CoreSamplingParams(
            max_tokens=MAX_TOKENS, seed=number, temperature=temperature, stop_token_ids=sorted(ends)
        )
        core.add_request(EngineCoreRequest(f"{temperature}-{number}", token_ids, params))
    run(core)
    after = core.scheduler.drafts.stats()
    return SpecDecodingStats(
        after.num_drafts - before.num_drafts,
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
    )


def run(core: EngineCore) -> int:
    """Answer all requests. Returns how many tokens the answers have."""
    num_tokens = 0
    while core.has_work():
        num_tokens += sum(len(output.new_token_ids) for output in core.step().outputs)
    return num_tokens


def end_tokens(model: Path) -> frozenset[int]:
    """The tokens that end an answer."""
    return frozenset(json.loads((model / "generation_config.json").read_text())["eos_token_id"])


def print_acceptance(model: Path, asked: list[list[int]], num_drafts: int, temperatures: list[float]) -> None:
    """The shares of drafts that count, if every draft is verified, whatever a row costs on this machine."""
    ends = end_tokens(model)
    print("| drafts from | temperature | rule | drafts that count | tokens a step with drafts |\n|---|---|---|---|---|")
    rules: tuple[Rule, ...] = ("strict", "probabilistic")
    for method, folder in FOLDERS.items():
        for rule in rules:
            config = SpeculativeConfig(method, num_drafts, str(model / folder), rejection_sample_method=rule)
            core = make_core(model, config, "float32")
            assert core.scheduler.drafts is not None
            core.scheduler.drafts.free_rows = core.scheduler.drafts.costs = None
            for temperature in temperatures:
                counts = accepted(core, asked, temperature, ends)
                share = counts.num_accepted_tokens / counts.num_draft_tokens
                tokens = 1 + counts.num_accepted_tokens / counts.num_drafts
                print(f"| {folder} | {temperature:g} | {rule} | {share:.1%} | {tokens:.2f} |", flush=True)
            core.shutdown()


def print_speed(model: Path, asked: list[list[int]], num_drafts: int, rounds: int) -> None:
    """One stream of greedy answers, with drafts and without in turns: the least CPU time of each answer."""
    ends = end_tokens(model)
    print("\n| drafts from | CPU µs a token without | with | ratio | after the first token without | with | ratio |")
    print("|---|---|---|---|---|---|---|")
    for method, folder in FOLDERS.items():
        config = SpeculativeConfig(method, num_drafts, str(model / folder))
        cores = [make_core(model, None, "auto"), make_core(model, config, "auto")]
        assert cores[1].scheduler.drafts is not None
        cores[1].scheduler.drafts.costs = None  # every round drafts
        best = [[_Answer(1e9, 1e9, 0)] * len(asked) for _ in cores]
        for _ in range(rounds + 1):
            for number, token_ids in enumerate(asked):
                for core, answers in zip(cores, best, strict=True):
                    answers[number] = answers[number].least(_answer(core, number, token_ids, ends))
        shown = []
        for part in ("seconds", "decode_seconds"):
            num_tokens = sum(each.num_tokens - (part == "decode_seconds") for each in best[0])
            without, ours = (1e6 * sum(getattr(each, part) for each in answers) / num_tokens for answers in best)
            shown.append(f"{without:.0f} | {ours:.0f} | {without / ours:.2f}")
        print(f"| {folder} | {' | '.join(shown)} |", flush=True)
        for core in cores:
            core.shutdown()


class _Answer(NamedTuple):
    """Holds what an answer took, in seconds of the processor."""

    seconds: float
    decode_seconds: float
    """After the step that drew the first token."""
    num_tokens: int

    def least(self, other: "_Answer") -> "_Answer":
        """Return the least times of two answers of the same tokens."""
        times = (min(self.seconds, other.seconds), min(self.decode_seconds, other.decode_seconds))
        return _Answer(*times, other.num_tokens)


def _answer(core: EngineCore, number: int, token_ids: list[int], ends: frozenset[int]) -> _Answer:
    params = CoreSamplingParams(max_tokens=MAX_TOKENS, seed=number, temperature=0.0, stop_token_ids=sorted(ends))
    began = time.process_time()
    core.add_request(EngineCoreRequest(str(number), token_ids, params))
    num_tokens = 0
    while not num_tokens:
        num_tokens += sum(len(output.new_token_ids) for output in core.step().outputs)
    had_first = time.process_time()
    num_tokens += run(core)
    ended = time.process_time()
    return _Answer(ended - began, ended - had_first, num_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--heldout", type=Path, required=True, help="heldout.jsonl of the generator")
    parser.add_argument("--every", type=int, default=6, help="ask every n-th question")
    parser.add_argument("--drafts", type=int, default=4, help="most drafts of a step")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--rounds", type=int, default=3, help="of the comparison of speed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    asked = list(prompts(args.model, args.heldout, args.every))
    print(f"{len(asked)} questions, at most {args.drafts} drafts a step.\n")
    print_acceptance(args.model, asked, args.drafts, args.temperatures)
    print_speed(args.model, asked[:: max(1, len(asked) // ONE_STREAM)], args.drafts, args.rounds)


if __name__ == "__main__":
    main()
