"""Runs ``bench serve``: load on any server with OpenAI's API."""

import dataclasses
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tokenloom.checkpoint import load_tokenizer, resolve

from ..load.arrivals import Done, LoadResult, Pace, run_load
from ..load.bodies import Backend, ChatBody, CompletionBody
from ..load.datasets import DatasetOptions, Prompt, make_prompts
from ..load.http_client import Body, Client, Endpoint
from ..load.slo import Objectives
from ..report import machine
from ..report.plot import Panel, write_cdfs
from .serve_report import LATENCIES, latencies_ms, summarize


@dataclass(frozen=True)
class ServeOptions:
    """Describes one run against one server."""

    base_url: str
    model: str
    """The model's name at the server."""
    backend: Backend = Backend.OPENAI
    endpoint: str = ""
    """The path; empty: the backend's own."""
    api_key: str = ""
    tokenizer: str = ""
    """Directory or hub id of the model's tokenizer; empty: that of `model`."""
    vocab_size: int | None = None
    """Whether to load no tokenizer, because only token ids are sent."""
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0, "ignore_eos": True})
    dataset: DatasetOptions = field(default_factory=DatasetOptions)
    pace: Pace = field(default_factory=Pace)
    num_warmups: int = 0
    """How many requests run first without being measured."""
    objectives: Objectives = field(default_factory=lambda: Objectives({}))
    percents: tuple[float, ...] = (99,)


@dataclass(frozen=True)
class ServeRun:
    """Holds the results."""

    result: LoadResult
    report: dict[str, Any]

    def write_json(self, path: Path, *, detailed: bool = False) -> None:
        """Return the report; ``detailed`` adds each request's lengths and times, in seconds."""
        report = self.report
        if detailed:
            report = report | {"requests": [dataclasses.asdict(outcome) for outcome in self.result.outcomes]}
        path.write_text(json.dumps(report, indent=2) + "\n")

    def write_plot(self, path: Path) -> None:
        """Draw cumulative distributions of the latencies."""
        values = latencies_ms(self.result.outcomes)
        write_cdfs(path, [Panel(text, "ms", {"": values[name]}) for name, text in LATENCIES.items()])


def prompts_for(options: ServeOptions) -> list[Prompt]:
    """Make the run's prompts of ids in the model's vocabulary. Raises ``ValueError``."""
    vocab_size = options.vocab_size or _tokenizer(options).get_vocab_size(with_added_tokens=True)
    return make_prompts(options.dataset, vocab_size)


async def run_serve(options: ServeOptions, prompts: list[Prompt], on_done: Done | None = None) -> ServeRun:
    """Warm up, run and measure."""
    endpoint = Endpoint.of(options.base_url, options.endpoint or options.backend.path, options.api_key)
    async with Client(endpoint, _body(options)) as client:
        if options.num_warmups:
            warmups = make_prompts(
                dataclasses.replace(options.dataset, num_prompts=options.num_warmups, seed=options.dataset.seed - 1),
                1 + max(max(prompt.token_ids) for prompt in prompts),
            )
            await run_load(client, warmups, Pace(max_concurrency=options.pace.max_concurrency))
        load = machine.Load()
        result = await run_load(client, prompts, options.pace, on_done)
        return ServeRun(
            result, _settings(options) | summarize(result, options.objectives, options.percents) | load.cores()
        )


def _body(options: ServeOptions) -> Body:
    if options.backend is Backend.OPENAI_CHAT:
        return ChatBody(options.model, _tokenizer(options), options.sampling)
    return CompletionBody(options.model, options.sampling)


def _tokenizer(options: ServeOptions) -> Tokenizer:
    return load_tokenizer(resolve(options.tokenizer or options.model))


def _settings(options: ServeOptions) -> dict[str, Any]:
    rate = options.pace.request_rate
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "machine": machine.describe(),
        "backend": options.backend.value,
        "model_id": options.model,
        "dataset": dataclasses.asdict(options.dataset),
        "num_prompts": options.dataset.num_prompts,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": options.pace.burstiness,
        "max_concurrency": options.pace.max_concurrency,
        "goodput": options.objectives.bounds,
    }
