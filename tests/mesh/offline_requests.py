"""Draws random requests, and sends each to a mesh over HTTP and to ``LLM``: both must give the same outputs.

A request is drawn from its seed alone, so a failure names the seed that repeats it.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from tests.mesh.harness import MODEL, Mesh
from tokenloom import LLM, RequestOutput, RequestOutputKind, SamplingParams, StructuredOutputsParams
from tokenloom.model_files.model_path import DEMO_MODEL_NAME
from tokenloom.offline.outputs import Logprob

ENGINE = {
    "dtype": "float32",
    "num_threads": 1,
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "num_kv_blocks": 512,
}
"""Options of both engines."""
_AT_ONCE = 24
"""Requests that wait at the gateway at once, and prompts of one call of ``LLM``."""
_TEXTS = ("Once upon a time", "The dog and the cat", "What is 2 + 3?", "é ☃ \U0001f642 naïve", "a", "x = [1, 2,\n\t3]")
_STOPS = (" a", "e", ".", "\n", " the", "and ", "ou", "\ufffd", "once", "yes", '"', " was", "!")
_SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
_CONSTRAINTS: tuple[dict[str, Any], ...] = (
    {"choice": ["yes please", "no", "never mind"]},
    {"regex": r"[A-C]{2}-\d( ok)?"},
    {"json": _SCHEMA},
    {"grammar": 'start: "a" | "b" start'},
    {"json_object": True},
)
_END = 2  # the demo's end of a turn


@dataclass(frozen=True)
class Asked:
    """One random request."""

    seed: int
    prompt: str | list[int] | None
    """None: a chat."""
    messages: list[dict[str, str]]
    fields: dict[str, Any]
    """By the names that both sides have."""
    is_streamed: bool

    def sampling_params(self) -> SamplingParams:
        values = dict(self.fields)
        if (constraint := values.pop("structured_outputs", None)) is not None:
            values["structured_outputs"] = StructuredOutputsParams(**constraint)
        return SamplingParams(output_kind=RequestOutputKind.DELTA, **values)

    def body(self) -> dict[str, Any]:
        """Return the request for HTTP."""
        body: dict[str, Any] = {
            "model": MODEL,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **self.fields,
        }
        if self.prompt is not None:
            return body | {"prompt": self.prompt, "stream": self.is_streamed}
        if (top := body.pop("logprobs", None)) is not None:
            body |= {"logprobs": True, "top_logprobs": top}
        return body | {"messages": self.messages, "stream": self.is_streamed}


def draw(seed: int, *, reasons: bool = False) -> Asked:
    """Return the request of a seed. ``reasons``: of engines that know the marks of reasoning."""
    rng = random.Random(seed)
    fields: dict[str, Any] = {"seed": rng.getrandbits(63), "max_tokens": rng.randint(1, 24)}
    is_chat = not reasons and rng.random() < 0.15
    prompt = None if is_chat else _prompt(rng)
    if rng.random() < 0.4:
        fields["temperature"] = 0.0
    else:
        fields |= {"temperature": rng.choice((0.5, 1.0, 1.7)), "top_p": rng.choice((1.0, 0.8))}
        fields |= {"top_k": rng.choice((0, 5, 50)), "min_p": rng.choice((0.0, 0.05))}
    fields |= _details(rng)
    if fields.get("temperature") == 0.0:
        fields["n"] = 1  # all samples would be the same
    if rng.random() < 0.25:
        fields["structured_outputs"] = rng.choice(_CONSTRAINTS)
    if reasons and rng.random() < 0.5:
        fields["thinking_token_budget"] = rng.randint(0, 6)
    if rng.random() < 0.05:
        prompt, more = _refused(rng)
        fields |= more
    fields["min_tokens"] = min(fields.get("min_tokens", 0), fields["max_tokens"])
    is_streamed = rng.random() < 0.4 and "prompt_logprobs" not in fields
    messages = [{"role": "user", "content": rng.choice(_TEXTS)}] if prompt is None else []
    return Asked(seed, prompt, messages, fields, is_streamed)


def _prompt(rng: random.Random) -> str | list[int]:
    if rng.random() < 0.5:
        return " ".join(rng.choice(_TEXTS) for _ in range(rng.randint(1, 4)))
    return [rng.randrange(3, 2048) for _ in range(rng.randint(1, 90))]


def _details(rng: random.Random) -> dict[str, Any]:
    """Return some of the parameters that few requests have."""
    rare: dict[str, Any] = {
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "ignore_eos": True,
        "min_tokens": rng.randint(1, 8),
        "n": rng.randint(2, 3),
        "logprobs": rng.randint(0, 3),
        "prompt_logprobs": rng.randint(0, 2),
        "stop": [rng.choice(_STOPS) for _ in range(rng.randint(1, 3))],
        "include_stop_str_in_output": True,
        "stop_token_ids": [rng.randrange(2048) for _ in range(rng.randint(1, 300))],
        "detokenize": False,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logit_bias": {_END: rng.choice((5.0, 12.0))},
        "allowed_token_ids": [_END, *(rng.randrange(2048) for _ in range(40))],
        "bad_words": ["the", "and "],
        "repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 3},
        "skip_reading_prefix_cache": True,
        "stream_interval": rng.randint(2, 5),
    }
    chosen = {name: value for name, value in rare.items() if rng.random() < 0.15}
    if "stop" in chosen:
        chosen.pop("detokenize", None)
    return chosen


def _refused(rng: random.Random) -> tuple[str | list[int], dict[str, Any]]:
    return rng.choice(
        [
            ("a", {"max_tokens": 300}),
            ([5] * 256, {"max_tokens": 1}),
            ("a", {"structured_outputs": {"regex": "(a"}}),
            ("a", {"stop_token_ids": [99999]}),
            ([7, 4096], {}),
        ]
    )


@dataclass
class Sample:
    """What one sample gave, on either side."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[float] = field(default_factory=list)
    """Of its tokens."""
    alternatives: list[dict[int, float]] = field(default_factory=list)
    """At each position; only of completions."""


