"""Speculation over a real model: whatever a request carries and whatever happens to it, on and off give the same.

``python -m tests.parity.test_speculation --requests 1000`` compares many random requests.
"""

import argparse

import pytest

from tests.parity.random_requests import random_request
from tests.parity.test_async_scheduling import Followed, core_of, token_ids, told, weights
from tokenloom import LLM

CROWDED = 24
"""KV blocks with which requests preempt each other."""


def make_llm(method: str = "", *, num_blocks: int = CROWDED) -> LLM:
    config = {"method": method, "num_speculative_tokens": 4} if method else None
    if config is not None and method != "ngram":
        config["model"] = {"draft_model": "draft"}.get(method, method)
    return LLM(
        "tokenloom-demo",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=12,
        max_num_batched_tokens=48,
        num_gpu_blocks_override=num_blocks,
        speculative_config=config,
    )


@pytest.fixture(scope="module")
def pair():
    """With drafts, and without."""
    llms = [make_llm("ngram"), make_llm()]
    core_of(llms[0]).scheduler.drafts.free_rows = None  # not what a busy machine has measured
    yield llms
    for llm in llms:
        llm.close()


def differences(llms: list[LLM], seeds: range) -> list[str]:
    """Generates with both, and describes each request that differs."""
    prompts, params = zip(*map(random_request, seeds), strict=True)
    on, off = (llm.generate(list(prompts), list(params), use_tqdm=False) for llm in llms)
    found = []
    for seed, drafted, plain in zip(seeds, on, off, strict=True):
        if told(drafted) != told(plain):
            found.append(f"seed {seed}: {told(drafted)} with drafts, {told(plain)} without")
        elif any(a != pytest.approx(b, abs=1e-4) for a, b in zip(weights(drafted), weights(plain), strict=True)):
            found.append(f"seed {seed}: log probabilities differ by more than 1e-4")
    return found


def test_random_requests(pair):
    assert not differences(pair, range(16))
    stats = core_of(pair[0]).scheduler.stats()
    assert stats.spec_decoding.num_accepted_tokens > 10
    assert stats.num_preemptions
    assert stats.num_free_blocks == CROWDED


def test_sessions_and_aborts(pair):
    runs = []
    for llm in pair:
        run = Followed(llm)
        first, *others = (token_ids(llm, index) for index in (1, 2, 5))
        run.add("session", first, resumable=True, temperature=0.0)
        run.add("other", token_ids(llm, 3), 30)
        run.add("aborted", token_ids(llm, 3) * 2, 60, temperature=0.0)
        for prompt in others:
            run.step(3)
            run.add("session", prompt, resumable=prompt is not others[-1], temperature=0.0)
        run.core.abort_requests(["aborted"])
        runs.append(run.finish())
    on, off = runs
    tokens, expected = on.tokens.pop("aborted", []), off.tokens.pop("aborted", [])
    assert tokens[: len(expected)] == expected[: len(tokens)]
    assert (on.tokens, on.ends) == (off.tokens, off.ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--method", choices=("ngram", "draft_model", "eagle"), default="ngram")
    arguments = parser.parse_args()
    llms = [make_llm(arguments.method, num_blocks=60), make_llm(num_blocks=60)]
    core_of(llms[0]).scheduler.drafts.free_rows = None
    found = []
    for start in range(0, arguments.requests, 50):
        found += differences(llms, range(start, min(start + 50, arguments.requests)))
    stats = core_of(llms[0]).scheduler.stats()
    print("\n".join(found))
    print(f"{arguments.requests} requests, {len(found)} differ; {stats.num_preemptions} preemptions")
    print(stats.spec_decoding)


if __name__ == "__main__":
    main()
