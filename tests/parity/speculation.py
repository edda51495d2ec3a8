"""Requests with every sampling parameter, answered with drafts and without: what must be the same.

Tokens are compared by the rule of :mod:`tests.parity.identical`: a step of several rows may round otherwise than a step
of one, so a token may differ where two logits are nearly the same, and such places are few.
"""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.identical import MAX_GAP, MAX_SHARE
from tokenloom import LLM, SamplingParams, demo_model
from tokenloom.request.sampling_params import StructuredOutputsParams

DEMO_MODEL = Path(demo_model.__file__).parent
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1},
    "suffix": {"method": "suffix", "num_speculative_tokens": 5},
    "draft_model": {"method": "draft_model", "model": "draft", "num_speculative_tokens": 4},
    "eagle": {"method": "eagle", "model": "eagle", "num_speculative_tokens": 3},
}
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "age", "ok"],
}


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked of an engine."""

    prompt: list[int]
    params: SamplingParams


def random_requests(seed: int, count: int) -> list[Request]:
    """The same requests for the same seed."""
    rng = random.Random(seed)
    return [Request(_prompt(rng), _params(rng)) for _ in range(count)]


def _prompt(rng: random.Random) -> list[int]:
    if rng.random() < 0.4:
        return [rng.randrange(3, 2000) for _ in range(rng.randint(1, 60))]
    part = [rng.randrange(3, 2000) for _ in range(rng.randint(1, 9))]
    return (part * rng.randint(2, 8))[: rng.randint(1, 70)]


def _params(rng: random.Random) -> SamplingParams:
    def maybe(share: float, value: Any, default: Any) -> Any:
        return value if rng.random() < share else default

    temperature = rng.choice([0.0, 0.0, 0.3, 0.7, 1.0, 1.4])
    constraint = maybe(0.12, _constraint(rng), None)
    allowed = maybe(0.05, rng.sample(range(2048), 200), None)
    bad_words = maybe(0.15, [rng.choice([" the", " a", "."]), " was"], None)
    return SamplingParams(
        max_tokens=rng.randint(1, 40),
        seed=rng.randrange(1 << 40),
        n=maybe(0.25, rng.randint(2, 3), 1) if temperature else 1,
        temperature=temperature,
        top_p=maybe(0.3, rng.uniform(0.3, 1.0), 1.0),
        top_k=maybe(0.3, rng.randint(1, 60), 0),
        min_p=maybe(0.2, rng.uniform(0.0, 0.2), 0.0),
        presence_penalty=maybe(0.2, rng.uniform(-1, 1), 0.0),
        frequency_penalty=maybe(0.2, rng.uniform(-1, 1), 0.0),
        repetition_penalty=maybe(0.2, rng.uniform(0.8, 1.3), 1.0),
        logit_bias=maybe(0.15, {rng.randrange(2048): rng.uniform(-9, 9) for _ in range(5)}, None),
        allowed_token_ids=None if constraint else allowed,  # with a constraint they may leave no token
        bad_words=None if constraint else bad_words,
        min_tokens=0,
        ignore_eos=rng.random() < 0.3,
        stop=maybe(0.2, rng.sample([".", " and", "e", " in"], 2), None),
        stop_token_ids=maybe(0.2, rng.sample(range(2048), 8), None),
        logprobs=maybe(0.3, rng.randint(0, 5), None),
        prompt_logprobs=maybe(0.15, rng.randint(0, 3), None),
        structured_outputs=constraint,
    )


def _constraint(rng: random.Random) -> StructuredOutputsParams:
    return rng.choice(
        [
            StructuredOutputsParams(json=_SCHEMA),
            StructuredOutputsParams(regex=r"(red|green) [0-9]{2,5}(, [a-z]{1,6})*"),
            StructuredOutputsParams(choice=["a dragon", "a dragonfly", "the lake"]),
        ]
    )


def make_llm(speculative: dict[str, Any] | None = None, **entries: Any) -> LLM:
    """The demo model in float32 with few blocks, so that requests are preempted."""
    entries = {"max_model_len": 256, "max_num_seqs": 12, "num_kv_blocks": 70, "dtype": "float32"} | entries
    if speculative is not None:
        entries["speculative_config"] = speculative
    llm = LLM(DEMO_MODEL, **entries)
    if (drafts := drafts_of(llm)) is not None:
        drafts.free_rows = drafts.costs = None  # also on a busy machine, on which no draft looks as if it paid
    return llm


def drafts_of(llm: LLM) -> Any:
    """The scheduler's part that chooses drafts, which counts them too; None: the engine does not speculate."""
    return llm._client._core.scheduler.drafts


