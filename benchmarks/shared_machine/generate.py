"""The process that ``bench shared`` measures: an engine that generates batches as it is asked to."""

import json
import sys
import time
from collections.abc import Sequence
from typing import Any


def batch_rate(llm: Any, requests: int, tokens: int, seconds: float) -> float:
    """Return the tokens/s of batches that are repeated for at least ``seconds``. Every request generates ``tokens``."""
    from tokenloom import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = [{"prompt_token_ids": [1 + (request * 37 + i) % 200 for i in range(16)]} for request in range(requests)]
    done, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        llm.generate(prompts, sampling, use_tqdm=False)
        done += requests * tokens
    return done / elapsed


def main(arguments: Sequence[str]) -> None:
    """Load the model, then answer each line ``REQUESTS TOKENS SECONDS`` of standard input with tokens/s."""
    from tokenloom import LLM

    model, options = arguments[0], json.loads(arguments[1])
    llm = LLM(model, **options)
    print("ready", flush=True)
    try:
        for line in sys.stdin:
            requests, tokens, seconds = line.split()
            print(batch_rate(llm, int(requests), int(tokens), float(seconds)), flush=True)
    finally:
        llm.close()


if __name__ == "__main__":
    main(sys.argv[1:])
