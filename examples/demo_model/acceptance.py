"""Print how many drafts count under each rule of acceptance, on held-out questions, as a Markdown table.

``--every 6`` asks every sixth question. Both rules answer the same questions with the same seeds; ``probabilistic``
gives other answers, which have the same distribution.
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from transformers import AutoTokenizer

from tokenloom.engine_core.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculativeConfig, WorkerConfig
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.wire.core_sampling_params import SamplingParams
from tokenloom.engine_core.wire.draft_counts import SpecDecodingStats
from tokenloom.engine_core.wire.messages import EngineCoreRequest
from tokenloom.gpu_worker.platform.devices import make_worker

Rule = Literal["strict", "probabilistic"]
Method = Literal["draft_model", "eagle"]
FOLDERS: dict[Method, str] = {"draft_model": "draft", "eagle": "eagle"}
MAX_TOKENS = 120


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


def make_core(model: Path, method: Method, num_drafts: int, rule: Rule) -> EngineCore:
    """An engine that verifies every draft, whatever a row costs on this machine."""
    speculative = SpeculativeConfig(method, num_drafts, str(model / FOLDERS[method]), rejection_sample_method=rule)
    config = EngineConfig(
        worker=WorkerConfig(model=str(model), dtype="float32"),
        cache=CacheConfig(num_blocks=1024, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=1024),
        max_model_len=1024,
        speculative=speculative,
    )
    core = EngineCore(config, UniProcExecutor(make_worker(config)))
    assert core.scheduler.drafts is not None
    core.scheduler.drafts.free_rows = None
    return core


def accepted(core: EngineCore, asked: list[list[int]], temperature: float, ends: frozenset[int]) -> SpecDecodingStats:
    """The drafts of the answers to all questions."""
    assert core.scheduler.drafts is not None
    before = core.scheduler.drafts.stats()
    for number, token_ids in enumerate(asked):
        params = SamplingParams(
            max_tokens=MAX_TOKENS, seed=number, temperature=temperature, stop_token_ids=frozenset(ends)
        )
        core.add_request(EngineCoreRequest(f"{temperature}-{number}", token_ids, params))
    while core.has_work():
        core.step()
    after = core.scheduler.drafts.stats()
    return SpecDecodingStats(
        after.num_drafts - before.num_drafts,
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--heldout", type=Path, required=True, help="heldout.jsonl of the generator")
    parser.add_argument("--every", type=int, default=6, help="ask every n-th question")
    parser.add_argument("--drafts", type=int, default=4, help="most drafts of a step")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    args = parser.parse_args()
    asked = list(prompts(args.model, args.heldout, args.every))
    ends = frozenset(json.loads((args.model / "generation_config.json").read_text())["eos_token_id"])
    print(f"{len(asked)} questions, at most {args.drafts} drafts a step.\n")
    print("| drafts from | temperature | rule | drafts that count | tokens a step with drafts |\n|---|---|---|---|---|")
    rules: tuple[Rule, ...] = ("strict", "probabilistic")
    for method in FOLDERS:
        cores = {rule: make_core(args.model, method, args.drafts, rule) for rule in rules}
        for temperature, (rule, core) in itertools.product(args.temperatures, cores.items()):
            counts = accepted(core, asked, temperature, ends)
            share = counts.num_accepted_tokens / counts.num_draft_tokens
            tokens = 1 + counts.num_accepted_tokens / counts.num_drafts
            print(f"| {FOLDERS[method]} | {temperature:g} | {rule} | {share:.1%} | {tokens:.2f} |", flush=True)
        for core in cores.values():
            core.shutdown()


if __name__ == "__main__":
    main()