@dataclass
class Outcome:
    """What a request gave."""

    samples: list[Sample]
    prompt_logprobs: list[dict[int, float] | None] | None = None
    is_refused: bool = False


REFUSED = Outcome([], is_refused=True)


async def over_http(http: httpx.AsyncClient, asked: Sequence[Asked], at_once: int = _AT_ONCE) -> list[Outcome]:
    """Send the requests to a gateway, so many at once."""
    room = asyncio.Semaphore(at_once)

    async def one(request: Asked) -> Outcome:
        async with room:
            return await _ask(http, request)

    return await asyncio.gather(*map(one, asked))


async def _ask(http: httpx.AsyncClient, asked: Asked) -> Outcome:
    path = "/v1/completions" if asked.prompt is not None else "/v1/chat/completions"
    outcome = Outcome([Sample() for _ in range(asked.fields.get("n", 1))])
    async with http.stream("POST", path, json=asked.body()) as response:
        if response.status_code != 200:
            assert response.status_code == 400, await response.aread()
            return REFUSED
        async for part in _parts(response, is_streamed=asked.is_streamed):
            if "error" in part:
                assert part["error"]["type"] == "invalid_request_error", part
                return REFUSED
            for choice in part["choices"]:
                _take_choice(outcome, choice)
            if (rows := part.get("prompt_logprobs")) is not None:  # of a chat
                outcome.prompt_logprobs = _prompt_rows(rows)
    return outcome


async def _parts(response: httpx.Response, *, is_streamed: bool) -> AsyncIterator[dict[str, Any]]:
    data = await response.aread()
    if not is_streamed:
        yield json.loads(data)
        return
    for event in data.split(b"\n\n"):
        if event.startswith(b"data: {"):
            yield json.loads(event.removeprefix(b"data: "))


