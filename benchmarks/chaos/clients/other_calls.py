"""The kinds of calls that have one client only: other dialects, pooling, tokens, adapters, searches, the background.

Each answer becomes one text of JSON without what differs from call to call, by which it is compared.
"""

import asyncio
import base64
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
from safetensors.numpy import save

from tokenloom.model_files.model_path import DEMO_ADAPTERS

from .mix import TOOLS, Case

Send: TypeAlias = Callable[[str, str, Mapping[str, Any] | None], Awaitable[Any]]
"""Makes a call of a method, a path and a body, and returns the JSON of its answer."""
ADAPTER = "pirate"
FLAGS = ("--enable-prompt-embeds", "--scheduling-policy", "priority")
"""What the engines need for these calls."""
ADAPTER_FLAGS = ("--enable-lora", "--lora-modules", f"{ADAPTER}={DEMO_ADAPTERS / ADAPTER}")
"""What they need besides for the adapter, which fits the demo model only."""
OF_DEMO_MODEL = frozenset({"adapter", "embeddings", "rerank"})
"""The kinds that other models may not serve."""
_POLL_SECONDS = 0.1
_LONG_BYTES = 100_000
"""Of a text that tokenizers encode in a process of its own."""
_VARYING = frozenset(
    {"id", "request_id", "created", "created_at", "completed_at", "prompt_tokens_details", "input_tokens_details"}
)
_VARYING_ENDS = ("_duration", "input_tokens")  # Anthropic's count leaves out those that a cache had


async def answer_of(send: Send, case: Case, model: str) -> str:
    """Make the call of a case and return its answer for comparison. Raises as ``send``."""
    assert case.call is not None
    method, path = case.call.split(" ", 1)
    body = {"model": model, **case.options}
    answer = await send(method, path, body)
    while body.get("background") and answer["status"] in ("queued", "in_progress"):
        await asyncio.sleep(_POLL_SECONDS)
        answer = await send("GET", f"{path}/{answer['id']}", None)
    return json.dumps(constant(answer), sort_keys=True)


def other_cases(rng: random.Random, vocab_size: int, hidden_size: int, length: int) -> list[Case]:
    """Return one case of each kind. ``length``: of answers that nothing else ends."""
    prompt = f"Once upon a time {rng.randint(1, 999)}"
    turns = [{"role": "user", "content": f"Tell a story about {rng.randint(1, 999)}."}]
    generation = {"max_tokens": length, "ignore_eos": True, "temperature": 0}
    completion: dict[str, Any] = {"prompt": prompt, **generation}
    texts = [f"{prompt} {number}" for number in range(3)]
    response: dict[str, Any] = {"input": prompt, "max_output_tokens": length, "temperature": 0}
    calls: dict[str, tuple[str, dict[str, Any]]] = {
        "adapter": ("POST /v1/completions", {**completion, "model": ADAPTER}),
        "prompt embeddings": ("POST /v1/completions", {**generation, "prompt_embeds": _embeds(rng, hidden_size)}),
        "prompt logprobs": ("POST /v1/completions", {**completion, "prompt_logprobs": 2}),
        "echo": ("POST /v1/completions", {**completion, "echo": True}),
        "list of prompts": ("POST /v1/completions", {**completion, "prompt": texts}),
        "beam search": (
            "POST /v1/completions",
            {"prompt": prompt, "max_tokens": min(length, 16), "temperature": 0, "n": 3, "use_beam_search": True},
        ),
        "reasoning": ("POST /v1/chat/completions", {**generation, "messages": turns, "reasoning_effort": "low"}),
        "required tool": (
            "POST /v1/chat/completions",
            {"messages": turns, "max_tokens": 400, "temperature": 0, "tools": TOOLS, "tool_choice": "required"},
        ),
        "tokenize": ("POST /tokenize", {"prompt": prompt}),
        "tokenize a long text": ("POST /tokenize", {"prompt": prompt * (_LONG_BYTES // len(prompt))}),
        "tokenize a chat": ("POST /tokenize", {"messages": turns}),
        "detokenize": ("POST /detokenize", {"tokens": [rng.randrange(10, vocab_size) for _ in range(20)]}),
        "embeddings": ("POST /v1/embeddings", {"input": texts}),
        "rerank": ("POST /v1/rerank", {"query": prompt, "documents": texts}),
        "messages": ("POST /v1/messages", {"messages": turns, "max_tokens": length, "temperature": 0}),
        "response": ("POST /v1/responses", response),
        "response in the background": ("POST /v1/responses", {**response, "background": True}),
        "Ollama chat": (
            "POST /api/chat",
            {"messages": turns, "stream": False, "options": {"num_predict": length, "temperature": 0}},
        ),
    }
    plain = [
        Case(name, streamed=False, call=call, client="plain HTTP", options=body) for name, (call, body) in calls.items()
    ]
    lines = [{**completion, "prompt": text} for text in texts]
    return [
        *plain,
        Case("batch file", streamed=False, call="POST /v1/batches", client="batch", options={"lines": lines}),
        Case(
            "session",
            streamed=False,
            call="GenerateSession",
            client="gRPC session",
            options={"turns": texts, **generation, "max_tokens": max(length // len(texts), 1)},
        ),
    ]


def _embeds(rng: random.Random, hidden_size: int) -> str:
    """Return the embeddings of a prompt of eight tokens."""
    numbers = np.random.default_rng(rng.getrandbits(32))
    rows = numbers.standard_normal((8, hidden_size), dtype=np.float32)
    return base64.b64encode(save({"prompt_embeds": rows})).decode()


def constant(value: Any) -> Any:
    """Return an answer without what differs from call to call: ids, times, and what a cache had."""
    if isinstance(value, dict):
        kept = {name: each for name, each in value.items() if name not in _VARYING and not name.endswith(_VARYING_ENDS)}
        return {name: constant(each) for name, each in kept.items()}
    return [constant(each) for each in value] if isinstance(value, list) else value
