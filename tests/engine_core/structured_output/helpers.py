"""Provides the demo model's tokenizer, grammars over it, and cores that follow them."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tokenloom.engine_core.client.core_client import InprocClient
from tokenloom.engine_core.data.config import (
    CacheConfig,
    EngineConfig,
    ReasoningConfig,
    SchedulerConfig,
    SpeculativeConfig,
    StructuredOutputConfig,
    WorkerConfig,
)
from tokenloom.engine_core.data.core_params import CoreSamplingParams, GrammarKind, StructuredOutput
from tokenloom.engine_core.data.messages import EngineCoreOutput, EngineCoreRequest
from tokenloom.engine_core.executor.uniproc import ThreadedExecutor, UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker
from tokenloom.engine_core.structured_output.grammar_backend import Grammar
from tokenloom.engine_core.structured_output.llguidance_backend import LLGuidanceBackend
from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.services.engine.records.grammar_config import structured_output_config

VOCAB_SIZE = 2048
EOS = 0
NUM_WORDS = VOCAB_SIZE // 32

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@cache
def config() -> StructuredOutputConfig:
    found = structured_output_config(DEMO_MODEL)
    assert found is not None
    return found


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(DEMO_MODEL)


@cache
def backend() -> LLGuidanceBackend:
    return LLGuidanceBackend(DEMO_MODEL / "tokenizer.json", VOCAB_SIZE, (EOS,))


def encode(text: str) -> list[int]:
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return ids


def decode(token_ids: Sequence[int]) -> str:
    text: str = tokenizer().decode(list(token_ids))
    return text


def start(kind: GrammarKind, source: str = "") -> Grammar:
    """Return a grammar at the beginning of an output, made as for a request."""
    return backend().load(backend().prepare(StructuredOutput(kind, source))).start()


def allowed(grammar: Grammar) -> set[int]:
    row = np.zeros(NUM_WORDS, dtype=np.int32)
    grammar.fill_bitmask(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def json_schema(schema: Any) -> StructuredOutput:
    return StructuredOutput(GrammarKind.JSON, json.dumps(schema))


NO_REASONING = ReasoningConfig()


def make_client(
    *,
    num_blocks: int = 512,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 256,
    async_scheduling: bool = False,
    reasoning: ReasoningConfig = NO_REASONING,
    num_drafts: int = 0,
) -> InprocClient:
    """Return a core with the hash worker, which draws any token that the grammar allows."""
    core_config = EngineConfig(
        worker=WorkerConfig(model="", worker="hash"),
        cache=CacheConfig(block_size=4, num_blocks=num_blocks),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            async_scheduling=async_scheduling,
        ),
        structured_output=config(),
        reasoning=reasoning,
        speculative=SpeculativeConfig("ngram", num_drafts) if num_drafts else None,
    )
    worker = HashWorker(core_config, vocab_size=VOCAB_SIZE, max_model_len=2048)
    executor = ThreadedExecutor(worker) if async_scheduling else UniProcExecutor(worker)
    return InprocClient(core_config, executor)


def make_request(
    request_id: str,
    constraint: StructuredOutput | None,
    *,
    prompt: Sequence[int] = (1, 2, 3),
    max_tokens: int = 1000,
    min_tokens: int = 0,
    stop: tuple[int, ...] = (EOS,),
    accepted: Sequence[int] = (),
    budget: int | None = None,
) -> EngineCoreRequest:
    params = CoreSamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        seed=0,
        stop_token_ids=stop,
        structured_output=constraint,
        thinking_token_budget=budget,
    )
    return EngineCoreRequest(request_id, list(prompt), params, accepted_token_ids=list(accepted))


def run(client: InprocClient, requests: Sequence[EngineCoreRequest]) -> dict[str, list[EngineCoreOutput]]:
    """Add the requests and step until all have ended. Returns their outputs by id."""
    outputs: dict[str, list[EngineCoreOutput]] = {request.request_id: [] for request in requests}
    live = set(outputs)
    for request in requests:
        client.add_request(request)
    while live:
        for output in client.get_output().outputs:
            outputs[output.request_id].append(output)
            if output.finish_reason is not None:
                live.remove(output.request_id)
    return outputs


def token_ids_of(outputs: Sequence[EngineCoreOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


def text_of(outputs: Sequence[EngineCoreOutput]) -> str:
    return decode(token_ids_of(outputs))