def _take_choice(outcome: Outcome, choice: dict[str, Any]) -> None:
    sample = outcome.samples[choice["index"]]
    message = choice.get("message") or choice.get("delta") or {}
    sample.text += choice.get("text") or message.get("content") or ""
    sample.token_ids += choice.get("token_ids") or []
    sample.finish_reason = choice["finish_reason"] or sample.finish_reason
    sample.stop_reason = choice.get("stop_reason") if choice.get("stop_reason") is not None else sample.stop_reason
    if (logprobs := choice.get("logprobs")) is not None:
        if "content" in logprobs:
            sample.logprobs += [each["logprob"] for each in logprobs["content"]]
        else:
            sample.logprobs += logprobs["token_logprobs"]
            sample.alternatives += [_by_id(each or {}) for each in logprobs["top_logprobs"] or []]
    if choice.get("prompt_logprobs"):
        outcome.prompt_logprobs = _prompt_rows(choice["prompt_logprobs"])


def _prompt_rows(rows: Sequence[Any]) -> list[dict[int, float] | None]:
    return [None if row is None else {int(name): each["logprob"] for name, each in row.items()} for row in rows]


def _by_id(row: dict[str, float]) -> dict[int, float]:
    return {int(name.removeprefix("token_id:")): value for name, value in row.items()}


def offline(llm: LLM, asked: Sequence[Asked], at_once: int = _AT_ONCE) -> list[Outcome]:
    """Give the requests to ``LLM``, so many in a call: whole, as a stream or as chats."""
    outcomes: dict[int, Outcome] = {}
    for start in range(0, len(asked), at_once):
        some = asked[start : start + at_once]
        chats = [each for each in some if each.prompt is None]
        streamed = [each for each in some if each.prompt is not None and each.is_streamed]
        whole = [each for each in some if each.prompt is not None and not each.is_streamed]
        for requests, outputs in ((chats, _chat(llm, chats)), (whole, _generate(llm, whole))):
            for request, output in zip(requests, outputs, strict=True):
                outcomes[request.seed] = _outcome([output])
        for request, parts in zip(streamed, _stream(llm, streamed), strict=True):
            outcomes[request.seed] = _outcome(parts)
    return [outcomes[each.seed] for each in asked]


def _generate(llm: LLM, asked: Sequence[Asked]) -> list[RequestOutput | None]:
    return _or_refused(
        lambda some: llm.generate(
            [each.prompt for each in some],  # type: ignore[misc]
            [each.sampling_params() for each in some],
            use_tqdm=False,
        ),
        asked,
    )


def _chat(llm: LLM, asked: Sequence[Asked]) -> list[RequestOutput | None]:
    return _or_refused(
        lambda some: llm.chat(
            [each.messages for each in some], [each.sampling_params() for each in some], use_tqdm=False
        ),
        asked,
    )


def _or_refused(run: Any, asked: Sequence[Asked]) -> list[RequestOutput | None]:
    """Return the outputs of a call; None for its requests if all of them are refused."""
    try:
        return list(run(asked))
    except ValueError:
        return [None] * len(asked)


def _stream(llm: LLM, asked: Sequence[Asked]) -> Iterator[list[RequestOutput | None]]:
    parts: dict[str, list[RequestOutput | None]] = {}
    try:
        prompts: list[Any] = [each.prompt for each in asked]
        for output in llm.stream(prompts, [each.sampling_params() for each in asked]):
            parts.setdefault(output.request_id, []).append(output)
    except ValueError:  # the last of them was refused, as all others were
        parts.setdefault("last", []).append(None)
    yield from (parts[key] for key in sorted(parts, key=lambda key: int(key) if key.isdecimal() else 1 << 60))


