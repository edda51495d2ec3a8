"""What rounding a model costs it: both versions score the same texts, those that the unrounded one answers greedily.

    python -m tokenloom.bench.engine.quantization_check MODEL --quantization int8-dynamic

Prints, over the answers' tokens, the mean and largest change of a token's log probability, and how often both versions
agree on whether it is the likeliest.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenloom import LLM, SamplingParams
from tokenloom.offline.prompts import TokensPrompt

from ..mesh.accuracy_check import make_prompts


@dataclass(frozen=True)
class Text:
    """A prompt and its answer."""

    token_ids: list[int]
    start: int
    """Where the answer begins."""


@dataclass(frozen=True)
class Score:
    """One token of an answer, given all that comes before it."""

    logprob: float
    is_top: bool


def answer(llm: LLM, prompts: Sequence[str], max_tokens: int) -> list[Text]:
    """Every prompt with its greedy answer."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    outputs = llm.generate(list(prompts), sampling, use_tqdm=False)
    prompt_ids = [list(output.prompt_token_ids or ()) for output in outputs]
    return [Text([*ids, *o.outputs[0].token_ids], len(ids)) for ids, o in zip(prompt_ids, outputs, strict=True)]


def score(llm: LLM, texts: Sequence[Text]) -> list[Score]:
    """The tokens of all answers, in order."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    inputs = [TokensPrompt(prompt_token_ids=text.token_ids) for text in texts]
    scores = []
    for output, text in zip(llm.generate(inputs, sampling, use_tqdm=False), texts, strict=True):
        for position in range(text.start, len(text.token_ids)):
            candidates = (output.prompt_logprobs or [])[position] or {}
            found = candidates[text.token_ids[position]]
            scores.append(Score(found.logprob, found.rank == 1))
    return scores


def compare(exact: Sequence[Score], rounded: Sequence[Score]) -> dict[str, Any]:
    """The figures."""
    pairs = list(zip(exact, rounded, strict=True))
    changes = [abs(a.logprob - b.logprob) for a, b in pairs]
    return {
        "tokens": len(pairs),
        "mean_logprob_change": round(statistics.fmean(changes), 5),
        "largest_logprob_change": round(max(changes), 5),
        "same_top_token": round(statistics.fmean(a.is_top == b.is_top for a, b in pairs), 5),
    }


def main() -> None:
    """Both versions, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint directory, hub id or tokenloom-demo")
    parser.add_argument("--quantization", default="int8-dynamic")
    parser.add_argument("--prompts", type=Path, help="file with a prompt on each line; by default made up")
    parser.add_argument("--longest", type=int, default=100, help="words of the longest prompt made up")
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    prompts = arguments.prompts.read_text().splitlines() if arguments.prompts else make_prompts(arguments.longest)
    llm = LLM(arguments.model)
    texts = answer(llm, prompts, arguments.max_tokens)
    exact = score(llm, texts)
    llm.close()
    llm = LLM(arguments.model, quantization=arguments.quantization)
    rounded = score(llm, texts)
    llm.close()
    print(json.dumps({"model": arguments.model, "quantization": arguments.quantization} | compare(exact, rounded)))


if __name__ == "__main__":
    main()
