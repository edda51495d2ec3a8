"""Measures what drafts gain: the same answers with drafts and without, in turns, by one engine.

The answers are scripted, because a model with random weights has none that could be predicted: every token is computed
and drawn as always, and then replaced by that of the script.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import (
    CacheConfig,
    EngineConfig,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.gpu_worker.devices import CPUWorker
from tokenloom.gpu_worker.model_runner import ModelRunner
from tokenloom.gpu_worker.speculation.lookup_proposers import NgramProposer

_PROMPT_TOKENS = 128
_SPAN = 13
"""Tokens that a repeated answer copies from one place of its prompt."""
_ALPHABET = 64
"""Distinct tokens of random text: pairs occur again now and then, and something else follows."""
_RIGHT_SHARE = 0.7
_STREAMS = 32

Script = list[int]


@dataclass(frozen=True)
class SpeculationOptions:
    """Says what is measured."""

    model: Path
    num_drafts: int = 6
    num_tokens: int = 96
    """Of each answer."""
    rounds: int = 3
    threads: int = 0
    """0: the library decides."""


@dataclass(frozen=True)
class _Case:
    name: str
    prompts: list[Script]
    answers: list[Script]
    share_of_right_drafts: float | None = None
    """None: drafts come from n-grams; otherwise they are the script, of which each token is right so often."""


def run_speculation(options: SpeculationOptions) -> list[dict[str, Any]]:
    """Return a row for each case. Each round answers without drafts, then with them."""
    bench = _Bench(options)
    try:
        return [bench.row(case) for case in _cases(options.num_tokens, bench.core.ready.vocab_size)]
    finally:
        bench.core.shutdown()


def _cases(num_tokens: int, vocab_size: int) -> list[_Case]:
    rng = random.Random(7)
    alphabet = rng.sample(range(5, vocab_size), min(_ALPHABET, vocab_size - 5))

    def text(count: int, tokens: Sequence[int]) -> Script:
        return [rng.choice(tokens) for _ in range(count)]

    every = range(5, vocab_size)
    prompt = text(_PROMPT_TOKENS, every)
    repeated: Script = []
    while len(repeated) < num_tokens:
        start = rng.randrange(len(prompt) - _SPAN)
        repeated += [rng.choice(every), *prompt[start : start + _SPAN]]
    many = [text(_PROMPT_TOKENS // 4, alphabet) for _ in range(_STREAMS)]
    answers = [text(num_tokens // 2, alphabet) for _ in many]
    random_text = [text(_PROMPT_TOKENS, alphabet)]
    return [
        _Case("replayed drafts", [prompt], [text(num_tokens, every)], _RIGHT_SHARE),
        _Case("repeated answer, n-grams", [prompt], [repeated[:num_tokens]]),
        _Case("random text, n-grams", random_text, [text(num_tokens, alphabet)]),
        _Case(f"{_STREAMS} streams, n-grams", many, answers),
    ]


class _Bench:
    """Holds an engine whose drafts can be switched off: it then runs as if none were configured."""

    def __init__(self, options: SpeculationOptions) -> None:
        self._options = options
        config = EngineConfig(
            worker=WorkerConfig(model=str(options.model), num_threads=options.threads),
            cache=CacheConfig(num_blocks=_STREAMS * 24, enable_prefix_caching=False),
            scheduler=SchedulerConfig(max_num_seqs=_STREAMS, max_num_batched_tokens=1024),
            max_model_len=512,
            speculative=SpeculativeConfig("ngram", options.num_drafts),
        )
        worker = CPUWorker(config)
        self.core = EngineCore(config, UniProcExecutor(worker))
        assert worker._runner is not None
        self._runner: ModelRunner = worker._runner
        assert self._runner._speculation is not None
        self._speculation = self._runner._speculation
        self._ngram = self._speculation.proposer
        self._drafts = self.core.scheduler.drafts
        self._scripts: list[Script] = []
        sampler, draw = self._runner._sampler, self._runner._sampler.draw

        def draw_script(
            logits: Any, params: Sequence[CoreSamplingParams], output_indices: npt.NDArray[np.int64]
        ) -> list[int]:
            draw(logits, params, output_indices)
            return [
                self._scripts[each.seed][min(index, len(self._scripts[each.seed]) - 1)]
                for each, index in zip(params, output_indices.tolist(), strict=True)
            ]

        sampler.draw = draw_script
        self._runner._batch._kernel_sampler = None  # the kernel that draws knows no script

    def row(self, case: _Case) -> dict[str, Any]:
        """Measure one case."""
        runs: list[tuple[float, float]] = []
        assert self._drafts is not None
        before = self._drafts.stats()
        for number in range(self._options.rounds):
            without, _ = self._answer(case, number, drafts=False)
            with_drafts, steps = self._answer(case, number, drafts=True)
            runs.append((without, with_drafts))
        after = self._drafts.stats()
        drafted = after.num_draft_tokens - before.num_draft_tokens
        right = after.num_accepted_tokens - before.num_accepted_tokens
        num_tokens = sum(map(len, case.answers))
        return {
            "case": case.name,
            "tokens_per_second_without": round(num_tokens / statistics.median(run[0] for run in runs), 2),
            "tokens_per_second": round(num_tokens / statistics.median(run[1] for run in runs), 2),
            "ratio": round(statistics.median(run[0] / run[1] for run in runs), 3),
            "tokens_per_step": round(num_tokens / steps / len(case.answers), 2),
            "accepted": round(right / drafted, 3) if drafted else None,
            "free_rows": self._drafts.free_rows,
        }

    def _answer(self, case: _Case, number: int, *, drafts: bool) -> tuple[float, int]:
        """Return the seconds and steps from the first token of each answer on."""
        self._switch(case, number, drafts=drafts)
        self._scripts = case.answers
        for index, (prompt, answer) in enumerate(zip(case.prompts, case.answers, strict=True)):
            params = CoreSamplingParams(max_tokens=len(answer), seed=index, temperature=0.0)
            self.core.add_request(EngineCoreRequest(f"{case.name}-{number}-{drafts}-{index}", prompt, params))
        while self.core.scheduler.waiting or any(r.num_output_tokens < 1 for r in self.core.scheduler.running):
            self.core.step()
        steps, started = 0, time.perf_counter()
        while self.core.has_requests():
            self.core.step()
            steps += 1
        seconds = time.perf_counter() - started
        self.core.step()  # the worker forgets the requests
        return seconds, steps

    def _switch(self, case: _Case, number: int, *, drafts: bool) -> None:
        self.core.scheduler.drafts = self.core.scheduler.results._drafts = self._drafts if drafts else None
        self._runner._speculation = self._speculation if drafts else None
        proposer: Any = self._ngram
        if (share := case.share_of_right_drafts) is not None:
            proposer = _Replay(self._runner._batch.known_tokens, case, random.Random(number), share)
        self._speculation.proposer = proposer


class _Replay(NgramProposer):
    """Proposes the script with mistakes."""

    def __init__(
        self, known_tokens: Callable[[str], npt.NDArray[np.int32]], case: _Case, rng: random.Random, share: float
    ) -> None:
        self._known_tokens = known_tokens
        self._script = case.prompts[0] + case.answers[0]
        self._rng = rng
        self._share = share

    def update(self, step: Any) -> None:
        pass

    def propose(self, step: Any, hidden: Any, wanted: Mapping[str, int]) -> dict[str, list[int]]:
        proposed = {}
        for req_id, count in wanted.items():
            start = len(self._known_tokens(req_id))
            tokens = self._script[start : start + count]
            proposed[req_id] = [token if self._rng.random() < self._share else token - 1 for token in tokens]
        return proposed


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Show what drafts gain in each case."""
    shown = Table(title="Speculation", title_justify="left", title_style="bold")
    for column in ("case", "tokens/s without", "tokens/s", "ratio", "tokens a step", "drafts right"):
        shown.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        shown.add_row(
            row["case"],
            f"{row['tokens_per_second_without']:,.1f}",
            f"{row['tokens_per_second']:,.1f}",
            f"{row['ratio']:.2f}x",
            f"{row['tokens_per_step']:.2f}",
            "none drafted" if row["accepted"] is None else f"{row['accepted']:.0%}",
        )
    return shown