def answer(llm: LLM, requests: Sequence[Request]) -> list[Any]:
    """What an engine returns for the requests, all at once."""
    prompts = [{"prompt_token_ids": request.prompt} for request in requests]
    return list(llm.generate(prompts, [request.params for request in requests], use_tqdm=False))


def abandon(llm: LLM, requests: Sequence[Request], after: int) -> None:
    """Start the requests and abort them after some outputs."""
    prompts = [{"prompt_token_ids": request.prompt} for request in requests]
    stream = llm.stream(prompts, [request.params for request in requests])
    for _, _output in zip(range(after), stream, strict=False):
        pass
    stream.close()


def compare(reference: LLM, requests: Sequence[Request], expected: Sequence[Any], found: Sequence[Any]) -> int:
    """Fail unless the answers are the same in the sense above. Returns how many tokens were compared."""
    num_tokens, ties = 0, []
    for request, one, other in zip(requests, expected, found, strict=True):
        _compare_logprobs(one.prompt_logprobs, other.prompt_logprobs)
        for left, right in zip(one.outputs, other.outputs, strict=True):
            num_tokens += len(left.token_ids)
            if list(left.token_ids) == list(right.token_ids):
                assert (left.text, left.finish_reason, left.stop_reason) == (
                    right.text,
                    right.finish_reason,
                    right.stop_reason,
                )
                _compare_logprobs(left.logprobs, right.logprobs)
            else:
                ties.append(_near_tie(reference, request, list(left.token_ids), list(right.token_ids)))
    for tie in ties:
        print(tie)
    assert len(ties) <= max(1, MAX_SHARE * num_tokens), f"{len(ties)} near ties in {num_tokens} positions"
    return num_tokens


def _compare_logprobs(left: Any, right: Any) -> None:
    assert (left is None) == (right is None)
    for one, other in zip(left or (), right or (), strict=True):
        if one is None or other is None:
            assert one is other
            continue
        values = [[each.logprob for each in tokens.values()] for tokens in (one, other)]
        np.testing.assert_allclose(sorted(values[0]), sorted(values[1]), atol=1e-4)
        assert next(iter(one)) == next(iter(other)), "not the same token was drawn"


def _near_tie(reference: LLM, request: Request, expected: list[int], found: list[int]) -> str:
    """Describe where two outputs differ first. Fails if the model's logits of the two tokens are further apart than
    rounding explains; only for a greedy request whose logits nothing changes can that be said."""
    place = next(i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b)
    params = request.params
    text = f"prompt of {len(request.prompt)} tokens, output position {place}: {found[place]}, not {expected[place]}"
    if params.temperature == 0.0 and params.logit_bias is None and params.structured_outputs is None:
        single = SamplingParams(temperature=0.0, max_tokens=1, logprob_token_ids=[expected[place], found[place]])
        single.logprobs = 0
        (output,) = reference.generate(
            [{"prompt_token_ids": request.prompt + expected[:place]}], single, use_tqdm=False
        )
        values = output.outputs[0].logprobs[0]
        gap = abs(values[expected[place]].logprob - values[found[place]].logprob)
        is_plain = params.repetition_penalty == 1.0 and not params.presence_penalty and not params.frequency_penalty
        assert gap < MAX_GAP or not is_plain, f"{text}, {gap} apart"
    return f"near tie: {text}"
