"""Asks two servers the same and compares their texts exactly: one engine against prefill and decode apart.

    tokenloom serve MODEL --dtype float32 --port 8000
    tokenloom serve MODEL --dtype float32 --port 8100 --prefill 1 --decode 1 --pd-threshold 0
    python -m benchmarks.mesh.accuracy_check http://127.0.0.1:8000 http://127.0.0.1:8100

Plain HTTP and nothing of Tokenloom's, as any client would ask. In float32: lower precision rounds differently in
batches of different shapes, whatever the engines.
"""

import argparse
import itertools
import json
import random
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TIMEOUT_SECONDS = 600.0
_QUESTIONS = (
    "Tell me a story about a dragon.",
    "Who lived in the little house by the sea?",
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):",
    "1, 1, 2, 3, 5, 8,",
)
_WORDS = ("the", "a", "small", "old", "red", "dog", "cat", "bird", "tree", "house", "ran", "saw", "and", "then")


@dataclass(frozen=True)
class Case:
    """One request, but for the model's name."""

    prompt: str
    sampling: dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """A case whose answers are not equal."""

    case: Case
    baseline: str
    candidate: str

    def __str__(self) -> str:
        same = len(_common_prefix(self.baseline, self.candidate))
        return (
            f"{self.case.prompt[:60]!r} {self.case.sampling}: equal for {same} characters, "
            f"then {self.baseline[same:][:40]!r} and {self.candidate[same:][:40]!r}"
        )


def make_prompts(longest: int, seed: int = 0) -> list[str]:
    """Questions, and running text of 1 to ``longest`` words, each length twice with a common first half."""
    rng = random.Random(seed)
    prompts = list(_QUESTIONS)
    length = 1
    while length <= longest:
        words = rng.choices(_WORDS, k=length)
        prompts.append(" ".join(words))
        prompts.append(" ".join(words[: length // 2] + rng.choices(_WORDS, k=length - length // 2)))
        length = length * 2 + 1
    return prompts


def make_cases(prompts: Sequence[str], max_tokens: int) -> list[Case]:
    """Every prompt greedily, and with seeded sampling."""
    seeded = ({"temperature": 0.8, "top_p": 0.95, "seed": seed} for seed in itertools.count(1))
    return [
        Case(prompt, {"max_tokens": max_tokens, **sampling})
        for prompt in prompts
        for sampling in ({"temperature": 0}, next(seeded))
    ]


def compare(baseline: str, candidate: str, cases: Sequence[Case], concurrency: int) -> Iterator[Difference]:
    """Asks both servers, ``concurrency`` requests at a time at each; yields what differs, in order."""
    models = [model_of(url) for url in (baseline, candidate)]
    with ThreadPoolExecutor(concurrency) as one, ThreadPoolExecutor(concurrency) as other:
        answers = [
            pool.map(lambda case, url=url, model=model: complete(url, model, case), cases)
            for pool, url, model in zip((one, other), (baseline, candidate), models, strict=True)
        ]
        for case, first, second in zip(cases, *answers, strict=True):
            if first != second:
                yield Difference(case, first, second)


def model_of(url: str) -> str:
    """The first model that a server offers."""
    name: str = _get_json(f"{url}/v1/models")["data"][0]["id"]
    return name


def complete(url: str, model: str, case: Case) -> str:
    """One answer's text. Raises ``OSError`` for anything but an answer."""
    body = json.dumps({"model": model, "prompt": case.prompt, **case.sampling}).encode()
    text: str = _get_json(f"{url}/v1/completions", body)["choices"][0]["text"]
    return text


def _get_json(url: str, body: bytes | None = None) -> Any:
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
        return json.load(response)


def _common_prefix(a: str, b: str) -> str:
    return "".join(x for x, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def main() -> int:
    """0: all equal; 1: some differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baseline", help="URL of the server that is right")
    parser.add_argument("candidate", help="URL of the server to be checked")
    parser.add_argument("--prompts", type=Path, help="file with a prompt on each line; by default made up")
    parser.add_argument("--longest", type=int, default=1000, help="words of the longest prompt made up")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=4, help="requests at a time at each server")
    arguments = parser.parse_args()
    prompts = arguments.prompts.read_text().splitlines() if arguments.prompts else make_prompts(arguments.longest)
    cases = make_cases(prompts, arguments.max_tokens)
    urls = (arguments.baseline.rstrip("/"), arguments.candidate.rstrip("/"))
    count = 0
    for difference in compare(*urls, cases, arguments.concurrency):
        count += 1
        print(difference)
    print(f"{len(cases) - count} of {len(cases)} answers are equal")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
