"""Runs ``bench serve``: load on any server with OpenAI's API."""

import dataclasses
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, field
from msgspec.structs import asdict, replace
from tokenizers import Tokenizer

from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.model_files.model_path import DEMO_MODEL_NAME, resolve
from tokenloom.request.errors import TokenloomError

from ..load.arrivals import Done, LoadResult, Pace, run_load
from ..load.bodies import Backend, ChatBody, CompletionBody
from ..load.datasets import DatasetName, DatasetOptions, Prompt, make_prompts
from ..load.http_client import Body, Client, Endpoint
from ..load.slo import Objectives
from ..report import machine
from ..report.plot import Panel, write_cdfs
from .serve_report import LATENCIES, latencies_ms, summarize


class ServeOptions(Struct, frozen=True):
    """Describes one run against one server."""

    base_url: Annotated[str, "URL of the server: http://host:port."] = "http://127.0.0.1:8000"
    model: Annotated[str, "Name of a served model."] = DEMO_MODEL_NAME
    backend: Annotated[Backend, "Completions or chat completions."] = Backend.OPENAI
    endpoint: Annotated[str, "Path of the API; by default that of the backend."] = ""
    api_key: str = ""
    tokenizer: Annotated[str, "Directory or hub id of the tokenizer; by default --model."] = ""
    vocab_size: Annotated[
        Annotated[int, Meta(ge=2)] | None, "Draw token ids below this number, without a tokenizer."
    ] = None
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0, "ignore_eos": True})
    dataset: DatasetOptions = DatasetOptions()
    pace: Pace = Pace()
    num_warmups: Annotated[Annotated[int, Meta(ge=0)], "Requests before the measurement."] = 0
    objectives: Objectives = field(default_factory=lambda: Objectives({}))
    percents: Annotated[
        tuple[float, ...], "Percentiles, separated by commas.", Meta(extra={"name": "metric_percentiles"})
    ] = (99,)


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


_COMMON_IDS = 1000
"""Token ids below this number are in every model's vocabulary."""


def with_vocabulary(options: ServeOptions) -> tuple[ServeOptions, str]:
    """Return the options with the size of a vocabulary that every model has, and what to say about it, if only ids are
    sent and the model's tokenizer is not at hand; otherwise the options and no text.

    Raises ``ValueError`` if the tokenizer is needed and not at hand.
    """
    needs_tokenizer = options.backend is Backend.OPENAI_CHAT or options.dataset.name is DatasetName.SHAREGPT
    if options.vocab_size and not needs_tokenizer:
        return options, ""
    try:
        _tokenizer(options)
    except TokenloomError as error:
        if options.tokenizer or needs_tokenizer:
            raise ValueError(f"{error.message}; --tokenizer names a directory or a hub id with a tokenizer") from None
        note = f"no tokenizer of {options.model!r} is at hand: prompts are random token ids below {_COMMON_IDS}"
        return replace(options, vocab_size=_COMMON_IDS), note
    return options, ""


def prompts_for(options: ServeOptions) -> list[Prompt]:
    """Make the run's prompts of ids in the model's vocabulary. Raises ``ValueError``."""
    if options.dataset.name is not DatasetName.SHAREGPT:
        vocab_size = options.vocab_size or _tokenizer(options).get_vocab_size(with_added_tokens=True)
        return make_prompts(options.dataset, vocab_size)
    tokenizer = _tokenizer(options)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return make_prompts(options.dataset, size, lambda text: tokenizer.encode(text, add_special_tokens=False).ids)


async def run_serve(options: ServeOptions, prompts: list[Prompt], on_done: Done | None = None) -> ServeRun:
    """Warm up, run and measure."""
    endpoint = Endpoint.of(options.base_url, options.endpoint or options.backend.path, options.api_key)
    async with Client(endpoint, _body(options)) as client:
        if options.num_warmups:
            warmups = make_prompts(
                _warming(options),
                1 + max(max(prompt.token_ids) for prompt in prompts),
            )
            await run_load(client, warmups, Pace(max_concurrency=options.pace.max_concurrency))
        load = machine.Load()
        result = await run_load(client, prompts, options.pace, on_done)
        return ServeRun(
            result, _settings(options) | summarize(result, options.objectives, options.percents) | load.cores()
        )


def _warming(options: ServeOptions) -> DatasetOptions:
    """Return the dataset of the warm-up: of the same kind, but random instead of the requests of a file."""
    name = DatasetName.RANDOM if options.dataset.dataset_path else options.dataset.name
    seed = options.dataset.seed - 1
    return replace(options.dataset, name=name, dataset_path="", num_prompts=options.num_warmups, seed=seed)


def _body(options: ServeOptions) -> Body:
    if options.backend is Backend.OPENAI_CHAT:
        return ChatBody(options.model, _tokenizer(options), options.sampling)
    return CompletionBody(options.model, options.sampling)


def _tokenizer(options: ServeOptions) -> Tokenizer:
    return load_tokenizer(resolve(options.tokenizer or options.model, weights=False))


def _settings(options: ServeOptions) -> dict[str, Any]:
    rate = options.pace.request_rate
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "machine": machine.describe(),
        "backend": options.backend.value,
        "model_id": options.model,
        "dataset": asdict(options.dataset),
        "num_prompts": options.dataset.num_prompts,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": options.pace.burstiness,
        "max_concurrency": options.pace.max_concurrency,
        "goodput": options.objectives.bounds,
    }