def _outcome(parts: Sequence[RequestOutput | None]) -> Outcome:
    if any(part is None or part.error is not None for part in parts):
        return REFUSED
    outcome = Outcome([])
    for part in parts:
        assert part is not None
        for completion in part.outputs:
            while len(outcome.samples) <= completion.index:
                outcome.samples.append(Sample())
            sample = outcome.samples[completion.index]
            sample.text += completion.text
            sample.token_ids += completion.token_ids
            sample.finish_reason = completion.finish_reason
            sample.stop_reason = completion.stop_reason
            for token_id, row in zip(completion.token_ids, completion.logprobs or [], strict=False):
                sample.logprobs.append(row[token_id].logprob)
                sample.alternatives.append(_values(row))
        if part.prompt_logprobs is not None:
            outcome.prompt_logprobs = [None if row is None else _values(row) for row in part.prompt_logprobs]
    return outcome


def _values(row: dict[int, Logprob]) -> dict[int, float]:
    return {token_id: each.logprob for token_id, each in row.items()}


@asynccontextmanager
async def both(directory: Path, parser: str, **options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, LLM]]:
    """Start a mesh, whose sockets are in ``directory``, and an ``LLM`` with the same engine. ``parser``: of the model's
    reasoning. ``options``: more of the engine's."""
    torch.set_num_threads(1)
    engine = {"reasoning_parser": parser, **ENGINE, **options}
    llm = await asyncio.to_thread(lambda: LLM(DEMO_MODEL_NAME, **engine))
    try:
        mesh = Mesh(directory, engine={"worker": "model", **engine}, gateway={"reasoning_parser": parser})
        async with mesh.running(), mesh.http() as http:
            yield http, llm
    finally:
        llm.close()


async def compared(
    http: httpx.AsyncClient, llm: LLM, asked: Sequence[Asked], tolerance: float, at_once: int = _AT_ONCE
) -> dict[int, list[str]]:
    """Return by seed how the outcomes of requests differ, of those that do. ``tolerance``: as in `differences`."""
    theirs = await over_http(http, asked, at_once)
    ours = await asyncio.to_thread(offline, llm, asked, at_once)
    found = {
        each.seed: differences(each, one, other, tolerance)
        for each, one, other in zip(asked, theirs, ours, strict=True)
    }
    assert sum(not outcome.is_refused for outcome in ours) > 0.8 * len(asked)
    return {seed: lines for seed, lines in found.items() if lines}


def differences(asked: Asked, http: Outcome, llm: Outcome, tolerance: float) -> list[str]:
    """Return how the outcomes differ. ``tolerance``: of log probabilities; 0: they are the same numbers."""
    if http.is_refused or llm.is_refused:
        return [] if http.is_refused and llm.is_refused else [f"refused: {http.is_refused} and {llm.is_refused}"]
    found = []
    for theirs, ours in zip(http.samples, llm.samples, strict=True):
        for name in ("text", "token_ids", "finish_reason", "stop_reason"):
            if getattr(theirs, name) != getattr(ours, name):
                found.append(f"{name}: {getattr(theirs, name)!r} and {getattr(ours, name)!r}")
        # OpenAI's chats have log probabilities of the content, of which the end token is no part.
        num_ends = 0 if asked.prompt is not None else len(ours.logprobs) - len(theirs.logprobs)
        if num_ends > 1 or not _are_close(theirs.logprobs, ours.logprobs[: len(ours.logprobs) - num_ends], tolerance):
            found.append(f"logprobs: {theirs.logprobs} and {ours.logprobs}")
        if asked.prompt is not None:
            for one, other in zip(theirs.alternatives, ours.alternatives, strict=False):
                common = sorted(one.keys() & other.keys())
                if not _are_close([one[key] for key in common], [other[key] for key in common], tolerance):
                    found.append(f"alternatives: {one} and {other}")
    for mine, yours in zip(http.prompt_logprobs or [], llm.prompt_logprobs or [], strict=True):
        left, right = mine or {}, yours or {}
        if left.keys() != right.keys() or not _are_close(
            [left[key] for key in sorted(left)], [right[key] for key in sorted(right)], tolerance
        ):
            found.append(f"prompt_logprobs: {mine} and {yours}")
    return found


def _are_close(one: Sequence[float], other: Sequence[float], tolerance: float) -> bool:
    return len(one) == len(other) and all(a == b or abs(a - b) <= tolerance for a, b in zip(one, other, strict=True))
